"""Defaults of every DAG.

Who owns it, when it is tried again, who hears when it is late; and the failures that are recorded.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import RetryAction
from airflow.sdk.exceptions import AirflowFailException

from millrace.base.errors import CommitFenced, TickTooOld
from millrace.base.settings import Settings
from millrace.runtime.launch.history import FAILURES, history_path, read_history
from millrace_airflow import listener
from millrace_airflow.alerts import deadline_missed
from millrace_airflow.defaults import FaultClassPolicy, millrace_dag
from millrace_airflow.errors import JobConflict, JobError, JobLost, JobUnavailable, raise_for


@pytest.fixture
def here(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.mark.parametrize(
    ("code", "kind", "seconds"),
    [
        ("COMMIT_FENCED", JobConflict, 5),
        ("LOG_UNAVAILABLE", JobUnavailable, 30),
        ("JOB_LOST", JobLost, 15),
        ("Py4JError", JobError, None),
    ],
)
def test_an_error_that_may_pass_is_tried_again_when_its_class_says(code: str, kind: type, seconds: int | None) -> None:
    with pytest.raises(kind) as raised:
        raise_for(code, "as it was", retriable=True)
    decision = FaultClassPolicy().evaluate(raised.value, 1, 3)
    if seconds is None:
        assert decision.action is RetryAction.DEFAULT
    else:
        assert decision.action is RetryAction.RETRY
        assert decision.retry_delay == timedelta(seconds=seconds)


def test_an_error_that_no_retry_cures_fails_at_once() -> None:
    with pytest.raises(AirflowFailException, match="TICK_TOO_OLD: gone"):
        raise_for("TICK_TOO_OLD", "gone", retriable=False)
    assert FaultClassPolicy().evaluate(TickTooOld("gone"), 1, 3).action is RetryAction.FAIL
    assert FaultClassPolicy().evaluate(CommitFenced("late"), 1, 3).action is RetryAction.RETRY
    assert FaultClassPolicy().evaluate(ValueError("odd"), 1, 3).action is RetryAction.DEFAULT


def test_a_dag_has_owner_tags_docs_and_an_alert() -> None:
    dag = millrace_dag("some", doc="Does it.\n\nWith care.", tags=["own"], deadline=timedelta(minutes=5))
    assert dag.description == "Does it."
    assert dag.doc_md == "Does it.\n\nWith care."
    assert set(dag.tags) == {"millrace", "own"}
    assert dag.default_args["owner"] == "millrace"
    assert dag.max_active_runs == 1
    assert dag.deadline is not None


def test_a_late_run_is_recorded(here: Settings) -> None:
    asyncio.run(deadline_missed(dag_id="some", seconds=60.0, context={"dag_run": {"dag_run_id": "r1"}}))
    (line,) = read_history(history_path(here, FAILURES))
    assert (line["kind"], line["dag_id"], line["run_id"]) == ("deadline", "some", "r1")


def failed_task(tags: set[str]) -> Any:
    dag = SimpleNamespace(tags=tags)
    return SimpleNamespace(
        task=SimpleNamespace(dag=dag), dag_id="d", task_id="t", run_id="r", map_index=-1, try_number=2, state="failed"
    )


def test_a_failed_task_of_ours_is_recorded_and_one_of_others_is_not(here: Settings) -> None:
    listener.on_task_instance_failed("running", failed_task({"theirs"}), ValueError("no matter"))
    listener.on_task_instance_failed("running", failed_task({"millrace"}), JobLost("gone", code="JOB_LOST"))
    (line,) = read_history(history_path(here, FAILURES))
    assert (line["task_id"], line["try_number"]) == ("t", 2)
    assert line["error"] == {"code": "JOB_LOST", "message": "gone"}
