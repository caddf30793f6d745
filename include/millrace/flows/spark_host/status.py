"""The status of declared streams, from the files that they write. Imports no Spark.

`flow_status` is a stream's status in the form for all flows; :class:`StreamStatus` is the form of the API.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from millrace.base.file_lock import is_report_live
from millrace.base.settings import Settings
from millrace.flows.declare.discovery import declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.status import FlowState, FlowStatus, process_began, processes_of, scheduled_dag_id

DAG_PREFIX: Final = "stream_"
"""Prefix of the DAGs that keep jobs of streams running. Starting one runs a transform's code and writes into a sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatus:
    """A stream's state and counts. Rows are counted since its process started."""

    name: str
    words: str
    source: str
    sink: str
    reads: tuple[str, ...]
    """All inputs, with their kinds, its source first."""
    writes: tuple[str, ...]
    """All outputs: its sink, and that of late rows."""
    guarantee: str
    job: str
    dag_id: str
    """The DAG that keeps its job running."""
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
    """The lag behind a collection's rows, in log time."""
    lag_records: int | None = None
    """Unread records of topics."""
    watermark: str | None
    state_rows: int
    state_bytes: int
    operated: dict[str, int] | None
    """The outcome of an operator's input rows: taken + late + rejected are all of them.

    Rejected rows have no event time, or are ahead of the log. Extra counts are partly_late (taken, but too late for one
    of their windows), corrected (results written again) and evicted (rows of state that the watermark has passed).
    """
    at: float | None
    error: str | None

    @classmethod
    def of(cls, flow: FlowStatus) -> Self:
        """Return the status of a flow on Spark in this form."""
        same = {each.name: getattr(flow, each.name) for each in fields(cls) if each.name not in _OWN_NAMES}
        own = {name: getattr(flow, other) for name, other in _OWN_NAMES.items()}
        return cls(**same | own | {"state": str(flow.state)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_OWN_NAMES: Final = {
    "rows": "rows_in", "out": "rows_out", "rejected": "rows_error", "late": "rows_late", "rows_per_second": "rate",
}  # fmt: skip
"""The names of a flow's counts in StreamStatus."""


def dag_id(job: str) -> str:
    """Return the DAG that keeps a job of streams running."""
    return f"{DAG_PREFIX}{job}"


def run_id(job: str) -> str:
    """Return the run id of a job of streams, the same whatever starts it."""
    return f"stream-{job}"


def app_name(job: str) -> str:
    """Return the name under which a job of streams writes its heartbeat."""
    return f"millrace-stream-{job}"


def progress_name(stream: str) -> str:
    """Return the name of a stream's query, and of its progress file."""
    return f"stream-{stream}"


def flow_status(settings: Settings, stream: Flow) -> FlowStatus:
    """Return a stream's status in the form for all flows."""
    stored = Incarnations(settings, stream.name).state
    report = _report(settings, stream.name)
    run = processes_of(settings, run_id(stream.job))
    state = run.state
    pid, at = int(report.get("pid", 0)), float(report.get("at", 0.0))
    lives = bool(report) and is_report_live(settings.run_path, pid, at)
    if stored.paused:
        state = FlowState.PAUSED
    elif lives:
        state = FlowState.RUNNING
    elif state is FlowState.NEW and stored.fingerprint:
        state = FlowState.STOPPED
    return FlowStatus(
        name=stream.name,
        host="spark",
        words=stream.description,
        source=stream.row_source.target,
        sink=stream.row_sink.target,
        reads=stream.reads,
        writes=tuple(stream.writes),
        guarantee=stream.chosen_guarantee,
        job=stream.job,
        dag_id=scheduled_dag_id(stream.name) if stream.scheduled else dag_id(stream.job),
        schedule=stream.schedule if stream.scheduled else "",
        state=state,
        error=run.error,
        since=process_began(pid) if lives else None,
        at=report.get("at"),
        workers=int(lives),
        restarts=run.restarts,
        last_end=run.last_end.cause,
        lanes=1,
        failed_lanes=int(state is FlowState.FAILED),
        rows_in=report.get("rows", 0),
        rows_out=report.get("out", 0),
        rows_error=report.get("rejected", 0),
        rows_late=report.get("late", 0),
        rate=report.get("rows_per_second", 0.0) if lives else 0.0,
        lag_seconds=report.get("lag_seconds"),
        lag_records=report.get("lag_records"),
        watermark=report.get("watermark"),
        state_rows=report.get("state_rows", 0),
        state_bytes=report.get("state_bytes", 0),
        incarnation=stored.incarnation,
        batches=report.get("batches", 0),
        operated=report.get("operated"),
    )


def status(settings: Settings, stream: Flow) -> StreamStatus:
    """Return a stream's status in the form of the API."""
    return StreamStatus.of(flow_status(settings, stream))


def flow_statuses(settings: Settings) -> list[FlowStatus]:
    """Return the status of each declared stream, by name. Raises InvalidStream."""
    return [flow_status(settings, each) for _, each in sorted(declared_flows(settings, host="spark").items())]


def _report(settings: Settings, stream: str) -> dict[str, Any]:
    try:
        value = json.loads(settings.progress_path(progress_name(stream)).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
