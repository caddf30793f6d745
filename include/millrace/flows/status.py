"""The status of a flow on either host. Imports no Spark.

:func:`processes_of` returns the state of a flow's supervisor and its processes. Each host adds the reports of its
processes: `flows/spark_host/status.py` for streams, `flows/range_host/observed.py` for pipelines. Lists, graphs,
metrics and the hosts' own JSON forms are derived from it. millrace.flows.directory finds the flows of a data folder.

    <data>/run/flows/<run id>/lock         held by the flow's supervisor
    <data>/run/flows/<run id>/<n>.json     the supervisor's record of process n (ProcessRecord)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, Field

from millrace.base.errors import RunNotFound
from millrace.base.files import replace_json
from millrace.base.process import is_alive
from millrace.base.settings import Settings
from millrace.flows.guarantee import Guarantee
from millrace.runtime.launch.folder import read_json
from millrace.runtime.launch.launcher import Launcher, RunState

Host = Literal["spark", "range"]
SCHEDULED_PREFIX: Final = "flow_"
"""Prefix of the DAGs that run flows by schedule. Starting one runs a transform's code and writes into a sink."""


def scheduled_dag_id(name: str) -> str:
    """Return the id of the DAG that runs a flow by its schedule."""
    return f"{SCHEDULED_PREFIX}{name}"


class FlowState(StrEnum):
    """The state of a flow."""

    NEW = "new"
    """It has never run."""
    STARTING = "starting"
    """Its process has started and has not reported yet."""
    RUNNING = "running"
    DEGRADED = "degraded"
    """It runs, and some of its lanes have failed."""
    PAUSED = "paused"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"
    """Its process ended without a result."""

    @property
    def live(self) -> bool:
        """Whether a process moves rows or is ready to."""
        return self in (FlowState.RUNNING, FlowState.DEGRADED)


class FlowStatus(BaseModel):
    """A flow and its state.

    On the range loop, rows are counted since the flow first ran; on Spark, since its process started.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    host: Host = Field(description="range: the range loop of a worker; spark: a streaming query")
    words: str = Field(default="", description="its description")
    source: str = Field(default="", description="kind:name, such as kafka:flights; empty: unknown")
    sink: str = ""
    reads: tuple[str, ...] = Field(default=(), description="all that it reads, its source first")
    writes: tuple[str, ...] = Field(default=(), description="all that it writes: its sink, its errors or late rows")
    guarantee: Guarantee | Literal[""] = ""
    job: str = Field(default="", description="the job that runs it: its own, or its group's")
    dag_id: str = Field(default="", description="the Airflow DAG that keeps its process running, if there is one")
    schedule: str = Field(default="", description="when its bounded runs start; empty: it always runs")
    state: FlowState
    error: str | None = Field(default=None, description="why the flow, or one of its lanes, does not run")
    since: float | None = Field(default=None, description="when its process started, seconds since 1970")
    at: float | None = Field(default=None, description="when it reported last, seconds since 1970")
    workers: int = Field(default=0, description="processes that run it now")
    restarts: int = Field(default=0, description="restarts of its processes since their supervisor started")
    last_end: str = Field(default="", description="how one of its processes ended before the last restart, in words")
    lanes: int = 0
    failed_lanes: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_error: int = Field(default=0, description="rows put aside as dead letters")
    rows_late: int = Field(default=0, description="rows behind the watermark, put aside or dropped by Spark")
    rows_filtered: int = 0
    rows_stale: int = Field(default=0, description="rows left out because the sink had a newer version of their id")
    rate: float = Field(default=0.0, description="rows read a second")
    lag_seconds: float | None = Field(
        default=None, description="behind a collection, in log time, or behind a captured database"
    )
    lag_bytes: int | None = Field(default=None, description="unread bytes of a captured database's log")
    source_counts: dict[str, int] = Field(
        default_factory=dict,
        description="messages of a best-effort source: received, dropped, dropped_by_kernel, truncated, malformed, and,"
        " by their sequence numbers, lost, late, repeated, restarts",
    )
    lag_records: int | None = Field(default=None, description="unread records of topics")
    watermark: str | None = None
    state_rows: int = Field(default=0, description="rows in the state of its operators")
    state_bytes: int = 0
    incarnation: int = Field(default=0, description="for a Spark flow, the number of its checkpoint")
    batches: int = 0
    operated: dict[str, int] | None = Field(
        default=None,
        description="the outcome of an operator's input rows: taken + late + rejected are all of them; also partly_late"
        " (too late for one of their windows), corrected (results written again) and evicted (rows of state that the"
        " watermark has passed)",
    )

    @property
    def node(self) -> str:
        """The flow's key in a graph, distinct from those of sources and sinks."""
        return f"{'stream' if self.host == 'spark' else 'pipeline'}:{self.name}"


