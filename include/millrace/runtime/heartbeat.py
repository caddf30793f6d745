"""The heartbeat of a streaming job: that its driver lives, and what each of its queries is at. For whoever supervises it.

Written every two seconds by the thread that waits for the queries, which asks the JVM each time: a driver that hangs, or a
JVM that does, lets the file grow old. A query that stands in one micro-batch for long shows by ``busy_seconds``; one that has
nothing to do is not busy. A resting job rewrites no progress file, so that file's age says nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql.streaming.query import StreamingQuery

from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.metrics import METRICS_SUFFIX, Metrics
from millrace.base.settings import Settings

INTERVAL_SECONDS: Final = 2.0
_JAVA_OBJECT: Final = re.compile(r"\b(?:[\w$]+\.)+[\w$]+@[0-9a-f]+\b")


def heartbeat_path(settings: Settings, app_name: str) -> Path:
    """The heartbeat file of a job."""
    return settings.node_run_path / f"{app_name}.heartbeat.json"


@dataclass(slots=True)
class _Look:
    """A query as it was seen last."""

    batch: int = -1
    rows: int = 0
    changed: float = 0.0


class Heartbeat:
    """Called again and again with the running queries; writes the file, and the launcher's progress file, now and then."""

    def __init__(
        self,
        settings: Settings,
        app_name: str,
        *,
        progress: Path | None = None,
        spark_ui: str | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._path = heartbeat_path(settings, app_name)
        self._progress = progress
        self._spark_ui = spark_ui
        self._metrics = metrics
        self._clock = clock
        self._last = 0.0
        self._looks: dict[str, _Look] = {}
        self._reporter = ProcessRegistration(settings.run_path)

    def __call__(self, queries: Sequence[StreamingQuery]) -> None:
        now = self._clock()
        passed = now - self._last
        if passed < INTERVAL_SECONDS:
            return
        first, self._last = self._last == 0.0, now
        found = {query.name: self._query(query, now, 0.0 if first else passed) for query in queries}
        written = {"pid": os.getpid(), "at": now, "spark_ui": self._spark_ui, "queries": found}
        replace_json(self._path, written)
        if self._metrics is not None:
            self._metrics.write_textfile(self._path.with_suffix(METRICS_SUFFIX))
        if self._progress is not None:
            replace_json(self._progress, self._in_words(found, now))

    def _query(self, query: StreamingQuery, now: float, passed: float) -> dict[str, Any]:
        status, last = query.status, query.lastProgress
        batch = -1 if last is None else int(last["batchId"])
        told = self._told(query.name)
        look = self._looks.setdefault(query.name, _Look(batch, told.get("rows", 0), now))
        busy = bool(status["isTriggerActive"]) and bool(status["isDataAvailable"])
        if batch != look.batch or not busy:
            look.batch, look.changed = batch, now
        rows = told.get("rows", 0)
        rate = max(0.0, (rows - look.rows) / passed) if passed else 0.0
        look.rows = rows
        return {
            "active": query.isActive,
            "message": _without_objects(status["message"]),
            "batches": told.get("batches", 0),
            "rows": rows,
            "rows_per_second": round(rate, 1),
            "busy_seconds": round(now - look.changed, 1),
            "last_commit": told.get("at"),
            "lag_seconds": _lag(told),
            "parked": told.get("parked", []),
        }

    def _told(self, query: str) -> dict[str, Any]:
        """The query's own progress file, where this process wrote it."""
        try:
            value = json.loads(self._settings.progress_path(query).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return value if isinstance(value, dict) and value.get("pid") == os.getpid() else {}

    def _in_words(self, found: dict[str, dict[str, Any]], now: float) -> dict[str, Any]:
        words = ", ".join(f"{name}: {each['message']}" for name, each in found.items())
        figures: dict[str, Any] = {f"{name}.rows": each["rows"] for name, each in found.items()}
        if self._spark_ui:
            figures["spark_ui"] = self._spark_ui
        return {"words": words, "done": None, "figures": figures, "at": now, "pid": os.getpid()}


def _without_objects(message: str) -> str:
    """Spark's words without the names of Java objects, such as ``org.apache.spark.sql.….PythonMicroBatchStream@1f2e3d``."""
    return _JAVA_OBJECT.sub("the source", message)


def _lag(told: dict[str, Any]) -> float | None:
    """How old the newest message of the last commit was when it was committed, on the PChannel that was furthest behind."""
    ticks = [each["tick"] for each in told.get("pchannels", {}).values() if each.get("tick")]
    return round(max(0.0, told["at"] - (min(ticks) >> 18) / 1e3), 3) if ticks else None
