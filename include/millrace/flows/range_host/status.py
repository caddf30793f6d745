"""The state of a flow and its tasks, in Kafka Connect's terms, and the files between worker and management.

    <data>/pipelines/<id>/pipeline.json   the declaration that a worker runs, with secrets, readable by its owner only
    <data>/pipelines/<id>/flow.json       its inputs and outputs, and the declaration's file (observed.py)
    <data>/pipelines/<id>/status.json     its worker's status, replaced as a whole
    <data>/pipelines/<id>/metrics.prom    its worker's metrics, replaced as a whole
    <data>/pipelines/<id>/pulse           touched by its worker while it is alive (flows/hosts.py)
    <data>/pipelines/<id>/workers/<n>/    the last three files of worker n, if there are several; n starts at 1

A task is a partition of a topic (``flights-0``), or a VChannel of a collection.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field

from millrace.base.settings import Settings

FLOWS: Final = "pipelines"
"""Folder of the flows in a data folder."""
WORKERS: Final = "workers"
SILENT_SECONDS: Final = 30.0
"""A worker that reported nothing for this long is ended; it reports once a second."""


class State(StrEnum):
    """The state of a flow or of one of its tasks."""

    UNASSIGNED = "UNASSIGNED"
    """Its worker has not reported yet."""
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    """Its worker runs and reads nothing."""
    STOPPED = "STOPPED"
    """It has no worker. Offsets may be changed."""
    FAILED = "FAILED"
    """A task exceeded the failure threshold (it is retried at `retry_at`); or all tasks of a flow, or its worker."""


class TaskStatus(BaseModel):
    """One task."""

    model_config = ConfigDict(frozen=True)

    task: str
    state: State
    position: int = Field(
        default=0, description="the next offset to read: all records before it are in the sink or the error topic"
    )
    end: int = Field(default=0, description="the offset after the newest record")
    lag: int = Field(default=0, description="records between position and end")
    records_in: int = 0
    records_out: int = 0
    records_stale: int = Field(default=0, description="left out because the sink had a newer document of their id")
    records_error: int = 0
    records_filtered: int = 0
    bulks: int = 0
    retries: int = 0
    cpu_seconds: float = Field(
        default=0.0, description="CPU time of its ranges since its worker started, transform and bulks"
    )
    range_bytes: int = Field(default=0, description="bytes of the records that its newest range held in memory")
    failures: int = Field(default=0, description="failures in a row")
    recoveries: int = Field(default=0, description="recoveries in a row")
    cause: str = Field(default="", description="cause of its last failure, in words")
    code: str = Field(default="", description="code of that error")
    suspect: str = Field(default="", description="the range in which its worker's process ended, and what to do")
    retry_at: float | None = Field(default=None, description="when it is recovered, seconds since 1970")
    latency_ms: dict[str, float] = Field(
        default_factory=dict, description="from the record's timestamp to its acknowledgement: recent p50, p95, p99"
    )


class PipelineStatus(BaseModel):
    """The status of one flow, as last reported by its worker."""

    model_config = ConfigDict(frozen=True)

    pipeline: str
    state: State
    at: float = Field(default=0.0, description="time of the report, seconds since 1970")
    pid: int = 0
    cause: str = ""
    tasks: tuple[TaskStatus, ...] = ()
    source_lag_bytes: int | None = Field(default=None, description="unread bytes of a captured database's log")
    source_lag_seconds: float | None = Field(default=None, description="age of the newest change that was read")
    source_error: str = Field(default="", description="why a captured database cannot be read now")
    source_counts: dict[str, int] = Field(
        default_factory=dict, description="messages of a best-effort source, such as received, dropped and lost"
    )
    cpu_percent: float = 0.0
    memory_bytes: int = 0
    declaration: str = Field(default="", description="digest of the declaration that the worker runs")
    restarts: int = Field(default=0, description="restarts of its worker since its supervisor started")
    last_end: str = Field(default="", description="how its worker ended before the last restart, in words")

    def resting(self, state: State = State.STOPPED, cause: str = "") -> Self:
        """Return the status without a worker: counts and positions stay, values of the process do not."""
        tasks = tuple(
            each.model_copy(
                update={
                    "latency_ms": {},
                    "cpu_seconds": 0.0,
                    "range_bytes": 0,
                    "state": each.state if each.state is State.FAILED else State.STOPPED,
                }
            )
            for each in self.tasks
        )
        gone = {"pid": 0, "cpu_percent": 0.0, "memory_bytes": 0, "tasks": tasks}
        return self.model_copy(update={**gone, "state": state, "cause": cause or self.cause})


def flow_folder(settings: Settings, flow: str) -> Path:
    """Return the folder of a flow on this machine."""
    return settings.data_dir / FLOWS / flow


def worker_folder(settings: Settings, flow: str, worker: int = 0) -> Path:
    """Return the folder of one of its workers: the flow's own folder for worker 0."""
    folder = flow_folder(settings, flow)
    return folder / WORKERS / str(worker) if worker else folder


def workers_of(settings: Settings, flow: str) -> list[int]:
    """Return the numbers of the workers that a flow has or had on this machine."""
    more = (flow_folder(settings, flow) / WORKERS).glob("*")
    return [0, *sorted(int(each.name) for each in more if each.name.isdecimal())]


def declaration_path(settings: Settings, flow: str) -> Path:
    return flow_folder(settings, flow) / "pipeline.json"


def status_path(settings: Settings, flow: str, worker: int = 0) -> Path:
    return worker_folder(settings, flow, worker) / "status.json"


def metrics_path(settings: Settings, flow: str, worker: int = 0) -> Path:
    """Return the path of the worker process's metrics, rewritten every second (millrace.observe.exposition)."""
    from millrace.base.metrics import METRICS_SUFFIX  # it imports NumPy, which a DAG file does not need

    return worker_folder(settings, flow, worker) / f"metrics{METRICS_SUFFIX}"


def pulse_path(settings: Settings, flow: str, worker: int = 0) -> Path:
    return worker_folder(settings, flow, worker) / "pulse"


def commands_path(settings: Settings, flow: str) -> Path:
    """Return the file of commands to a running worker, replaced as a whole.

    It contains ``{"paused": bool, "restart": "" | "all" | "failed", "serial": int}``.
    """
    return flow_folder(settings, flow) / "wanted.json"  # as in documents.py
