"""Supervision of a streaming job, with a job that only beats: adopted, restarted, taken for hung, given up, stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.runtime.launch.history import FAILURES, history_path, read_history
from millrace.runtime.launch.launcher import Launcher, RunState
from tests.airflow_home import ROOT
from tests.dags.conftest import RunDag
from tests.waiting import until

RUN = "streaming-node"


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout whose streaming job beats and does nothing else."""
    jobs = tmp_path / "home" / "jobs"
    jobs.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "runtime" / "beating_job.py", jobs / "streaming_node.py")
    monkeypatch.setenv("MILLRACE_HOME", str(jobs.parent))


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The settings of a test, with little patience for a job that does not end."""
    return replace(settings, stop_deadline=1.0)


@pytest.fixture
def launcher(settings: Settings) -> Launcher:
    return Launcher(settings)


def once_it_beats(settings: Settings, act: Callable[[int], None]) -> threading.Thread:
    """Calls `act` with the job's process id as soon as the job of now beats."""

    def wait() -> None:
        path = settings.run_path / "millrace-streaming-node.heartbeat.json"
        until(path.exists, "a beat of the job", seconds=30)
        pid = Launcher(settings).poll(RUN).pid
        assert pid is not None
        act(pid)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_run_leaves_the_job_running_and_the_next_adopts_it(run_dag: RunDag, launcher: Launcher) -> None:
    first = run_dag("supervised", {"watch_seconds": 1})
    before = launcher.poll(RUN)
    second = run_dag("supervised", {"watch_seconds": 1})
    after = launcher.poll(RUN)
    assert (first.state, second.state) == ("success", "success")
    assert (after.active, after.pid, after.attempt) == (True, before.pid, 1)
    assert second.results["supervise"]["queries"]["streaming-node"]["rows"] == 10


@pytest.mark.slow
def test_a_killed_job_is_started_again_after_a_pause(run_dag: RunDag, launcher: Launcher, settings: Settings) -> None:
    killer = once_it_beats(settings, lambda pid: os.kill(pid, signal.SIGKILL))
    ran = run_dag("supervised", {"watch_seconds": 6})
    killer.join()
    assert ran.results["supervise"]["restarts"] == 1
    status = launcher.poll(RUN)
    assert (status.active, status.attempt) == (True, 2)


@pytest.mark.slow
def test_a_job_that_stands_still_is_taken_for_hung_and_replaced(
    run_dag: RunDag, launcher: Launcher, settings: Settings
) -> None:
    stopper = once_it_beats(settings, lambda pid: os.kill(pid, signal.SIGSTOP))
    ran = run_dag("supervised", {"watch_seconds": 9})
    stopper.join()
    assert ran.results["supervise"]["restarts"] == 1
    status = launcher.poll(RUN)
    assert (status.active, status.attempt) == (True, 2)


def test_an_error_that_no_restart_cures_fails_the_task(run_dag: RunDag, launcher: Launcher, settings: Settings) -> None:
    breaker = once_it_beats(settings, lambda pid: (settings.run_path / "fail").touch())
    ran = run_dag("supervised", {"watch_seconds": 10})
    breaker.join()
    assert ran.tasks == {"supervise": "failed"}
    assert launcher.poll(RUN).state is RunState.FAILED
    (failure,) = [line for line in read_history(history_path(settings, FAILURES)) if line["kind"] == "task"]
    assert "WAL_GAP: rows are missing" in failure["error"]["message"]


@pytest.mark.slow
def test_a_paused_dag_stops_its_job(run_dag: RunDag, launcher: Launcher) -> None:
    from airflow.models.dag import DagModel
    from airflow.utils.session import create_session

    run_dag("supervised", {"watch_seconds": 1})
    assert launcher.poll(RUN).active

    def pause(paused: bool) -> None:
        with create_session() as session:
            model = session.get(DagModel, "supervised")
            assert model is not None
            model.is_paused = paused

    pause(True)
    try:
        assert run_dag("supervised", {"watch_seconds": 30}).state == "success"
    finally:
        pause(False)
    assert launcher.poll(RUN).state is RunState.STOPPED


def test_a_second_job_is_not_started_beside_one_that_somebody_runs_by_hand(
    run_dag: RunDag, launcher: Launcher, settings: Settings, tmp_path: Path
) -> None:
    script = tmp_path / "home" / "jobs" / "streaming_node.py"
    env = {**os.environ, **settings.environment(), "PYTHONPATH": str(ROOT / "include")}
    by_hand = subprocess.Popen([sys.executable, str(script), "--result", str(tmp_path / "result.json")], env=env)
    try:
        beat = settings.run_path / "millrace-streaming-node.heartbeat.json"
        until(beat.exists, "a beat of the job", seconds=30)
        assert run_dag("supervised").tasks == {"supervise": "failed"}
        assert launcher.runs() == []
    finally:
        by_hand.terminate()
        by_hand.wait(30)
