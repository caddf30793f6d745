"""What waits is shown with its position, what it waits for, when it may begin, and a way to cancel it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.observe.models import OperationRow
from millrace.runtime.launch.folder import RunFolder
from millrace.runtime.spark.slots import EXPECTED_START, JOBS_AHEAD
from tests.plugins.ui.conftest import Site

NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
AT = NOW.timestamp()


def run(
    dag_id: str, run_id: str, state: str, *, queued: float = 0.0, start: float | None = None, end: float | None = None
) -> None:
    """A run in Airflow's database; moments in seconds from NOW."""
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session

    def at(seconds: float | None) -> datetime | None:
        return None if seconds is None else NOW + timedelta(seconds=seconds)

    with create_session() as session:
        made = DagRun(
            dag_id=dag_id, run_id=run_id, run_type="manual", state=state, queued_at=at(queued), start_date=at(start),
            run_after=NOW, logical_date=None,
        )  # fmt: skip
        made.end_date = at(end)
        session.add(made)


def task(dag_id: str, task_id: str, run_id: str, state: str) -> None:
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session

    table: Any = TaskInstance.__table__
    values = {
        "id": uuid.uuid4(), "dag_id": dag_id, "task_id": task_id, "run_id": run_id, "map_index": -1, "state": state,
        "queued_dttm": NOW, "pool": "default_pool", "pool_slots": 1, "try_number": 1,
    }  # fmt: skip
    with create_session() as session:
        session.execute(table.insert().values(**values))


@pytest.fixture(autouse=True)
def airflow(airflow_database: None) -> Iterator[None]:
    """Airflow's database without a run, before and behind a test."""
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import delete

    def empty() -> None:
        with create_session() as session:
            session.execute(delete(TaskInstance))
            session.execute(delete(DagRun))

    empty()
    yield
    empty()


def job(run_id: str, *, state: str = "waiting", before: int | None = 1) -> OperationRow:
    return OperationRow(
        job="quality", run_id=run_id, state=state, attempt=1, started=AT, ended=None, words="waiting for a slot",
        before=before, expected_start=AT + 90,
    )  # fmt: skip


def test_what_waits_is_in_the_order_in_which_it_may_begin() -> None:
    from millrace_airflow.operators import run_id_of
    from millrace_airflow.ui.queue import queue_entries

    for number in range(3):
        run("quality", f"old{number}", "success", queued=-900, start=-800 + number, end=-700 + number)
    run("quality", "first", "running", queued=-60, start=-40)
    run("quality", "third", "queued", queued=-10)
    run("quality", "second", "queued", queued=-30)
    run("compaction", "compacts", "running", queued=-5, start=-4)
    run("somebodys", "other", "queued", queued=-99)
    task("quality", "check", "first", "deferred")
    task("compaction", "needed", "compacts", "queued")
    known = run_id_of({"ti": SimpleNamespace(dag_id="quality", task_id="check", run_id="first", map_index=-1)})
    jobs = [job("by-hand.1", before=2), job(known, before=1), job("runs", state="running", before=None)]
    found = queue_entries(jobs, now=AT)
    assert [(each.position, each.dag_id, each.dag_run_id) for each in found] == [
        (1, "quality", "first"), (2, "", ""), (3, "compaction", "compacts"), (4, "quality", "second"),
        (5, "quality", "third"),
    ]  # fmt: skip
    assert [each.expected_start for each in found] == [AT + 90, AT + 90, None, AT + 60, AT + 160]
    assert "1 of the same DAG before it" in found[3].words
    assert "2 of the same DAG before it" in found[4].words


def test_a_dag_that_has_never_ended_has_no_expected_start() -> None:
    from millrace_airflow.ui.queue import queue_entries

    run("backup", "first", "running", start=-40)
    run("backup", "second", "queued")
    assert [each.expected_start for each in queue_entries([], now=AT)] == [None]


def test_the_page_shows_what_waits_and_lets_an_op_cancel_it(own_site: Site, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    run("quality", "second", "queued")
    folder = RunFolder(settings, "by-hand.1")
    held = folder.try_lock()
    assert held is not None
    replace_json(folder.params, {"job": "compaction", "attempt": 1, "at": AT, "params": {}})
    replace_json(folder.progress, {"words": "waiting for a slot", "figures": {JOBS_AHEAD: 1, EXPECTED_START: AT}})
    try:
        page = own_site.page("maintenance")
    finally:
        os.close(held)
    assert "<h2>Waiting</h2>" in page
    assert "<h2>Running now</h2>" not in page
    assert 'data-cancel="second" data-cancel-dag="quality" disabled' in page, "a viewer"
    assert "millrace jobs stop by-hand.1" in page
    op = own_site.get("maintenance", role="op", html=True).text
    assert 'data-cancel="second" data-cancel-dag="quality">Cancel' in op
    assert "<h2>Waiting</h2>" not in own_site.page("maintenance", run="another")
