"""Millrace's waiting operations, in the order in which they may begin.

Jobs wait for a place, tasks for a worker, and runs for the previous run. The module reads Airflow's database, in which
the API server runs anyway. Airflow's REST API decides who may see and cancel runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState, TaskInstanceState
from sqlalchemy import select

from millrace.observe.models import OperationRow
from millrace.operations.registry import operations
from millrace.runtime.spark.slots import DURATION_SAMPLES, Ticket, expected_start
from millrace_airflow.operators import run_id_of

MAX_ENTRIES: Final = 100
"""The most rows that the page shows."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """An entry that has not begun, or waits for its turn to continue."""

    position: int
    """Its position, from 1 on."""
    dag_id: str
    """The DAG; empty for a job that Airflow did not start."""
    dag_run_id: str
    job: str
    words: str
    """The reason for its wait."""
    since: float | None
    expected_start: float | None
    """Unix seconds; None if unknown."""
    run_id: str = ""
    """The run id of its job, if that has begun to wait."""


def queue_entries(jobs: Sequence[OperationRow], *, now: float | None = None) -> list[QueueEntry]:
    """Return everything that waits, including `jobs` (those that wait for a place, or run), the next one first."""
    now = time.time() if now is None else now
    dags = {each.dag_id for each in operations().values()}
    with create_session() as session:
        runs = list(
            session.scalars(
                select(DagRun)
                .where(DagRun.dag_id.in_(dags), DagRun.state.in_([DagRunState.QUEUED, DagRunState.RUNNING]))
                .order_by(DagRun.queued_at, DagRun.id)
                .limit(MAX_ENTRIES)
            )
        )
        tasks = list(
            session.scalars(
                select(TaskInstance)
                .where(
                    TaskInstance.dag_id.in_(dags),
                    TaskInstance.state.in_(
                        [TaskInstanceState.SCHEDULED, TaskInstanceState.QUEUED, TaskInstanceState.DEFERRED]
                    ),
                )
                .order_by(TaskInstance.queued_dttm, TaskInstance.id)
                .limit(MAX_ENTRIES)
            )
        )
        queued = {each.dag_id for each in runs if each.state == DagRunState.QUEUED}
        typical = {dag_id: _typical(session, dag_id) for dag_id in queued}
        most = dict(
            session.execute(select(DagModel.dag_id, DagModel.max_active_runs).where(DagModel.dag_id.in_(queued))).all()
        )
    found = [
        *_for_a_place(jobs, {run_id_of({"ti": each}): each for each in tasks if _state(each) == "deferred"}),
        *(_for_a_worker(each) for each in tasks if _state(each) != "deferred"),
        *_for_a_run(runs, typical, most, now=now),
    ]
    return [
        QueueEntry(
            number, each.dag_id, each.dag_run_id, each.job, each.words, each.since, each.expected_start, each.run_id
        )
        for number, each in enumerate(found, 1)
    ]


def _for_a_place(jobs: Sequence[OperationRow], tasks: Mapping[str, Any]) -> list[QueueEntry]:
    """Return the jobs that wait in turn for a Spark session's place (millrace.runtime.spark.slots)."""
    found = []
    for each in sorted((each for each in jobs if each.state == "waiting"), key=lambda each: each.before or 0):
        task = tasks.get(each.run_id)
        dag_id, run_id = ("", "") if task is None else (task.dag_id, task.run_id)
        found.append(
            QueueEntry(0, dag_id, run_id, each.job, each.words, each.started, each.expected_start, run_id=each.run_id)
        )
    return found


def _for_a_worker(task: Any) -> QueueEntry:
    words = f"task {task.task_id}: waits for a worker of Airflow"
    return QueueEntry(0, task.dag_id, task.run_id, task.dag_id, words, _seconds(task.queued_dttm), None)


def _for_a_run(
    runs: Sequence[Any], typical: Mapping[str, float | None], most: Mapping[str, int | None], *, now: float
) -> list[QueueEntry]:
    """Return the runs that Airflow has queued, with an estimate of their start from the DAG's last runs."""
    before: dict[str, list[Ticket]] = {}
    for each in runs:
        if each.state == DagRunState.RUNNING:
            began = _seconds(each.start_date) or now
            before.setdefault(each.dag_id, []).append(Ticket(each.dag_id, 0, began, running=True))
    found = []
    for each in runs:
        if each.state != DagRunState.QUEUED:
            continue
        tickets = before.setdefault(each.dag_id, [])
        seconds = typical.get(each.dag_id)
        lengths = {} if seconds is None else {each.dag_id: seconds}
        starts = expected_start(tickets, lengths, most.get(each.dag_id) or 1, now=now)
        words = f"a run of {each.dag_id}: " + (
            f"{len(tickets)} of the same DAG before it" if tickets else "Airflow has not begun it yet"
        )
        found.append(QueueEntry(0, each.dag_id, each.run_id, each.dag_id, words, _seconds(each.queued_at), starts))
        tickets.append(Ticket(each.dag_id, 0, now, running=False))
    return found


def _typical(session: Any, dag_id: str) -> float | None:
    """Return the median length of a DAG's last successful runs; None if there are none."""
    ended = session.execute(
        select(DagRun.start_date, DagRun.end_date)
        .where(DagRun.dag_id == dag_id, DagRun.state == DagRunState.SUCCESS, DagRun.end_date.is_not(None))
        .order_by(DagRun.end_date.desc())
        .limit(DURATION_SAMPLES)
    ).all()
    lengths = [(end - start).total_seconds() for start, end in ended if start is not None]
    return statistics.median(lengths) if lengths else None


def _state(task: Any) -> str:
    return str(getattr(task.state, "value", task.state))


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
