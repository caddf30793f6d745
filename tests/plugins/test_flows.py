"""DAGs of flows with a schedule: one each, on its host, which ends; what runs already, has ended or is paused."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSkipException, TaskDeferred

from millrace.base.errors import InvalidSettings, InvalidStream
from millrace.base.settings import Settings
from millrace.flows.control import pause_workers
from millrace.runtime.launch.command import JobSpec
from millrace.runtime.launch.launcher import Launcher
from millrace_airflow.flows import scheduled_dags
from millrace_airflow.streams import stream_dags
from tests.flows.test_scheduled import DECLARED


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "flows.yaml").write_text(DECLARED, encoding="utf-8")
    monkeypatch.setenv("MILLRACE_FLOW_DECLARATIONS", str(tmp_path / "flows.yaml"))
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path / "data"))
    return Settings.load()


def test_each_flow_with_a_schedule_has_a_dag_and_none_that_keeps_it_alive(settings: Settings) -> None:
    dags = scheduled_dags(settings)
    assert sorted(dags) == ["flow_hourly", "flow_nightly", "flow_on_spark"]
    nightly = dags["flow_nightly"]
    assert (nightly.schedule, nightly.max_active_runs, nightly.catchup) == ("0 2 * * *", 1, False)
    assert nightly.is_paused_upon_creation
    [task] = nightly.tasks
    assert task.flow == "nightly"
    assert [each.uri for each in task.inlets] == ["millrace://collection/flights"]
    assert [each.uri for each in task.outlets] == ["millrace://collection/copied", "millrace://collection/letters"]
    assert "runs at `0 2 * * *` (UTC)" in str(nightly.doc_md)
    [hourly] = dags["flow_hourly"].tasks
    assert [each.uri for each in hourly.outlets] == ["millrace://collection/copied"]
    assert "stream_hourly" not in stream_dags(settings)


def test_a_declaration_that_is_wrong_is_an_import_error(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "flows.yaml").write_text(DECLARED.replace("0 2 * * *", "0 2 30 2 *"), encoding="utf-8")
    with pytest.raises(InvalidStream, match=r"flow 0 \(nightly\): schedule: no month of '2' has a day 30"):
        scheduled_dags(settings)


def test_a_connection_that_airflow_lacks_is_told_before_anything_starts(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flows.yaml").write_text(
        """
flows:
- name: shop
  schedule: "@hourly"
  source: {kind: query, engine: mariadb, host: db, user: me, password: "${connection:shop_db}", database: shop,
    table: a, column: id}
  sink: {kind: collection, collection: rows}
  errors: {collection: letters}
""",
        encoding="utf-8",
    )
    [task] = scheduled_dags(settings)["flow_shop"].tasks
    monkeypatch.delenv("AIRFLOW_CONN_SHOP_DB", raising=False)
    context: Any = {"ti": None, "dag_run": SimpleNamespace(start_date=datetime.now(UTC))}
    with pytest.raises(InvalidSettings, match=r"Airflow has no connection shop_db with a password.*connections add"):
        task.execute(context)
    assert Launcher(settings).runs() == []


def test_a_run_is_waited_for_once_and_what_ended_before_it_is_not_its_own(settings: Settings, tmp_path: Path) -> None:
    [task] = scheduled_dags(settings)["flow_nightly"].tasks
    pushed: dict[str, str] = {}

    def context(begun: float) -> Any:
        ti = SimpleNamespace(xcom_push=lambda key, value: pushed.update({key: value}))
        return {"ti": ti, "dag_run": SimpleNamespace(start_date=datetime.fromtimestamp(begun, UTC))}

    launcher = Launcher(settings)
    ends = "import json, sys; open(sys.argv[2], 'w').write(json.dumps({'ok': True, 'report': {}}))"
    launcher.start("pipeline-nightly", JobSpec("pipeline", (sys.executable, "-c", ends)))
    done = launcher.wait("pipeline-nightly", deadline=30)
    assert task.execute(context(done.started_at - 5))["rows_in"] == 0, "an earlier try had started it"
    assert pushed == {"millrace_run_id": "pipeline-nightly"}
    assert launcher.poll("pipeline-nightly").attempt == done.attempt
    launcher.start("pipeline-nightly", JobSpec("pipeline", (sys.executable, "-c", ends)))
    done = launcher.wait("pipeline-nightly", deadline=30)  # somebody else's, before the DAG's run began
    try:
        with pytest.raises(TaskDeferred) as deferred:
            task.execute(context(time.time()))
        assert deferred.value.trigger.run_id == "pipeline-nightly"
        started = launcher.poll("pipeline-nightly")
        assert (started.active, started.attempt) == (True, done.attempt + 1)
        with pytest.raises(TaskDeferred):  # another try
            task.execute(context(time.time()))
        assert launcher.poll("pipeline-nightly").attempt == started.attempt
    finally:
        launcher.stop("pipeline-nightly")
    pause_workers(settings, "nightly", paused=True)
    with pytest.raises(AirflowSkipException, match="nightly is paused: `millrace flows resume nightly`"):
        task.execute(context(time.time()))
