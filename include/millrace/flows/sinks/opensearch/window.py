"""The size of a bulk: halved when the cluster asks for less, a quarter larger after each success, within the limits."""

from __future__ import annotations

import threading

_LEAST_BYTES = 64 << 10


class Window:
    """Thread-safe: all requests of a task share one."""

    def __init__(self, *, items: int, size: int) -> None:
        """`items` and `size` (bytes) are the flush limits."""
        self._most_items, self._most_bytes = items, size
        self.items, self.bytes = items, size
        self._lock = threading.Lock()

    def shrink(self) -> None:
        with self._lock:
            self.items = max(1, self.items // 2)
            self.bytes = max(min(_LEAST_BYTES, self._most_bytes), self.bytes // 2)

    def grow(self) -> None:
        with self._lock:
            self.items = min(self._most_items, self.items + self.items // 4 + 1)
            self.bytes = min(self._most_bytes, self.bytes + self.bytes // 4 + 1)
