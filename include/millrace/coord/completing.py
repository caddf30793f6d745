"""Who served DDL may have died in it, or had to leave it for a PChannel that was away: such broadcasts are completed by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millrace.runtime.periodic import Periodic

if TYPE_CHECKING:
    from millrace.coord.coordinator import Coordinator

PAUSE: Final = 10.0


class Completing(Periodic):
    """What lies there as it starts, at once; then every PAUSE seconds what was kept longer ago than that: who kept the rest is at it."""

    def __init__(self, coordinator: Coordinator, *, pause: float = PAUSE) -> None:
        super().__init__(name="complete-broadcasts", pause=pause, at_once=True)
        self._coordinator = coordinator
        self._older = 0.0

    def work(self) -> None:
        self._coordinator.resume(older=self._older)
        self._older = self._pause
