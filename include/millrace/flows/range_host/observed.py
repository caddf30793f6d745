"""The state of a flow, from its worker, its supervisor and its run: one place for CLI, API, UI and graph.

``flow.json`` in a flow's folder has its inputs and outputs and the declaration's file, so that the flow can be listed
and addressed by name. Starting or deploying the flow writes it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from millrace.base.file_lock import is_report_live
from millrace.base.files import make_folder, replace_json
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import Part
from millrace.flows.declare.steps import Lookup
from millrace.flows.declare.worker import AIRFLOW
from millrace.flows.guarantee import GUARANTEES
from millrace.flows.range_host.status import (
    FLOWS,
    SILENT_SECONDS,
    PipelineStatus,
    State,
    declaration_path,
    flow_folder,
    workers_of,
)
from millrace.flows.range_host.supervision import last_pulse, read_status, read_worker_status
from millrace.flows.range_host.trend import read_trend
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.status import (
    FlowProcesses,
    FlowState,
    FlowStatus,
    process_began,
    processes_of,
    scheduled_dag_id,
)
from millrace.message.ids import tick_physical_ms
from millrace.runtime.launch.folder import read_json

DAG_PREFIX: Final = "pipeline_"
"""Prefix of the DAGs that keep flows running. Starting one runs a worker with the flow's secrets."""
QUIET_SECONDS: Final = 10.0
"""A worker that reported nothing for this long is shown as silent; it reports once a second."""
_NAMED_BY: Final = (
    "topics",
    "topics_regex",
    "topic",
    "collection",
    "names",
    "name",
    "table",
    "index_base",
    "path",
    "folder",
)
"""Fields of sources and sinks that name what is read or written, also for kinds of other packages."""
_STATES: Final = {
    State.UNASSIGNED: FlowState.STARTING,
    State.RUNNING: FlowState.RUNNING,
    State.PAUSED: FlowState.PAUSED,
    State.STOPPED: FlowState.STOPPED,
    State.FAILED: FlowState.FAILED,
}


def run_id(flow: str) -> str:
    """Return the run id of a flow's worker, the same whatever starts it."""
    return f"pipeline-{flow}"


def dag_id(flow: str) -> str:
    """Return the DAG that keeps a flow's worker running."""
    return f"{DAG_PREFIX}{flow}"


def observed(settings: Settings, flow: str) -> PipelineStatus:
    """Return the last status of a flow's workers; without a worker, STOPPED or FAILED with the end of its run."""
    said = read_status(settings, flow)
    live = said.pid > 0 and is_report_live(settings.run_path, said.pid, said.at)
    run = processes_of(settings, run_id(flow))
    if not run.began:  # it runs in the foreground, or never ran
        return said if live else said.resting(cause=_gone(said))
    if run.active:
        fresh = said.at >= run.began
        said = said if fresh else PipelineStatus(pipeline=flow, state=State.UNASSIGNED)
        return _as_watched(settings, said, run)
    if live and said.at > run.ended:  # it runs in the foreground, since after that run
        return said
    if run.error is not None:
        return said.resting(State.FAILED, run.error)
    return said.resting()


def _gone(said: PipelineStatus) -> str:
    return f"its worker, process {said.pid}, has ended" if said.state in (State.RUNNING, State.PAUSED) else ""


def _as_watched(settings: Settings, said: PipelineStatus, run: FlowProcesses) -> PipelineStatus:
    """Return the status with the supervisor's findings: the worker's last end, or its silence."""
    last = run.last_end
    watched = said.model_copy(update={"restarts": run.restarts, "last_end": last.cause})
    if last.ended_at > said.at:  # the next worker has not reported yet
        return watched.resting(State.FAILED, f"its worker is being restarted: {run.waiting or last.cause}")
    spoke = last_pulse(settings, said.pipeline)
    silent = time.time() - spoke
    if spoke >= run.began and silent > QUIET_SECONDS:
        words = f"its worker has been silent for {silent:.0f} s; after {SILENT_SECONDS:.0f} s it is restarted"
        return watched.model_copy(update={"state": State.FAILED, "cause": words})
    return watched


def flow_path(settings: Settings, flow: str) -> Path:
    """Return the path of the file with a flow's inputs and outputs."""
    return flow_folder(settings, flow) / "flow.json"


def note_flow(settings: Settings, flow: Flow, *, file: Path | None = None, config: Path | None = None) -> None:
    """Write the inputs and outputs of `flow` to its file. A later start reads its declaration from `file` again."""
    known = read_flow(settings, flow.name)
    made = {
        **described(flow),
        "file": known.get("file", "") if file is None else str(file.absolute()),
        "config": known.get("config", "") if file is None else "" if config is None else str(config.absolute()),
    }
    if made != known:
        make_folder(flow_path(settings, flow.name).parent)
        replace_json(flow_path(settings, flow.name), made)


