"""Retries DDL broadcasts that a crashed coordinator, or an unreachable PChannel, left unfinished."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millrace.runtime.periodic import PeriodicTask

if TYPE_CHECKING:
    from millrace.coord.coordinator import Coordinator

RETRY_SECONDS: Final = 10.0


class BroadcastRetrier(PeriodicTask):
    """Resume open broadcasts periodically.

    The first run takes all of them: their coordinator is gone.
    Later runs take those older than the interval, because a younger one is still being sent by its own process.
    """

    def __init__(self, coordinator: Coordinator, *, pause: float = RETRY_SECONDS) -> None:
        super().__init__(name="complete-broadcasts", interval=pause, run_at_start=True)
        self._coordinator = coordinator
        self._older = 0.0

    def run_once(self) -> None:
        self._coordinator.resume(min_age=self._older)
        self._older = self._pause
