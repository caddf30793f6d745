"""How the worker of a flow runs: who keeps it alive, when it is started again, and what it may take."""

from __future__ import annotations

from typing import Final

from millrace.flows.declare.part import Part, words

AIRFLOW: Final = "airflow"
"""The deployment of a worker that a DAG keeps alive."""


class Recovery(Part):
    """A task that failed is started again by the supervisor."""

    interval_minutes: float = words(
        "watchWorkersIntervalMin: first pause before a failed task starts again", default=5, ge=0.001, le=1440
    )
    factor: float = words("the next pause is so many times longer", default=2, ge=1, le=10)
    longest_minutes: float = words("longest pause", default=60, ge=0.001, le=10_080)
    attempts: int = words(
        "recoveries in a row that came to nothing, before the task stays failed; 0: none", default=10, ge=0, le=10_000
    )


class Resources(Part):
    """The workers, and the limits of each."""

    cpus: float = words("cores", default=1, ge=0.1, le=256)
    memory_mib: int = words("memory", default=1024, ge=128, le=1 << 20)
    tasks: int = words("ranges that run at once; 0: one for each core", default=0, ge=0, le=1024)
    workers: int = words(
        "worker processes on this machine; of topics, more than one need source.assignment: group",
        default=1,
        ge=1,
        le=64,
    )
