"""The size of a bulk: halved when the cluster asks for less, a quarter larger after each success, within the limits.

A size that was refused as too large (413) is approached by a fiftieth at a time.
"""

from __future__ import annotations

import threading

_LEAST_BYTES = 64 << 10
_QUICK, _SLOW = 4, 50
"""The inverse share by which the size grows after a success."""


class Window:
    """The size limits, shared by all requests of a task. Thread-safe."""

    def __init__(self, *, items: int, size: int) -> None:
        """`items` and `size` (bytes) are the flush limits."""
        self._most_items, self._most_bytes = items, size
        self.items, self.bytes = items, size
        self._lock = threading.Lock()
        self._part = _QUICK

    def shrink(self) -> None:
        with self._lock:
            self._part = _QUICK
            self.items = max(1, self.items // 2)
            self.bytes = max(min(_LEAST_BYTES, self._most_bytes), self.bytes // 2)

    def fit(self, size: int) -> None:
        """Note that a bulk of `size` bytes was refused as too large."""
        with self._lock:
            self._part = _SLOW
            self.bytes = max(1, min(self.bytes, size // 2))

    def grow(self) -> None:
        with self._lock:
            self.items = min(self._most_items, self.items + self.items // self._part + 1)
            self.bytes = min(self._most_bytes, self.bytes + self.bytes // self._part + 1)
