"""The flusher, an implementation of the range loop: brings visible rows of ``wal`` into the collections' tables.

Files follow bytes, not seconds: a supervised flusher takes a PChannel once enough bytes wait, once they have waited
long enough, or once a message asks for it. Until then, reads take these rows from the WAL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import ClassVar, Final

import millrace.runtime.arrow_without_pandas  # noqa: F401 - first, before an array is made
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.base.settings.live import LiveSettings
from millrace.message.types import MessageType
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.flushed_segments import FlushedSegments
from millrace.node.flush.flusher import FlushPlan, FlushReport, run_flush
from millrace.node.flush.folds import FlushedFiles
from millrace.node.range_loop.definition import LoopDefinition, OwnershipCheck, PendingRange, Planner, always_owned
from millrace.node.range_loop.in_process import run_to_end
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.reader import MAX_TICK, WalSnapshot, read_range

LOOK_SECONDS: Final = 2.0
"""Maximum pause between two looks for PChannels that are due."""

ASKING_TYPES: Final = (MessageType.MANUAL_FLUSH.name, MessageType.FLUSH_ALL.name)
"""Messages whose sender waits for the flush."""

RANGE_FACTOR: Final = 4
"""Bytes of a flush relative to those of a WAL commit. Larger flushes make fewer files; memory does not grow with them.
"""


class FlushPlanner(Planner[FlushPlan, int]):
    """Plans ranges from each PChannel's checkpoint to the last tick of one version of the ``wal`` table.

    Ends are time ticks. Without a ``wal`` table there is no work. Without a target, a PChannel has work once it is due
    (:class:`FlushCadence`).
    """

    def __init__(
        self, settings: Settings, up_to_tick: int = MAX_TICK, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._up_to_tick = up_to_tick
        self._cadence = FlushCadence(settings, clock=clock)
        self._clock = clock
        self._wal: WalSnapshot | None = None
        self._checkpoints: TableHandle | None = None
        self._read: tuple[int, dict[str, Checkpoint]] = (-1, {})
        self._quiet: tuple[tuple[object, ...], float] = ((), 0.0)
        """Findings of the last look without work, and the time until which it need not be repeated."""

    def pending(
        self,
        *,
        without: AbstractSet[str],
        only: AbstractSet[str] | None = None,
        target: Mapping[str, int] | None,
        max_bytes: int,
    ) -> Iterable[PendingRange[int]]:
        wal = self._refreshed() if target is not None else self._polled()
        if wal is None:
            return []
        seen = (wal.version, without, only, target is None)
        if seen == self._quiet[0] and self._clock() < self._quiet[1]:
            return []
        ends = self.seen() if target is None else target
        names = [name for name in ends if name not in without and (only is None or name in only)]
        plans = self._plan(wal, {name: ends[name] for name in names}, max_bytes)
        until = inf
        if target is None:
            plans, until = self._cadence.due(wal, plans)
        self._quiet = (() if plans else seen, until)
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

    def _polled(self) -> WalSnapshot | None:
        if self._wal is None:
            return self._refreshed()
        self._wal = self._wal.polled()
        return self._wal

    def _stored(self) -> dict[str, Checkpoint]:
        """Return the checkpoints of the newest version, reading them only if the version changed."""
        if self._checkpoints is None:
            self._checkpoints = open_table(self._settings.checkpoints_uri)
        else:
            self._checkpoints.poll()  # a plan from an older checkpoint is fenced
        if self._checkpoints is not None and self._checkpoints.version != self._read[0]:
            self._read = self._checkpoints.version, read_checkpoints(self._checkpoints)
        return self._read[1]


@dataclass(slots=True)
class _Waiting:
    """A PChannel that has rows to flush and was not due yet."""

    base: int
    """The tick of its checkpoint."""
    since: float
    """Time at which a look first found rows after it."""
    seen_tick: int
    """Tick up to which no message asks for the flush."""


class FlushCadence:
    """Decides which PChannels to flush now: by the bytes and the age of what waits, or because a message asks.

    What already waits when a flusher starts is due at once, since its age is not known.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = LiveSettings(settings, clock=clock)
        self._set(self._live.current())
        self._clock = clock
        self._started = False
        self._waiting: dict[str, _Waiting] = {}

    def _set(self, settings: Settings) -> None:
        self._by = settings
        self._bytes = settings.flush_bytes
        limits = (settings.flow_lag_slow, settings.flow_lag_reject)
        wait = settings.publish_interval if settings.publish and settings.publish_interval else inf
        published = max(wait - settings.wal_linger, wait / 2)  # rows have waited for `wal` already
        # Flow control must not throttle appends for a lag that the flusher has on purpose.
        self._seconds = min(settings.flush_interval, published, *(limit / 2 for limit in limits if limit))

    def due(self, wal: WalSnapshot, plans: Sequence[FlushPlan]) -> tuple[list[FlushPlan], float]:
        """Return those of `plans` that are due, and the time at which the next one is, if the WAL stays as it is."""
        if (settings := self._live.current()) is not self._by:
            self._set(settings)
        now, waiting = self._clock(), {}
        for plan in plans:
            base, known = plan.checkpoint.time_tick, self._waiting.get(plan.channel)
            if known is None or known.base != base:
                known = _Waiting(base, now if self._started else -inf, base)
            waiting[plan.channel] = known
        self._started, self._waiting = True, waiting
        oldest = min((each.since for each in waiting.values()), default=inf)
        # Others that have waited for half as long join: PChannels of one collection are flushed together.
        limit = self._seconds / 2 if now - oldest >= self._seconds else inf
        found = []
        for plan in plans:
            known = waiting[plan.channel]
            if now - known.since >= limit or self._asks(wal, plan, known):
                found.append(plan)
        return found, oldest + self._seconds

    def _asks(self, wal: WalSnapshot, plan: FlushPlan, known: _Waiting) -> bool:
        """Return whether enough bytes wait or a message asks. Reads the types of each message once."""
        if sum(file.size for file in plan.range.files if file.last_tick > plan.checkpoint.time_tick) >= self._bytes:
            return True
        news = wal.plan(plan.channel, after_tick=known.seen_tick, up_to_tick=plan.up_to_tick)
        if any(True for _ in read_range(wal.store, news, types=ASKING_TYPES, columns=["type"])):
            return True
        known.seen_tick = plan.up_to_tick
        return False


