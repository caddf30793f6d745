"""Time as the coordinator's parts take it: an argument, so that a simulation can stand in for it."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since some moment; it goes on through suspension, and no setting of the wall clock moves it."""
        ...

    def wall(self) -> float:
        """Unix seconds, to be shown: nothing is decided by them."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)
