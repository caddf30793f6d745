"""Several calls at the same time: an argument, so that a simulation can stand in for threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from millrace.base.closeable import Closeable

RunAll = Callable[[Sequence[Callable[[], None]]], None]
"""Calls all of them, and returns when all have returned. Raises what one of them raises."""

MAX_THREADS: Final = 16


def run_sequentially(calls: Sequence[Callable[[], None]]) -> None:
    """One after the other (a Together)."""
    for call in calls:
        call()


class ThreadRunner(Closeable):
    """By threads (a Together). Starts none before there is more than one call to make. Thread-safe."""

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
