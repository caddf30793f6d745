"""A fair lock: callers get it in the order in which they asked, so a busy one starves nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class FairLock:
    """A first-come, first-served lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._now = 0
        self._passed: set[int] = set()

    @property
    def contended(self) -> bool:
        """Whether another caller waits for the lock."""
        return self._next - self._now > 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock while the block runs."""
        with self._changed:
            mine = self._next
            self._next += 1
            try:
                while self._now != mine:
                    self._changed.wait(1.0)
            except BaseException:  # interrupted during the wait
                self._passed.add(mine)
                self._pass_by()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._now += 1
                self._pass_by()

    def _pass_by(self) -> None:
        while self._now in self._passed:
            self._passed.remove(self._now)
            self._now += 1
        self._changed.notify_all()
