"""How a flow and its tasks are doing, in Kafka Connect's words; and where worker and management meet.

    <data>/pipelines/<id>/pipeline.json   the declaration that a worker runs, with its secrets, for its owner alone
    <data>/pipelines/<id>/flow.json       what it reads and writes, and the declaration's file (observed.py)
    <data>/pipelines/<id>/status.json     what its worker says, replaced whole
    <data>/pipelines/<id>/metrics.prom    its worker's metrics, replaced whole
    <data>/pipelines/<id>/pulse           touched by its worker while it is alive (flows/hosts.py)
    <data>/pipelines/<id>/workers/<n>/    the last three of worker n, where there are several: n begins with 1

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
"""A worker that has not spoken for so long is ended; it speaks once a second."""


class State(StrEnum):
    """Of a flow, or of one of its tasks."""

    UNASSIGNED = "UNASSIGNED"
    """Its worker has not said anything yet."""
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    """Its worker is there and takes nothing."""
    STOPPED = "STOPPED"
    """It has no worker. Offsets may be changed."""
    FAILED = "FAILED"
    """A task is over the failure threshold, and is retried at `retry_at`; or all tasks of a flow, or its worker."""


class TaskStatus(BaseModel):
    """One task."""

    model_config = ConfigDict(frozen=True)

    task: str
    state: State
    position: int = Field(
        default=0, description="the next offset to be read: all before it is in the sink or in the error topic"
    )
    end: int = Field(default=0, description="the offset behind the newest record")
    lag: int = Field(default=0, description="records between them")
    records_in: int = 0
    records_out: int = 0
    records_stale: int = Field(default=0, description="left out: the sink holds a newer document of their id")
    records_error: int = 0
    records_filtered: int = 0
    bulks: int = 0
    retries: int = 0
    cpu_seconds: float = Field(
        default=0.0, description="CPU time of its ranges since its worker began, transform and bulks"
    )
    range_bytes: int = Field(default=0, description="of the records that its newest range held in memory")
    failures: int = Field(default=0, description="in a row")
    recoveries: int = Field(default=0, description="in a row")
    cause: str = Field(default="", description="of its last failure, in words")
    code: str = Field(default="", description="of that error")
    suspect: str = Field(default="", description="the range in which its worker's process ended, and what to do")
    retry_at: float | None = Field(default=None, description="when it is recovered, seconds since 1970")
    latency_ms: dict[str, float] = Field(
        default_factory=dict, description="record's timestamp to acknowledged: p50, p95, p99 of late"
    )


class PipelineStatus(BaseModel):
    """One flow, as its worker said last."""

    model_config = ConfigDict(frozen=True)

    pipeline: str
    state: State
    at: float = Field(default=0.0, description="when it was said, seconds since 1970")
    pid: int = 0
    cause: str = ""
    tasks: tuple[TaskStatus, ...] = ()
    source_lag_bytes: int | None = Field(default=None, description="of a captured database's log that are not read yet")
    source_lag_seconds: float | None = Field(default=None, description="how old the newest of it is that was read")
    source_error: str = Field(default="", description="why a captured database is not read now")
    source_counts: dict[str, int] = Field(
        default_factory=dict, description="messages of a best-effort source, such as received, dropped and lost"
    )
    cpu_percent: float = 0.0
    memory_bytes: int = 0
    declaration: str = Field(default="", description="digest of the declaration that the worker runs")
    restarts: int = Field(default=0, description="of its worker by its supervisor, since that one began")
    last_end: str = Field(default="", description="how its worker ended before the last of them, in words")

    def resting(self, state: State = State.STOPPED, cause: str = "") -> Self:
        """Return the status without a worker: counts and positions stay, what only a process has does not."""
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
    """What belongs to a flow on its machine."""
    return settings.data_dir / FLOWS / flow


def worker_folder(settings: Settings, flow: str, worker: int = 0) -> Path:
    """What belongs to one of its workers: the flow's own folder for worker 0."""
    folder = flow_folder(settings, flow)
    return folder / WORKERS / str(worker) if worker else folder


def workers_of(settings: Settings, flow: str) -> list[int]:
    """The numbers of the workers that a flow has or had on this machine."""
    more = (flow_folder(settings, flow) / WORKERS).glob("*")
    return [0, *sorted(int(each.name) for each in more if each.name.isdecimal())]


def declaration_path(settings: Settings, flow: str) -> Path:
    return flow_folder(settings, flow) / "pipeline.json"


def status_path(settings: Settings, flow: str, worker: int = 0) -> Path:
    return worker_folder(settings, flow, worker) / "status.json"


def metrics_path(settings: Settings, flow: str, worker: int = 0) -> Path:
    """The metrics of its worker's process, as it left them a moment ago (millrace.observe.exposition)."""
    from millrace.base.metrics import METRICS_SUFFIX  # with it comes NumPy, which a DAG file has no use for

    return worker_folder(settings, flow, worker) / f"metrics{METRICS_SUFFIX}"


def pulse_path(settings: Settings, flow: str, worker: int = 0) -> Path:
    return worker_folder(settings, flow, worker) / "pulse"


def commands_path(settings: Settings, flow: str) -> Path:
    """Return the file of commands to a running worker, replaced as a whole.

    It contains ``{"paused": bool, "restart": "" | "all" | "failed", "serial": int}``.
    """
    return flow_folder(settings, flow) / "wanted.json"  # as in documents.py
