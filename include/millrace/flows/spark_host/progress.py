"""The reports of a running stream: a file that views and supervisors read, and metrics.

Rows add up: in = out + rejected + late, for a stream whose transform keeps rows; for one that aggregates, in counts
rows and out counts results. Late rows were dropped by Spark behind the watermark, by its own count, in which
simultaneous rows of one window are one. A Millrace operator counts each input row under `operated`: taken + late +
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


class ProgressListener(StreamingQueryListener):
    """Receives the micro-batches of one start of a stream, from Spark and from its sink, until its query has ended."""

    def __init__(self, settings: Settings, stream: str, metrics: Metrics, streams: StreamingQueryManager) -> None:
        self._path = settings.progress_path(progress_name(stream))
        self._reporter = ProcessRegistration(settings.run_path)
        self._stream = stream
        self._metrics = metrics
        self._streams = streams
        self._guard = threading.Lock()
        self.run_id = ""
        """The query's run id, once it is started: a session reports all of its queries, also of an earlier start."""
        self.facts: dict[str, Any] = {
            "pid": os.getpid(), "stream": stream, "at": time.time(), "batches": 0,
            "rows": 0, "out": 0, "rejected": 0, "late": 0, "state_rows": 0, "state_bytes": 0,
            "watermark": None, "lag_seconds": None, "lag_records": None, "pchannels": {}, "rows_per_second": 0.0,
            "operated": None,
        }  # fmt: skip

    def undecoded(self, records: int) -> None:
        """Count records of the source that could not be decoded."""
        if records:
            with self._guard:
                self.facts["rows"] += records
                self.facts["rejected"] += records
            self._count("in", records)
            self._count("error", records)

    def taken(self, batch_id: int, taken: Verdicts) -> None:
        """Add the sink's result of a micro-batch."""
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
        """Count rows. A query is one lane with its own name."""
        self._metrics.flow_rows_total.labels(self._stream, progress_name(self._stream), outcome).inc(rows)

    def _operated(self, operated: Operated) -> None:
        """Add the operator's own counts, and report its present state."""
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
        """Store the query's run id, if there is none. Spark calls this before the start returns."""
        if not self.run_id and event.name == progress_name(self._stream):
            self.run_id = str(event.runId)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing: there is no news."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Do nothing. A session calls all of its listeners in turn for each query, and would wait for this one."""
        if str(event.runId) == self.run_id:
            self._streams.removeListener(self)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Process the end of a micro-batch."""
        progress = event.progress
        if str(progress.runId) == self.run_id:
            self.heard(json.loads(progress.json))

    def heard(self, progress: dict[str, Any]) -> None:
        """Process a progress report in Spark's form."""
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
    """Return the unread records of a topic; None for another source."""
    first, last = (json.loads(each) if isinstance(each, str) else each or {} for each in (here, newest))
    if "offsets" not in first or "offsets" not in last:
        return None
    return sum(max(0, end - first["offsets"].get(lane, 0)) for lane, end in last["offsets"].items())


def _lag(here: dict[str, int], newest: dict[str, int]) -> float | None:
    """Return the lag in log time, in seconds, of the PChannel that is furthest behind."""
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
