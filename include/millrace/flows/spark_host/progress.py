"""What a running stream reports: a file that views and supervisors read, and metrics.

Rows add up: in = out + rejected + late, for a stream whose transform keeps rows; for one that aggregates, in counts
rows and out counts results. Late rows were dropped by Spark behind the watermark, by its own count, in which
simultaneous rows of one window are one. An operator of ours counts each input row under `operated`: taken + late +
rejected, always.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any, Final

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from pyspark.sql.streaming.query import StreamingQueryManager

from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.flows.sinks.sink import Verdicts
from millrace.flows.spark_host.keyed import Operated, Taken
from millrace.flows.spark_host.status import progress_name
from millrace.message.ids import tick_physical_ms

_COUNTED: Final = ("taken", "late", "rejected", "partly_late", "corrected", "evicted")


class Told(StreamingQueryListener):
    """Hears of the micro-batches of one start of a stream, from Spark and from its sink, until its query has ended."""

    def __init__(self, settings: Settings, stream: str, metrics: Metrics, streams: StreamingQueryManager) -> None:
        self._path = settings.progress_path(progress_name(stream))
        self._reporter = ProcessRegistration(settings.run_path)
        self._stream = stream
        self._metrics = metrics
        self._streams = streams
        self._guard = threading.Lock()
        self.run_id = ""
        """Of the query, once it is started: a session hears of all of its queries, those of an earlier start too."""
        self.facts: dict[str, Any] = {
            "pid": os.getpid(), "stream": stream, "at": time.time(), "batches": 0,
            "rows": 0, "out": 0, "rejected": 0, "late": 0, "state_rows": 0, "state_bytes": 0,
            "watermark": None, "lag_seconds": None, "lag_records": None, "pchannels": {}, "rows_per_second": 0.0,
            "operated": None,
        }  # fmt: skip

    def undecoded(self, records: int) -> None:
        """Count records of the source that came in and are no rows."""
        if records:
            with self._guard:
                self.facts["rows"] += records
                self.facts["rejected"] += records
            self._count("in", records)
            self._count("error", records)

    def taken(self, batch_id: int, taken: Verdicts) -> None:
        """The sink has taken a micro-batch."""
        rows, rejected = (0, 0) if taken.again else (taken.acknowledged, taken.rejected)
        operated = taken.operated if isinstance(taken, Taken) else None
        with self._guard:
            self.facts["out"] += rows
            self.facts["rejected"] += rejected
            self.facts["at"] = time.time()
            if operated is not None:
                self._operated(operated)
            replace_json(self._path, self.facts)
        self._count("out", rows)
        self._count("error", rejected)

    def _count(self, outcome: str, rows: int) -> None:
        """A query is one lane, of its own name."""
        self._metrics.flow_rows_total.labels(self._stream, progress_name(self._stream), outcome).inc(rows)

    def _operated(self, operated: Operated) -> None:
        """The operator's own count of its rows, and its state as it is now."""
        facts, metrics, name = self.facts, self._metrics, self._stream
        before: dict[str, Any] = facts["operated"] or {}
        for outcome in _COUNTED:
            before[outcome] = before.get(outcome, 0) + getattr(operated, outcome)
            metrics.flow_operated_total.labels(name, outcome).inc(getattr(operated, outcome))
        facts["operated"] = before
        facts["late"] += operated.late
        self._count("late", operated.late)
        if (
            operated.watermark is not None
        ):  # otherwise the batch is an earlier process's; the next one reports the state
            facts |= {
                "state_rows": operated.state_rows,
                "state_bytes": operated.state_bytes,
                "watermark": operated.watermark,
            }
            metrics.flow_state_rows.labels(name).set(operated.state_rows)
            metrics.flow_state_bytes.labels(name).set(operated.state_bytes)
            if isinstance(operated.watermark, str):
                metrics.flow_watermark_seconds.labels(name).set(_seconds(operated.watermark))

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Its own query, where it has none: Spark says so before the start returns."""
        if not self.run_id and event.name == progress_name(self._stream):
            self.run_id = str(event.runId)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing new is known."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Keep the file. A session calls all of its listeners for each query in turn, and would wait for this one."""
        if str(event.runId) == self.run_id:
            self._streams.removeListener(self)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """A micro-batch has ended."""
        progress = event.progress
        if str(progress.runId) == self.run_id:
            self.heard(json.loads(progress.json))

    def heard(self, progress: dict[str, Any]) -> None:
        """Take in a progress report, as Spark writes it."""
        rows = int(progress.get("numInputRows") or 0)
        operators = progress.get("stateOperators") or []
        late = sum(int(each.get("numRowsDroppedByWatermark") or 0) for each in operators)
        state = sum(int(each.get("numRowsTotal") or 0) for each in operators)
        size = sum(int(each.get("memoryUsedBytes") or 0) for each in operators)
        mark = (progress.get("eventTime") or {}).get("watermark")
        sources = progress.get("sources") or [{}]
        ticks = _ticks(sources[0].get("endOffset"))
        lags = [_lag(_ticks(each.get("endOffset")), _ticks(each.get("latestOffset"))) for each in sources]
        lag = max((each for each in lags if each is not None), default=None)
        behind = [_records_behind(each.get("endOffset"), each.get("latestOffset")) for each in sources]
        records = next((each for each in behind if each is not None), None)
        with self._guard:
            facts = self.facts
            facts["batches"] += 1
            facts["rows"] += rows
            facts["late"] += late
            if facts["operated"] is None:
                facts |= {"state_rows": state, "state_bytes": size, "watermark": mark}
            facts |= {
                "at": time.time(),
                "lag_seconds": lag,
                "lag_records": records,
                "rows_per_second": round(float(progress.get("processedRowsPerSecond") or 0.0), 1),
                "pchannels": {name: {"tick": tick} for name, tick in ticks.items()},
            }
            replace_json(self._path, facts)
        metrics, name = self._metrics, self._stream
        self._count("in", rows)
        self._count("late", late)
        metrics.flow_batches_total.labels(name, progress_name(name)).inc()
        if facts["operated"] is None:
            metrics.flow_state_rows.labels(name).set(state)
            metrics.flow_state_bytes.labels(name).set(size)
        if lag is not None:
            metrics.flow_lag_seconds.labels(name).set(lag)
        if records is not None:
            metrics.flow_lag_records.labels(name, progress_name(name)).set(records)
        if mark and facts["operated"] is None:
            metrics.flow_watermark_seconds.labels(name).set(_seconds(mark))


def _ticks(offset: Any) -> dict[str, int]:
    value = json.loads(offset) if isinstance(offset, str) else offset
    return {str(name): int(tick) for name, tick in (value or {}).get("ticks", {}).items()}


def _records_behind(here: Any, newest: Any) -> int | None:
    """Records of a topic after the ones that were read; None of another source."""
    first, last = (json.loads(each) if isinstance(each, str) else each or {} for each in (here, newest))
    if "offsets" not in first or "offsets" not in last:
        return None
    return sum(max(0, end - first["offsets"].get(lane, 0)) for lane, end in last["offsets"].items())


def _lag(here: dict[str, int], newest: dict[str, int]) -> float | None:
    """Seconds of log time on the PChannel that is furthest behind."""
    if not here or not newest:
        return None
    behind = [
        (tick_physical_ms(newest.get(name, tick)) - tick_physical_ms(tick)) / 1e3 if tick else None
        for name, tick in here.items()
    ]
    known = [each for each in behind if each is not None]
    return round(max(0.0, *known), 3) if known else None


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
