"""Concurrent calls as an argument, so that a simulation can replace threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from millrace.base.closeable import Closeable

RunAll = Callable[[Sequence[Callable[[], None]]], None]
"""Runs all calls and returns when all have returned. Raises the error of one of them."""

MAX_THREADS: Final = 16


def run_sequentially(calls: Sequence[Callable[[], None]]) -> None:
    """Run the calls one after the other (a RunAll)."""
    for call in calls:
        call()


class ThreadRunner(Closeable):
    """Run calls in threads (a RunAll). Thread-safe. A single call runs in the calling thread."""

    def __init__(self, name: str, *, max_threads: int = MAX_THREADS) -> None:
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix=name)

    def __call__(self, calls: Sequence[Callable[[], None]]) -> None:
        if len(calls) == 1:
            calls[0]()
            return
        for made in [self._pool.submit(call) for call in calls]:
            made.result()

    def close(self) -> None:
        self._pool.shutdown()
