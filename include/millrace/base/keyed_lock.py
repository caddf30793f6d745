"""A reentrant lock for each key: callers with the same key take turns, others run concurrently."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Turn:
    lock: threading.RLock = field(default_factory=threading.RLock)
    callers: int = 0


class KeyedLock:
    """A reentrant lock for each name. Thread-safe. Holds only the names that are in use."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: dict[str, _Turn] = {}

    @contextmanager
    def acquire(self, name: str, *, blocking: bool = True) -> Iterator[bool]:
        """Hold the lock of `name` inside the block.

        Yields False if `blocking` is False and another thread holds it.
        """
        with self._changed:
            turn = self._turns.setdefault(name, _Turn())
            turn.callers += 1
        taken = False
        try:
            taken = turn.lock.acquire(blocking=blocking)
            yield taken
        finally:
            if taken:
                turn.lock.release()
            with self._changed:
                turn.callers -= 1
                if not turn.callers:
                    del self._turns[name]
                    self._changed.notify_all()

    def wait_idle(self) -> None:
        """Wait until no thread holds a lock or waits for one."""
        with self._changed:
            while self._turns:
                self._changed.wait()
