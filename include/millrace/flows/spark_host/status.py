"""How declared streams are doing, from the files that they write. Imports no Spark.

`flow_status` is a stream's status as that of any flow; :class:`StreamStatus` is the form of it that the API gives.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

from millrace.base.file_lock import is_report_live
from millrace.base.settings import Settings
from millrace.flows.declare.discovery import declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.spark_host.incarnations import Kept
from millrace.flows.status import FlowState, FlowStatus, process_began, processes_of, scheduled_dag_id

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
    """The DAG that keeps a job of streams alive."""
    return f"{DAG_PREFIX}{job}"


def run_id(job: str) -> str:
    """The run id of a job of streams, the same for every starter."""
    return f"stream-{job}"


def app_name(job: str) -> str:
    """Under which a job of streams writes its heartbeat."""
    return f"millrace-stream-{job}"


def progress_name(stream: str) -> str:
    """The name of a stream's query, and of its progress file."""
    return f"stream-{stream}"


def flow_status(settings: Settings, stream: Flow) -> FlowStatus:
    """Return a stream's status as that of any flow."""
    kept = Kept(settings, stream.name).state
    told = _told(settings, stream.name)
    run = processes_of(settings, run_id(stream.job))
    state = run.state
    pid, at = int(told.get("pid", 0)), float(told.get("at", 0.0))
    lives = bool(told) and is_report_live(settings.run_path, pid, at)
    if kept.paused:
        state = FlowState.PAUSED
    elif lives:
        state = FlowState.RUNNING
    elif state is FlowState.NEW and kept.fingerprint:
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
        at=told.get("at"),
        workers=int(lives),
        restarts=run.restarts,
        last_end=run.last_end.cause,
        lanes=1,
        failed_lanes=int(state is FlowState.FAILED),
        rows_in=told.get("rows", 0),
        rows_out=told.get("out", 0),
        rows_error=told.get("rejected", 0),
        rows_late=told.get("late", 0),
        rate=told.get("rows_per_second", 0.0) if lives else 0.0,
        lag_seconds=told.get("lag_seconds"),
        lag_records=told.get("lag_records"),
        watermark=told.get("watermark"),
        state_rows=told.get("state_rows", 0),
        state_bytes=told.get("state_bytes", 0),
        incarnation=kept.incarnation,
        batches=told.get("batches", 0),
        operated=told.get("operated"),
    )


def status(settings: Settings, stream: Flow) -> StreamStatus:
    """Return a stream's status in the form of the API."""
    return StreamStatus.of(flow_status(settings, stream))


def flow_statuses(settings: Settings) -> list[FlowStatus]:
    """Return the status of each declared stream, by name. Raises InvalidStream."""
    return [flow_status(settings, each) for _, each in sorted(declared_flows(settings, host="spark").items())]


def _told(settings: Settings, stream: str) -> dict[str, Any]:
    try:
        value = json.loads(settings.progress_path(progress_name(stream)).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
