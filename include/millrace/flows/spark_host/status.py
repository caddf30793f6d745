"""How declared streams are doing, by their files alone: for lists, views and metrics. Imports no Spark."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from millrace.base.errors import RunNotFound
from millrace.base.file_lock import is_report_live
from millrace.base.settings import Settings
from millrace.flows.declare.discovery import declared_streams
from millrace.flows.declare.stream import Stream
from millrace.flows.spark_host.incarnations import Kept
from millrace.runtime.launch.launcher import Launcher

DAG_PREFIX: Final = "stream_"
"""Of the DAGs that keep jobs of streams alive; who starts one runs code of its transform, and writes into its sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatus:
    """A stream and how it is doing. Rows are those since its process began."""

    name: str
    words: str
    source: str
    sink: str
    reads: tuple[str, ...]
    """All that it reads, with their kinds, its source first."""
    writes: tuple[str, ...]
    """All that it writes: its sink, and that of late rows."""
    guarantee: str
    job: str
    dag_id: str
    """The DAG that keeps its job alive."""
    state: str
    """running, paused, stopped, failed, lost or new."""
    incarnation: int
    batches: int
    rows: int
    out: int
    rejected: int
    late: int
    rows_per_second: float
    lag_seconds: float | None
    """Of a collection's rows, in log time."""
    lag_records: int | None = None
    """Of topics: records that were not read yet."""
    watermark: str | None
    state_rows: int
    state_bytes: int
    operated: dict[str, int] | None
    """The outcome of an operator's input rows: taken + late + rejected are all of them.

    Rejected rows have no event time, or are ahead of the log. Extra counts are partly_late (taken, but too late for one
    of their windows), corrected (answers given again) and evicted (rows of state that the watermark has passed).
    """
    at: float | None
    error: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def dag_id(job: str) -> str:
    """The DAG that keeps a job of streams alive."""
    return f"{DAG_PREFIX}{job}"


def run_id(job: str) -> str:
    """The run id of a job of streams: one, whoever starts it."""
    return f"stream-{job}"


def app_name(job: str) -> str:
    """Under which a job of streams writes its heartbeat."""
    return f"millrace-stream-{job}"


def progress_name(stream: str) -> str:
    """The name of a stream's query, and of its progress file."""
    return f"stream-{stream}"


def status(settings: Settings, stream: Stream) -> StreamStatus:
    """How one stream is doing."""
    kept = Kept(settings, stream.name).state
    told = _told(settings, stream.name)
    state, error = _run(settings, stream)
    lives = bool(told) and is_report_live(settings.run_path, int(told.get("pid", 0)), float(told.get("at", 0.0)))
    if kept.paused:
        state = "paused"
    elif lives:
        state = "running"
    elif state == "new" and kept.fingerprint:
        state = "stopped"
    return StreamStatus(
        name=stream.name,
        words=stream.words,
        source=stream.source.target,
        sink=stream.sink.target,
        reads=stream.reads,
        writes=tuple(stream.writes),
        guarantee=stream.chosen_guarantee,
        job=stream.job,
        dag_id=dag_id(stream.job),
        state=state,
        incarnation=kept.incarnation,
        batches=told.get("batches", 0),
        rows=told.get("rows", 0),
        out=told.get("out", 0),
        rejected=told.get("rejected", 0),
        late=told.get("late", 0),
        rows_per_second=told.get("rows_per_second", 0.0) if lives else 0.0,
        lag_seconds=told.get("lag_seconds"),
        lag_records=told.get("lag_records"),
        watermark=told.get("watermark"),
        state_rows=told.get("state_rows", 0),
        state_bytes=told.get("state_bytes", 0),
        operated=told.get("operated"),
        at=told.get("at"),
        error=error,
    )


def statuses(settings: Settings) -> list[StreamStatus]:
    """All declared streams, by name. Raises InvalidStream."""
    return [status(settings, each) for _, each in sorted(declared_streams(settings).items())]


def _run(settings: Settings, stream: Stream) -> tuple[str, str | None]:
    try:
        found = Launcher(settings).poll(run_id(stream.job))
    except RunNotFound:
        return "new", None
    words = None if found.error is None or found.active else str(found.error)
    return ("stopped" if str(found.state) == "finished" else str(found.state)), words


def _told(settings: Settings, stream: str) -> dict[str, Any]:
    try:
        value = json.loads(settings.progress_path(progress_name(stream)).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
