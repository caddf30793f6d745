"""JobOperator in a DAG run: it waits without a slot, hands on the report, and fails as the job's error says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.runtime.launch.history import FAILURES, OPERATIONS, history_path, read_history
from millrace.runtime.launch.launcher import Launcher, RunState
from tests.airflow_home import ROOT
from tests.dags.conftest import Ran, RunDag


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout whose jobs/ has the light job."""
    jobs = tmp_path / "home" / "jobs"
    jobs.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "runtime" / "light_job.py", jobs / "light.py")
    (jobs / "streaming_node.py").touch()
    monkeypatch.setenv("MILLRACE_HOME", str(jobs.parent))


@pytest.mark.slow
def test_a_job_is_waited_for_and_its_report_is_the_result(run_dag: RunDag, settings: Settings) -> None:
    ran = run_dag("light", {"number": 4, "write": "hello"})
    assert ran == Ran("success", {"run": "success"}, {"run": {"said": "hello since 1970", "number": 8}})
    (line,) = read_history(history_path(settings, OPERATIONS))
    assert (line["job"], line["state"]) == ("light", "finished")
    (status,) = Launcher(settings).runs()
    assert (status.state, status.collected) == (RunState.FINISHED, True)


def test_an_error_that_no_retry_cures_fails_the_task_at_once_and_is_recorded(
    run_dag: RunDag, settings: Settings
) -> None:
    ran = run_dag("light", {"fail": "TickTooOld"})
    assert ran.tasks == {"run": "failed"}
    (failure,) = [line for line in read_history(history_path(settings, FAILURES)) if line["kind"] == "task"]
    assert (failure["dag_id"], failure["task_id"]) == ("light", "run")
    assert "TICK_TOO_OLD: as asked" in failure["error"]["message"]


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_stopped(run_dag: RunDag, settings: Settings, tmp_path: Path) -> None:
    assert run_dag("light", {"wait_for": str(tmp_path / "never")}).tasks == {"run": "failed"}
    (status,) = Launcher(settings).runs()
    assert status.state is RunState.STOPPED
    (failure,) = [line for line in read_history(history_path(settings, FAILURES)) if line["kind"] == "task"]
    assert failure["error"]["code"] == "DEADLINE_EXCEEDED"


def test_wrong_parameters_start_nothing(run_dag: RunDag, settings: Settings) -> None:
    ran = run_dag("light", {"number": 7})
    assert ran.tasks == {"run": "failed"}
    assert Launcher(settings).runs() == []
