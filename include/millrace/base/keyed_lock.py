"""One turn a name: callers of the same name come one by one, callers of others beside them."""

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
    """Thread-safe. Who has a turn may take it once more. What it remembers are the names that somebody calls for now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: dict[str, _Turn] = {}

    @contextmanager
    def acquire(self, name: str, *, blocking: bool = True) -> Iterator[bool]:
        """The turn of `name` inside; without `wait`, False where another has it."""
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
        """Return when nobody has a turn or waits for one."""
        with self._changed:
            while self._turns:
                self._changed.wait()
