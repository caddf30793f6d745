"""Plans the flusher's next ranges: from each PChannel's checkpoint to the last tick of one version of the ``wal``
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from millrace.base.settings import Settings
from millrace.node.flush.flusher import FlushPlan
from millrace.node.range_loop.definition import PendingRange, Planner
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.reader import MAX_TICK, WalSnapshot


class FlushPlanner(Planner[FlushPlan, int]):
    """Plans flushes. Ends are time ticks. Without a ``wal`` table there is no work."""

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
