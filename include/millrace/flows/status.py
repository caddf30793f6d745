"""The status of a flow, whichever host runs it. Imports no Spark.

Each host makes it from its own files: `flows/spark_host/status.py` for streams, `flows/range_host/observed.py` for
pipelines. Lists, graphs, metrics and the hosts' own JSON forms are made from it, and compute nothing again.
millrace.flows.directory finds the flows of a data folder.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field

from millrace.flows.guarantee import Guarantee

Host = Literal["spark", "range"]


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
        """Whether a process moves rows, or could."""
        return self in (FlowState.RUNNING, FlowState.DEGRADED)


class FlowStatus(BaseModel):
    """A flow, and how it is doing.

    Rows of a flow on the range loop are those of all time; those of a Spark flow are counted since its process began.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    host: Host = Field(description="range: the range loop of a worker; spark: a streaming query")
    words: str = Field(default="", description="its description")
    source: str = Field(default="", description="kind:name, such as kafka:flights; empty: not known")
    sink: str = ""
    reads: tuple[str, ...] = Field(default=(), description="all that it reads, its source first")
    writes: tuple[str, ...] = Field(default=(), description="all that it writes: its sink, its errors or late rows")
    guarantee: Guarantee | Literal[""] = ""
    job: str = Field(default="", description="the job that runs it: its own, or its group's")
    dag_id: str = Field(default="", description="the DAG of Airflow that keeps its process alive, if there is one")
    state: FlowState
    error: str | None = Field(default=None, description="why it, or one of its lanes, does not run")
    since: float | None = Field(default=None, description="when its process began, seconds since 1970")
    at: float | None = Field(default=None, description="when it reported last, seconds since 1970")
    workers: int = Field(default=0, description="processes that run it now")
    lanes: int = 0
    failed_lanes: int = 0
    rows_in: int = 0
    rows_out: int = 0
    rows_error: int = Field(default=0, description="put aside as dead letters")
    rows_late: int = Field(default=0, description="put aside, or dropped by Spark, behind the watermark")
    rows_filtered: int = 0
    rows_stale: int = Field(default=0, description="left out: the sink holds a newer version of their id")
    rate: float = Field(default=0.0, description="rows read a second")
    lag_seconds: float | None = Field(default=None, description="behind a collection, in log time")
    lag_records: int | None = Field(default=None, description="records of topics that were not read yet")
    watermark: str | None = None
    state_rows: int = Field(default=0, description="rows in the state of its operators")
    state_bytes: int = 0
    incarnation: int = Field(default=0, description="of a Spark flow: counts its checkpoints")
    batches: int = 0
    operated: dict[str, int] | None = Field(
        default=None,
        description="the outcome of an operator's input rows: taken + late + rejected are all of them; also partly_late"
        " (too late for one of their windows), corrected (answers given again) and evicted (rows of state that the"
        " watermark has passed)",
    )

    @property
    def node(self) -> str:
        """The flow's key in a graph, which no source or sink has."""
        return f"{'stream' if self.host == 'spark' else 'pipeline'}:{self.name}"


def process_began(pid: int) -> float | None:
    """Return when a process began, in seconds since 1970; None if it is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None