@dataclass(frozen=True)
class FlushLoop(LoopDefinition[FlushPlan, FlushReport]):
    """The flush loop of one deployment. A PChannel that cannot be flushed is retried with back-off, never parked."""

    name: ClassVar[str] = "flusher"
    settings: Settings
    up_to_tick: int = MAX_TICK

    @cached_property
    def live(self) -> LiveSettings:
        """The settings as they are now."""
        return LiveSettings(self.settings)

    @property
    def max_bytes(self) -> int:
        return RANGE_FACTOR * self.live.current().max_bytes_per_trigger

    @property
    def interval(self) -> float:
        return min(self.live.current().flush_interval, LOOK_SECONDS)

    def planner(self) -> FlushPlanner:
        return FlushPlanner(self.settings, self.up_to_tick)

    def run(self, plan: FlushPlan) -> FlushReport:
        return run_flush(self.settings, plan)

    def committer(self, metrics: Metrics | None, *, holds: OwnershipCheck = always_owned) -> FlushCommitter:
        return FlushCommitter(self.settings, metrics=metrics, holds=holds)

    def watch(self, metrics: Metrics) -> Callable[[Sequence[FlushReport]], None]:
        segments, files = FlushedSegments(self.settings), FlushedFiles(self.settings, metrics)

        def record(committed: Sequence[FlushReport]) -> None:
            segments.record(committed)
            files.record(committed)

        return record


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
