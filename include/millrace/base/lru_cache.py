"""A cache of bounded cost that drops what was not used for longest. Thread-safe.

For values that never change; functools.lru_cache serves pure functions of small arguments.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Values by key, as long as their costs together are at most `limit`. The newest value is always kept."""

    def __init__(self, limit: int, *, cost: Callable[[K, V], int] = lambda key, value: 1) -> None:
        self._limit = limit
        self._cost = cost
        self._total = 0
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        with self._lock:
            if key in self._values:
                self._total -= self._cost(key, self._values.pop(key))
            self._values[key] = value
            self._total += self._cost(key, value)
            while self._total > self._limit and len(self._values) > 1:
                self._total -= self._cost(*self._values.popitem(last=False))

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._total = 0
