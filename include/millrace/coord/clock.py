"""Time as an argument, so that a simulation can replace the clock."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment. The clock counts suspension and ignores changes of the wall
        clock.
        """
        ...

    def wall(self) -> float:
        """Return Unix seconds for display. No decision depends on them."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The clock of this machine (CLOCK_BOOTTIME)."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)
