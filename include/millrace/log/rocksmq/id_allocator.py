"""Allocation of entry numbers: chapter 4's ``IDAllocator``.

By default each channel of RocksMQ numbers its own entries, ``max(last + 1, now_ms << 18)`` and then consecutive. With
an allocator, the numbers of all channels come from it: :class:`TickIdAllocator` uses each number once over all of
them. The upper bits of a number are the entry's append stamp in Unix milliseconds, which the chain uses as time, and
the numbers of a channel increase. So an allocator must compose numbers in the same way and never go back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from millrace.base.errors import InvalidArgument
from millrace.log.clock import wall_clock_ms
from millrace.message.ids import LOGICAL_BITS


class IdAllocator(Protocol):
    """Allocates 64-bit numbers, each once. Thread-safe."""

    def alloc(self, count: int) -> tuple[int, int]:
        """Allocate `count` consecutive numbers above all earlier ones; return the first, and the one after the last."""
        ...

    def alloc_one(self) -> int:
        """Allocate one number."""
        ...

    def update_id(self) -> None:
        """Skip numbers that are in use elsewhere. Called when an allocated number was too low."""
        ...


class TickIdAllocator:
    """Numbers of a timestamp and a counter, like time ticks. `first` must be above all numbers allocated before."""

    def __init__(self, *, now_ms: Callable[[], int] = wall_clock_ms, first: int = 0) -> None:
        self._now_ms = now_ms
        self._next = first
        self._lock = threading.Lock()

    def alloc(self, count: int) -> tuple[int, int]:
        """See IdAllocator.

        Raises InvalidArgument for a count below 1.
        """
        if count < 1:
            raise InvalidArgument(f"cannot allocate {count} numbers: the count must be at least 1")
        with self._lock:
            begin = max(self._next, self._now_ms() << LOGICAL_BITS)
            self._next = begin + count
        return begin, begin + count

    def alloc_one(self) -> int:
        """See IdAllocator."""
        return self.alloc(1)[0]

    def update_id(self) -> None:
        """See IdAllocator: skip to the present moment."""
        with self._lock:
            self._next = max(self._next, self._now_ms() << LOGICAL_BITS)
