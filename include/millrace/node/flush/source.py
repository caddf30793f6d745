"""The Python data source ``millrace_wal``: a row for each flush of a micro-batch, not one for each message of the WAL.

``spark.readStream.format("millrace_wal")`` plans a flush of each PChannel from the tables (millrace.node.flush.in_process), each
task writes one flush's Parquet files, and what crosses into the JVM is a report of some hundred bytes, which the driver's
foreachBatch commits (millrace.node.flush.query). Offsets are hints: a number that grows, and the ticks that a batch may
reach. A lost Spark checkpoint, or another flusher at work, needs nothing else.

Options: ``settings``, the deployment's settings as JSON of their environment; ``maxBytesPerTrigger``, bytes of WAL files that
a micro-batch takes from each PChannel.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import millrace.runtime.arrow_start  # noqa: F401 - first, before an array is made
from millrace.base.errors import InvalidSettings, MillraceError
from millrace.base.settings import Settings
from millrace.node.flush.flusher import FlushPlan, run_flush
from millrace.node.flush.in_process import plan_flushes
from millrace.node.ingest.task_memory import keep_modules
from millrace.tables.wal.reader import MAX_TICK, WalSnapshot

FORMAT: Final = "millrace_wal"
REPORT_SCHEMA: Final = pa.schema(
    [pa.field("pchannel", pa.utf8()), pa.field("report", pa.utf8()), pa.field("error", pa.utf8())]
)
"""A FlushReport as JSON, or the error that kept the PChannel from being flushed."""

UNBOUNDED: Final = 1 << 62

RANGE_FACTOR: Final = 4
"""A flush takes so many times the bytes of a WAL commit: its memory does not grow with them, while files and commits get fewer."""

_BACKOFF: Final = (0.1, 5.0)
_BOUNDED_TRIES: Final = 8


def source_options(settings: Settings) -> dict[str, str]:
    """The options of this source for a deployment."""
    return {
        "settings": json.dumps(settings.environment()),
        "maxBytesPerTrigger": str(RANGE_FACTOR * settings.max_bytes_per_trigger),
    }


class WalDataSource(DataSource):
    """Registered with ``spark.dataSource.register(WalDataSource)``."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return "pchannel STRING, report STRING, error STRING"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if not self.options.get("settings"):
            raise InvalidSettings(f"the source {FORMAT!r} needs the option settings")
        limit = self.options.get("maxBytesPerTrigger")
        return WalStreamReader(str(self.options["settings"]), UNBOUNDED if limit is None else int(limit))


class FlushPartition(InputPartition):
    """One task: one flush of one PChannel."""

    def __init__(self, plan: FlushPlan) -> None:
        self.value = plan.to_json()


@dataclass(slots=True)
class _Stall:
    """A PChannel that was planned from `tick` and is still there: planned again later and later."""

    tick: int
    pause: float
    until: float
    times: int


class WalStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans in the driver's Python worker; `read` runs in a task and knows only its plan."""

    def __init__(self, settings: str, max_bytes: int) -> None:
        self._settings_json = settings
        self._max_bytes = max_bytes
        self._wal: WalSnapshot | None = None
        self._stalls: dict[str, _Stall] = {}
        self._target: dict[str, int] | None = None
        self._idle_version = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wal": None, "_stalls": {}, "_idle_version": -1}

    @property
    def _settings(self) -> Settings:
        return Settings.load(env=json.loads(self._settings_json))

    def initialOffset(self) -> dict[str, Any]:
        return {"batch": 0, "max_bytes": 0, "ticks": {}}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self._max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        wal = self._refreshed()
        self._target = {} if wal is None else {name: wal.last_tick(name) for name in wal.pchannels()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        wal = self._refreshed()
        if wal is None or (wal.version == self._idle_version and not self._stalls):
            return start
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else UNBOUNDED
        plans = plan_flushes(self._settings, wal, max_bytes=max_bytes)
        ticks = {}
        for plan in plans:
            name, tick = plan.checkpoint.pchannel, plan.up_to_tick
            if self._target is not None:
                tick = min(tick, self._target.get(name, 0))
            if tick > plan.checkpoint.time_tick and self._may_run(name, plan.checkpoint.time_tick):
                ticks[name] = tick
        self._stalls = {
            name: stall
            for name, stall in self._stalls.items()
            if any(name == plan.checkpoint.pchannel for plan in plans)
        }
        if not plans:
            self._idle_version = wal.version
        if not ticks:
            return start
        return {"batch": int(start.get("batch", 0)) + 1, "max_bytes": max_bytes, "ticks": ticks}

    def reportLatestOffset(self) -> dict[str, Any] | None:
        wal = self._wal
        if wal is None:
            return None
        return {"batch": 0, "max_bytes": 0, "ticks": {name: wal.last_tick(name) for name in wal.pchannels()}}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        wal = self._refreshed()
        ticks = end.get("ticks") or {}
        if wal is None or not ticks:
            return []
        plans = plan_flushes(self._settings, wal, up_to_tick=MAX_TICK, max_bytes=int(end["max_bytes"]) or UNBOUNDED)
        wanted = []
        for plan in plans:
            target = ticks.get(plan.checkpoint.pchannel, 0)
            if target > plan.checkpoint.time_tick:
                wanted.append(FlushPlan(plan.checkpoint, *_until(plan, target)))
        return [FlushPartition(plan) for plan in wanted]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        plan = FlushPlan.from_json(partition.value)
        report, error = None, None
        try:
            report = json.dumps(run_flush(self._settings, plan).to_json())
        except (MillraceError, OSError, pa.ArrowException) as failure:  # one PChannel's trouble leaves the others be
            error = f"{getattr(failure, 'code', type(failure).__name__)}: {failure}"
        row = {"pchannel": [plan.checkpoint.pchannel], "report": [report], "error": [error]}
        yield pa.RecordBatch.from_pydict(row, schema=REPORT_SCHEMA)
        keep_modules(FORMAT)

    def stop(self) -> None:
        self._wal = None

    def _refreshed(self) -> WalSnapshot | None:
        self._wal = WalSnapshot.open(self._settings.wal_uri) if self._wal is None else self._wal.refreshed()
        return self._wal

    def _may_run(self, pchannel: str, tick: int) -> bool:
        """Whether it is time for this PChannel; one that did not move since it was planned waits twice as long each time."""
        stall = self._stalls.get(pchannel)
        if stall is None or stall.tick != tick:
            self._stalls[pchannel] = _Stall(tick, _BACKOFF[0], 0.0, 0)
            return True
        now = time.monotonic()
        if stall.times and now < stall.until:
            if self._target is None:
                return False
            time.sleep(stall.until - now)  # a bounded run has no later poll
        if self._target is not None and stall.times >= _BOUNDED_TRIES:
            return False
        stall.times += 1
        stall.until = time.monotonic() + stall.pause
        stall.pause = min(stall.pause * 2, _BACKOFF[1])
        return True


def _until(plan: FlushPlan, target: int) -> tuple[int, Any]:
    """The plan's end and range, cut at `target`."""
    if target >= plan.up_to_tick:
        return plan.up_to_tick, plan.range
    return target, plan.range.cut(target)
