"""Who served DDL may have died in it, or had to leave it for a PChannel that was away: such broadcasts are completed by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millrace.runtime.periodic import PeriodicTask

if TYPE_CHECKING:
    from millrace.coord.coordinator import Coordinator

RETRY_SECONDS: Final = 10.0


class BroadcastRetrier(PeriodicTask):
    """What lies there as it starts, at once; then every PAUSE seconds what was kept longer ago than that: who kept the rest is at it."""

    def __init__(self, coordinator: Coordinator, *, pause: float = RETRY_SECONDS) -> None:
        super().__init__(name="complete-broadcasts", interval=pause, run_at_start=True)
        self._coordinator = coordinator
        self._older = 0.0

    def run_once(self) -> None:
        self._coordinator.resume(min_age=self._older)
        self._older = self._pause
