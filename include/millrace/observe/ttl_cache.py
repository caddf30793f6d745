"""A small TTL cache for expensive answers: one caller computes, others wait for the result or use the last one."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

T = TypeVar("T")

MAX_KEYS: Final = 256


class TtlCache:
    """Answers by key, each with its own time to live. Thread-safe. Failures are not cached."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, most_keys: int = MAX_KEYS) -> None:
        self._clock = clock
        self._most = most_keys
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._asking: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, seconds: float, ask: Callable[[], T]) -> T:
        """Return the answer to `key`, at most `seconds` old. `ask` runs in one thread at a time per key."""
        with self._lock:
            found = self._answers.get(key)
            if found is not None and self._clock() - found[0] < seconds:
                self._answers.move_to_end(key)
                return found[1]
            turn = self._asking.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                found = self._answers.get(key)
                if found is not None and self._clock() - found[0] < seconds:
                    return found[1]
            answer = ask()
            with self._lock:
                self._answers[key] = (self._clock(), answer)
                self._answers.move_to_end(key)
                while len(self._answers) > self._most:
                    gone, _ = self._answers.popitem(last=False)
                    self._asking.pop(gone, None)
            return answer
