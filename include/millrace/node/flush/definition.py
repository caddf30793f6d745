"""The flusher, an implementation of the range loop: brings visible rows of ``wal`` into the collections' tables."""

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
from millrace.node.range_loop.in_process import run_to_end
from millrace.tables.wal.reader import MAX_TICK

RANGE_FACTOR: Final = 4
"""Bytes of a flush relative to those of a WAL commit. Larger flushes make fewer files; memory does not grow with them.
"""


@dataclass(frozen=True)
class FlushLoop(LoopDefinition[FlushPlan, FlushReport]):
    """The flush loop of one deployment. A PChannel that cannot be flushed is retried with back-off, never parked."""

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


def flush_to_end(
    settings: Settings,
    *,
    up_to_tick: int = MAX_TICK,
    max_bytes: int | None = None,
    metrics: Metrics | None = None,
) -> dict[str, int]:
    """Flush what the WAL holds now, up to `up_to_tick`, in ranges of about `max_bytes`. Returns each PChannel's reached
    tick.

    Raises as :func:`run_to_end` what keeps a PChannel from being flushed: ChannelParked, Malformed, StagedFileDamaged,
    TableUnavailable.
    """
    committer = FlushCommitter(settings, metrics=metrics)
    return run_to_end(FlushLoop(settings, up_to_tick), committer, max_bytes=max_bytes or settings.max_bytes_per_trigger)
