"""Messages of a broadcast to many VChannels go out together, by threads (a Together of the broadcaster)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from millrace.base.closing import Closing

AT_ONCE: Final = 16


class Threads(Closing):
    """Starts none before there is more than one call to make. Thread-safe."""

    def __init__(self, *, at_once: int = AT_ONCE) -> None:
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="broadcast")

    def __call__(self, calls: Sequence[Callable[[], None]]) -> None:
        if len(calls) == 1:
            calls[0]()
            return
        for made in [self._pool.submit(call) for call in calls]:
            made.result()

    def close(self) -> None:
        self._pool.shutdown()
