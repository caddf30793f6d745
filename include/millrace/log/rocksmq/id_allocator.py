"""Who gives a log's entries their numbers: chapter 4's ``IDAllocator``.

Without one each channel of RocksMQ numbers its own entries, ``max(last + 1, now_ms << 18)`` and then consecutive. With one, the
numbers of all its channels come from there: :class:`TickIdAllocator` gives each number once over all of them. The upper bits of
a number are the append stamp of its entry in Unix milliseconds, which the chain takes as the time, and numbers of a
channel increase; so an allocator composes its numbers in the same way, and never goes back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from millrace.base.errors import InvalidArgument
from millrace.log.clock import wall_clock_ms
from millrace.message.ids import LOGICAL_BITS


class IdAllocator(Protocol):
    """Gives out 64-bit numbers, each once. Thread-safe."""

    def alloc(self, count: int) -> tuple[int, int]:
        """`count` consecutive numbers, greater than all before: the first, and the one behind the last."""
        ...

    def alloc_one(self) -> int:
        """One number."""
        ...

    def update_id(self) -> None:
        """Go past what was given out elsewhere: called where a number was not greater than one that is in use."""
        ...


class TickIdAllocator:
    """Numbers of a timestamp and a counter, as time ticks are; `first` lies above all that others gave out before."""

    def __init__(self, *, now_ms: Callable[[], int] = wall_clock_ms, first: int = 0) -> None:
        self._now_ms = now_ms
        self._next = first
        self._lock = threading.Lock()

    def alloc(self, count: int) -> tuple[int, int]:
        """See IdAllocator. Raises InvalidArgument for a count below 1."""
        if count < 1:
            raise InvalidArgument(f"{count} numbers: ask for 1 or more")
        with self._lock:
            begin = max(self._next, self._now_ms() << LOGICAL_BITS)
            self._next = begin + count
        return begin, begin + count

    def alloc_one(self) -> int:
        """See IdAllocator."""
        return self.alloc(1)[0]

    def update_id(self) -> None:
        """See IdAllocator: to the present moment."""
        with self._lock:
            self._next = max(self._next, self._now_ms() << LOGICAL_BITS)