def described(flow: Flow) -> dict[str, Any]:
    """Return a flow's inputs and outputs, each as ``kind:name``, and its guarantee."""
    kind, names = flow.source.kind, _names(flow.source)
    lookups = [f"collection:{each.collection}" for each in flow.transform.steps if isinstance(each, Lookup)]
    written = _names(flow.sink)
    if isinstance(flow.sink, CollectionSink) and flow.sink.divided:
        written = tuple(dict.fromkeys(flow.sink.of(each) for each in names))
    sink = f"{flow.sink.kind}:{','.join(written)}"
    collection = flow.errors.collection
    errors = f"kafka:{flow.errors_topic}" if collection is None else f"collection:{collection}"
    return {
        "words": flow.description or flow.title,
        "source": f"{kind}:{','.join(names)}",
        "reads": list(dict.fromkeys([*(f"{kind}:{each}" for each in names), *lookups])),
        "sink": sink,
        "writes": [*(f"{flow.sink.kind}:{each}" for each in written), errors],
        "errors": errors,
        "guarantee": flow.chosen_guarantee,
        "dag_id": _dag_of(flow),
        "schedule": flow.schedule if flow.scheduled else "",
    }


def _dag_of(flow: Flow) -> str:
    if flow.scheduled:
        return scheduled_dag_id(flow.name)
    return dag_id(flow.name) if flow.deployment == AIRFLOW else ""


def with_description(status: FlowStatus, flow: Flow) -> FlowStatus:
    """Return the status of a flow that has never run, completed by its declaration's inputs and outputs."""
    noted = described(flow)
    described_fields = {name: noted[name] for name in ("source", "sink", "words", "guarantee", "dag_id", "schedule")}
    return status.model_copy(update=described_fields | {name: tuple(noted[name]) for name in ("reads", "writes")})


def _names(part: Part) -> tuple[str, ...]:
    """Return the names of a source or sink: its topics, collection, table or index."""
    for field in _NAMED_BY:
        if found := getattr(part, field, None):
            return (found,) if isinstance(found, str) else tuple(map(str, found))
    return ("",)


def read_flow(settings: Settings, flow: str) -> dict[str, Any]:
    """Return the content that `note_flow` wrote; empty if the flow has not started since this build was installed."""
    return read_json(flow_path(settings, flow)) or {}


def pipelines_here(settings: Settings) -> list[str]:
    """Return the ids of the flows that have run, or are deployed, with this data folder."""
    folder = settings.data_dir / FLOWS
    files = ("status.json", flow_path(settings, "-").name, declaration_path(settings, "-").name)
    return sorted({each.parent.name for file in files for each in folder.glob(f"*/{file}")})


def flow_status(
    settings: Settings,
    flow: str,
    status: PipelineStatus | None = None,
    *,
    now: float | None = None,
    noted: Mapping[str, Any] | None = None,
) -> FlowStatus:
    """Return a flow's status in the form for all hosts. A flow that has never run is `new`.

    `status` is the result of `observed`, if the caller has it, and `noted` that of `read_flow`; `now` is the end of the
    period for the rate.
    """
    status, noted = status or observed(settings, flow), noted or read_flow(settings, flow)
    reads, tasks = tuple(noted.get("reads", ())), status.tasks
    failed = sum(task.state is State.FAILED for task in tasks)
    state = _STATES[status.state]
    if not status.at and state is FlowState.STOPPED:
        state = FlowState.NEW
    elif state is FlowState.RUNNING and failed:
        state = FlowState.DEGRADED
    ticks = str(noted.get("source", "")).startswith("collection:")
    behind = [tick_physical_ms(task.end) - tick_physical_ms(task.position) for task in tasks if task.position]
    trend = read_trend(settings, flow, now=now or time.time()) if state.live else None
    causes = [status.cause, *(task.cause for task in tasks), status.source_error]
    guarantee = noted.get("guarantee", "")
    pids = [read_worker_status(settings, flow, each) for each in workers_of(settings, flow)] if status.pid else []
    return FlowStatus(
        name=flow,
        host="range",
        words=noted.get("words", ""),
        source=noted.get("source", ""),
        sink=noted.get("sink", ""),
        reads=reads,
        writes=tuple(noted.get("writes", ())),
        guarantee=guarantee if guarantee in (*GUARANTEES, "effectively once") else "",
        job=run_id(flow),
        dag_id=noted.get("dag_id", ""),
        schedule=noted.get("schedule", ""),
        state=state,
        error=next((cause for cause in causes if cause), None),
        since=process_began(status.pid) if status.pid else None,
        at=status.at or None,
        workers=sum(is_report_live(settings.run_path, each.pid, each.at) for each in pids if each.pid),
        restarts=status.restarts,
        last_end=status.last_end,
        lanes=len(tasks),
        failed_lanes=failed,
        rows_in=sum(task.records_in for task in tasks),
        rows_out=sum(task.records_out for task in tasks),
        rows_error=sum(task.records_error for task in tasks),
        rows_filtered=sum(task.records_filtered for task in tasks),
        rows_stale=sum(task.records_stale for task in tasks),
        rate=0.0 if trend is None else trend.records_in[-1],
        lag_seconds=max(0.0, max(behind) / 1e3) if ticks and behind else status.source_lag_seconds,
        lag_bytes=status.source_lag_bytes,
        source_counts=status.source_counts,
        lag_records=None if ticks or not tasks else sum(task.lag for task in tasks),
    )
