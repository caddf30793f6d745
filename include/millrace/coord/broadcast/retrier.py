"""Retries broadcasts that a crashed coordinator, an unreachable PChannel or a failed callback left unfinished."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from millrace.runtime.periodic import PeriodicTask

if TYPE_CHECKING:
    from millrace.base.metrics import Metrics
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

    def export(self, metrics: Metrics) -> None:
        """Export the number of open broadcasts and the age of the oldest, read on each scrape."""

        def oldest() -> float:
            ages = [time.time() - each.at for each in self._coordinator.open_broadcasts() if each.at]
            return max([0.0, *ages])  # a clock that was put back gives no age

        metrics.coord_broadcasts_open.set_function(lambda: float(len(self._coordinator.open_broadcasts())))
        metrics.coord_broadcast_oldest_seconds.set_function(oldest)

    def run_once(self) -> None:
        self._coordinator.resume(min_age=self._older)
        self._older = self._pause