def process_began(pid: int) -> float | None:
    """Return when a process started, in seconds since 1970; None if it has ended."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


_RECORDED_WORDS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A process of a flow, as its supervisor records it."""

    pid: int = 0
    """Its process id; 0 if none runs."""
    start: str = ""
    """Its start (:attr:`millrace.base.process.ProcessInfo.start`), since process ids are reused."""
    runs: tuple[str, ...] = ()
    """The flows that it runs: those of its group that are not paused."""
    ends: int = 0
    """Failed processes since their supervisor started."""
    ended_at: float = 0.0
    """When the last one failed, seconds since 1970."""
    cause: str = ""
    """Why it failed."""
    retry_at: float | None = None
    """When the next one is started, seconds since 1970; None if it has started or will not."""

    @property
    def alive(self) -> bool:
        """Whether exactly this process still runs."""
        return self.pid > 0 and is_alive(self.pid, self.start)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record. Return an empty one if the file is missing, damaged, or of another build."""
        found = read_json(path) or {}
        try:
            known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            return cls(**known | {"runs": tuple(known.get("runs", ())), "cause": str(known.get("cause", ""))})
        except TypeError:
            return cls()

    def write(self, path: Path) -> None:
        """Replace the record."""
        replace_json(path, asdict(self) | {"cause": self.cause[:_RECORDED_WORDS]})


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowProcesses:
    """A flow's supervisor and its processes."""

    state: FlowState
    """NEW, RUNNING, STOPPED, FAILED or LOST, as far as a supervisor in the background knows."""
    began: float = 0.0
    """When the supervisor was started in the background; 0 if it never was."""
    ended: float = 0.0
    """When it ended; 0 while it runs."""
    error: str | None = None
    """Why the supervisor ended, or why its processes do not run."""
    records: tuple[ProcessRecord, ...] = ()

    @property
    def active(self) -> bool:
        """Whether a supervisor runs in the background."""
        return bool(self.began) and not self.ended

    @property
    def restarts(self) -> int:
        return sum(each.ends for each in self._own)

    @property
    def last_end(self) -> ProcessRecord:
        """The record with the newest failure since the supervisor began; an empty one without failures."""
        return max(self._own, key=lambda each: each.ended_at, default=ProcessRecord())

    @property
    def waiting(self) -> str:
        """Why no process runs and when the next one starts; empty if one runs, or none will start."""
        last = self.last_end
        if any(each.pid for each in self.records) or last.retry_at is None:
            return ""
        pause = max(0.0, last.retry_at - time.time())
        return f"{last.cause}; it restarts" + (f" in {pause:.0f} s" if pause >= 1 else "")

    @property
    def _own(self) -> Sequence[ProcessRecord]:
        return [each for each in self.records if each.ended_at >= self.began]


def supervised_folder(settings: Settings, run_id: str) -> Path:
    """Return the folder of a flow's supervisor."""
    return settings.run_path / "flows" / run_id


def records_of(folder: Path) -> dict[int, ProcessRecord]:
    """Return the process records of the supervisor with this folder, by number."""
    found = (each for each in folder.glob("*.json") if each.stem.isdecimal())
    return {int(each.stem): ProcessRecord.read(each) for each in sorted(found)}


def processes_of(settings: Settings, run_id: str) -> FlowProcesses:
    """Return the state of a flow's supervisor and processes."""
    records = tuple(records_of(supervised_folder(settings, run_id)).values())
    try:
        run = Launcher(settings).poll(run_id)
    except RunNotFound:
        return FlowProcesses(state=FlowState.NEW, records=records)
    error = None if run.error is None or run.active else str(run.error)
    state = FlowState.STOPPED if run.state is RunState.FINISHED else FlowState(str(run.state))
    found = FlowProcesses(
        state=state, began=run.started_at, ended=run.ended_at or 0.0, error=error, records=records
    )  # fmt: skip
    if found.active and (why := found.waiting):
        changed: dict[str, Any] = {"state": FlowState.FAILED, "error": why}
        return FlowProcesses(began=run.started_at, records=records, **changed)
    return found
