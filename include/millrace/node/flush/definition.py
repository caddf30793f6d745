"""The flusher: what is visible in ``wal`` into the collections' tables, as one user of the range loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.flushed_segments import FlushedSegments
from millrace.node.flush.flusher import FlushPlan, FlushReport, run_flush
from millrace.node.flush.planner import FlushPlanner
from millrace.node.range_loop.definition import LoopDefinition, OwnershipCheck, always_owned
from millrace.tables.wal.reader import MAX_TICK

RANGE_FACTOR: Final = 4
"""A flush takes so many times the bytes of a WAL commit: its memory does not grow with them, while files and commits get fewer."""


@dataclass(frozen=True)
class FlushLoop(LoopDefinition[FlushPlan, FlushReport]):
    """Of one deployment. A PChannel that cannot be flushed is tried again, ever later; `parked` is about the log's entries."""

    name: ClassVar[str] = "flusher"
    settings: Settings
    up_to_tick: int = MAX_TICK

    @property
    def max_bytes(self) -> int:
        return RANGE_FACTOR * self.settings.max_bytes_per_trigger

    @property
    def interval(self) -> float:
        return self.settings.flush_interval

    def planner(self) -> FlushPlanner:
        return FlushPlanner(self.settings, self.up_to_tick)

    def run(self, plan: FlushPlan) -> FlushReport:
        return run_flush(self.settings, plan)

    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> FlushCommitter:
        return FlushCommitter(self.settings, metrics=metrics, holds=holds)

    def watch(self, metrics: Metrics) -> Callable[[Sequence[FlushReport]], None]:
        return FlushedSegments(self.settings).record
