"""The flusher, an implementation of the range loop: brings visible rows of ``wal`` into the collections' tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import ClassVar, Final

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.flushed_segments import FlushedSegments
from millrace.node.flush.flusher import FlushPlan, FlushReport, run_flush
from millrace.node.range_loop.definition import LoopDefinition, OwnershipCheck, PendingRange, Planner, always_owned
from millrace.node.range_loop.in_process import run_to_end
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.reader import MAX_TICK, WalSnapshot

RANGE_FACTOR: Final = 4
"""Bytes of a flush relative to those of a WAL commit. Larger flushes make fewer files; memory does not grow with them.
"""


class FlushPlanner(Planner[FlushPlan, int]):
    """Plans ranges from each PChannel's checkpoint to the last tick of one version of the ``wal`` table.

    Ends are time ticks. Without a ``wal`` table there is no work.
    """

    def __init__(self, settings: Settings, up_to_tick: int = MAX_TICK) -> None:
        self._settings = settings
        self._up_to_tick = up_to_tick
        self._wal: WalSnapshot | None = None
        self._checkpoints: TableHandle | None = None
        self._read: tuple[int, dict[str, Checkpoint]] = (-1, {})
        self._idle_version = -1

    def pending(
        self,
        *,
        without: AbstractSet[str],
        only: AbstractSet[str] | None = None,
        target: Mapping[str, int] | None,
        max_bytes: int,
    ) -> Iterable[PendingRange[int]]:
        wal = self._refreshed()
        if wal is None or wal.version == self._idle_version:
            return []
        ends = self.seen() if target is None else target
        names = [name for name in ends if name not in without and (only is None or name in only)]
        plans = self._plan(wal, {name: ends[name] for name in names}, max_bytes)
        if not plans and not without and only is None:
            self._idle_version = wal.version
        return [PendingRange(plan.channel, plan.checkpoint.time_tick, plan.up_to_tick) for plan in plans]

    def plan(self, ends: Mapping[str, int], *, max_bytes: int) -> list[FlushPlan]:
        wal = self._refreshed()
        return [] if wal is None else self._plan(wal, ends, max_bytes)

    def ends(self) -> dict[str, int]:
        self._refreshed()
        return self.seen()

    def seen(self) -> dict[str, int]:
        wal = self._wal
        return {} if wal is None else {name: min(wal.last_tick(name), self._up_to_tick) for name in wal.pchannels()}

    def read_end(self, text: str) -> int:
        return int(text)

    def _plan(self, wal: WalSnapshot, ends: Mapping[str, int], max_bytes: int) -> list[FlushPlan]:
        checkpoints, plans = self._stored(), []
        for name, end in sorted(ends.items()):
            checkpoint = checkpoints.get(name, Checkpoint(name))
            tick, target = checkpoint.time_tick, min(end, wal.last_tick(name))
            if tick < target:
                start = checkpoint.confirmed
                found = wal.plan(name, start=start, after_tick=tick, up_to_tick=target, max_bytes=max_bytes)
                plans.append(FlushPlan(checkpoint, min(target, found.up_to_tick), found))
        return plans

    def _refreshed(self) -> WalSnapshot | None:
        self._wal = WalSnapshot.open(self._settings.wal_uri) if self._wal is None else self._wal.refreshed()
        return self._wal

    def _stored(self) -> dict[str, Checkpoint]:
        """Return the checkpoints of the newest version, reading them only if the version changed."""
        if self._checkpoints is None:
            self._checkpoints = open_table(self._settings.checkpoints_uri)
        else:
            self._checkpoints.refresh()
        if self._checkpoints is not None and self._checkpoints.version != self._read[0]:
            self._read = self._checkpoints.version, read_checkpoints(self._checkpoints)
        return self._read[1]


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
