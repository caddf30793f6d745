"""The heartbeat file of a streaming job: its driver is alive, and the state of each query. Supervisors read it.

The thread that waits for the queries writes it every two seconds and asks the JVM each time, so the file becomes stale
if the driver or the JVM hangs. ``busy_seconds`` grows while a query stays in one micro-batch; an idle query is not
busy. An idle job writes no progress file, so the age of that file is no sign of life.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millrace.base.file_lock import ProcessRegistration, is_report_live
from millrace.base.files import replace_json
from millrace.base.metrics import METRICS_SUFFIX, Metrics
from millrace.base.settings import Settings
from millrace.runtime.launch.folder import read_json

if TYPE_CHECKING:  # readers of heartbeats need no Spark
    from pyspark.sql.streaming.query import StreamingQuery

INTERVAL_SECONDS: Final = 2.0
STALE_SECONDS: Final = 60.0
"""A heartbeat older than this is a hang. A start may take this on top of `start_deadline`."""
STUCK_SECONDS: Final = 900.0
"""A micro-batch that takes longer than this is a hang."""
STREAMING_NODE: Final = "streaming-node"
"""The query that writes the log to the ``wal`` table."""
_JAVA_OBJECT: Final = re.compile(r"\b(?:[\w$]+\.)+[\w$]+@[0-9a-f]+\b")


def heartbeat_path(settings: Settings, app_name: str) -> Path:
    """Return the path of a job's heartbeat file."""
    return settings.node_run_path / f"{app_name}.heartbeat.json"


def read_heartbeats(folder: Path, query: str) -> Iterator[dict[str, Any]]:
    """Yield the heartbeats in `folder` (``settings.node_run_path``) of drivers that run `query`.

    Skips an incomplete or foreign file.
    """
    for path in folder.glob("*.heartbeat.json"):
        try:
            beat = json.loads(path.read_text(encoding="utf-8"))
            float(beat["at"]), int(beat["pid"])
            if isinstance(beat["queries"][query], dict):
                yield beat
        except (OSError, ValueError, KeyError, TypeError):
            continue


def query_runs(settings: Settings, query: str) -> bool:
    """Return whether a driver on this host runs `query`, as a single node or as any node of a cluster."""
    return any(
        is_report_live(settings.run_path, int(beat["pid"]), float(beat["at"]))
        for folder in (settings.run_path, *(settings.run_path / "nodes").glob("*"))
        for beat in read_heartbeats(folder, query)
    )


class HeartbeatWatch:
    """A supervisor's view of a job: the heartbeat of one process, and when it shows a hang."""

    def __init__(
        self,
        settings: Settings,
        app_name: str,
        *,
        stale_after: float = STALE_SECONDS,
        stuck_after: float = STUCK_SECONDS,
    ) -> None:
        self._path = heartbeat_path(settings, app_name)
        self._start_seconds = settings.start_deadline
        self._stale_after, self._stuck_after = stale_after, stuck_after

    def newest(self) -> dict[str, Any] | None:
        """Return the heartbeat that was written last, by whichever process."""
        return read_json(self._path)

    def beat(self, pid: int | None, since: float) -> dict[str, Any] | None:
        """Return the heartbeat of the process `pid` that began at `since`; None before its first."""
        beat = self.newest()
        return beat if beat is not None and beat.get("pid") == pid and beat["at"] >= since else None

    def hang(self, pid: int | None, since: float) -> tuple[str, str] | None:
        """Return code and words of a hang of that process: no heartbeat, or one micro-batch for too long."""
        beat = self.beat(pid, since)
        age = time.time() - (beat["at"] if beat else since)
        if age > self._stale_after + (0.0 if beat else self._start_seconds):
            return "HEARTBEAT_STALE", f"no heartbeat for {age:.0f} s (process {pid}): it hangs, or its JVM does"
        for name, query in (beat or {}).get("queries", {}).items():
            if query["busy_seconds"] > self._stuck_after:
                return "QUERY_STUCK", f"{name} is in one micro-batch for {query['busy_seconds']:.0f} s"
        return None


@dataclass(slots=True)
class _Observed:
    """A query at the last heartbeat."""

    batch: int = -1
    rows: int = 0
    changed: float = 0.0


class Heartbeat:
    """Write the heartbeat and the launcher's progress file, at most every INTERVAL_SECONDS.

    Call it with the queries.
    """

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
        self._looks: dict[str, _Observed] = {}
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
            replace_json(self._progress, self._summary(found, now))

    def _query(self, query: StreamingQuery, now: float, passed: float) -> dict[str, Any]:
        status, last = query.status, query.lastProgress
        batch = -1 if last is None else int(last["batchId"])
        progress = self._read_progress(query.name)
        look = self._looks.setdefault(query.name, _Observed(batch, progress.get("rows", 0), now))
        busy = bool(status["isTriggerActive"]) and bool(status["isDataAvailable"])
        if batch != look.batch or not busy:
            look.batch, look.changed = batch, now
        rows = progress.get("rows", 0)
        rate = max(0.0, (rows - look.rows) / passed) if passed else 0.0
        look.rows = rows
        return {
            "active": query.isActive,
            "message": _without_objects(status["message"]),
            "batches": progress.get("batches", 0),
            "rows": rows,
            "rows_per_second": round(rate, 1),
            "busy_seconds": round(now - look.changed, 1),
            "last_commit": progress.get("at"),
            "lag_seconds": _lag(progress),
            "parked": progress.get("parked", []),
        }

    def _read_progress(self, query: str) -> dict[str, Any]:
        """Return the content of the query's progress file if this process wrote it."""
        try:
            value = json.loads(self._settings.progress_path(query).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return value if isinstance(value, dict) and value.get("pid") == os.getpid() else {}

    def _summary(self, found: dict[str, dict[str, Any]], now: float) -> dict[str, Any]:
        words = ", ".join(f"{name}: {each['message']}" for name, each in found.items())
        figures: dict[str, Any] = {f"{name}.rows": each["rows"] for name, each in found.items()}
        if self._spark_ui:
            figures["spark_ui"] = self._spark_ui
        return {"words": words, "done": None, "figures": figures, "at": now, "pid": os.getpid()}


def _without_objects(message: str) -> str:
    """Strip names of Java objects from a status of Spark, such as ``org.apache.….PythonMicroBatchStream@1f2e3d``."""
    return _JAVA_OBJECT.sub("the source", message)


def _lag(progress: dict[str, Any]) -> float | None:
    """Return the age in seconds of the last commit's newest message, on the PChannel with the largest lag."""
    ticks = [each["tick"] for each in progress.get("pchannels", {}).values() if each.get("tick")]
    return round(max(0.0, progress["at"] - (min(ticks) >> 18) / 1e3), 3) if ticks else None
