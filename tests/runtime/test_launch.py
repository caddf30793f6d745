"""The launcher: a job starts once, outlives who started it, is found again, and every way
in which it ends is told apart.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import InvalidArgument, RunNotFound
from millrace.base.files import replace_json
from millrace.base.process import ProcessInfo, current_process, find_process, is_alive
from millrace.base.settings import Settings
from millrace.runtime.launch.command import environment_of
from millrace.runtime.launch.folder import RunFolder, read_json
from millrace.runtime.launch.history import OPERATIONS, append_history, history_path, read_history
from millrace.runtime.launch.launcher import Launcher, RunState, processes_of
from millrace.runtime.spark.slots import JOBS_AHEAD
from tests.waiting import until


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    folder = tmp_path / "jobs"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("light_job.py"), folder / "light.py")
    return folder


@pytest.fixture
def launcher(settings: Settings, jobs: Path) -> Iterator[Launcher]:
    made = Launcher(replace(settings, stop_deadline=5.0), jobs=jobs)
    yield made
    for status in made.runs():
        made.stop(status.run_id, deadline=0.1)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The job waits until this file is there."""
    return tmp_path / "gate"


def started(pid: int) -> ProcessInfo:
    found = find_process(pid)
    assert found is not None
    return found


def processes(folder: RunFolder) -> list[int]:
    """What runs of the job, itself included."""
    identity = read_json(folder.identity)
    return [] if identity is None else [each.pid for each in processes_of(folder.path, session=identity["pid"])]


def at_work(launcher: Launcher, run_id: str) -> bool:
    return (launcher.poll(run_id).progress or {}).get("words") == "at work"


def test_a_folder_that_is_no_runs_is_neither_listed_nor_cleaned_away(launcher: Launcher, settings: Settings) -> None:
    folder = settings.run_path / "operations" / "my notes"
    folder.mkdir(parents=True)
    (folder / "params.json").write_text('{"job": "light", "at": 1}')
    assert launcher.runs() == []
    assert launcher.clean(older_than=0, keep=0) == []
    assert (folder / "params.json").exists()


def test_a_job_runs_to_its_report_and_into_the_history(launcher: Launcher, settings: Settings) -> None:
    started = launcher.start("one", "light", params={"write": "hello"})
    assert started.attempt == 1
    status = launcher.wait("one", deadline=30)
    assert status.state is RunState.FINISHED
    assert status.report == {"said": "hello", "number": 1}
    assert status.progress is not None
    assert status.progress["figures"] == {"rows": 7}
    launcher.poll("one")  # an end is told once, however often it is looked at
    lines = read_history(history_path(settings, OPERATIONS))
    assert [(line["run_id"], line["state"], line["report"]) for line in lines] == [
        ("one", "finished", {"said": "hello", "number": 1})
    ]


def test_a_second_start_of_a_running_job_attaches_to_it(launcher: Launcher, gate: Path) -> None:
    first = launcher.start("one", "light", params={"wait_for": str(gate)})
    again = launcher.start("one", "light", params={"wait_for": str(gate)})
    assert (again.pid, again.attempt) == (first.pid, 1)


def test_starters_that_race_start_one_job(launcher: Launcher, gate: Path, settings: Settings) -> None:
    found: list[int | None] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        launcher.start("one", "light", params={"wait_for": str(gate)})
        found.append(launcher.poll("one").pid)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    until(lambda: at_work(launcher, "one"))
    folder = RunFolder(settings, "one")
    assert processes(folder) == [launcher.poll("one").pid]
    assert not (folder.path / "earlier").exists()


def test_a_job_outlives_a_starter_that_is_killed(
    launcher: Launcher, gate: Path, settings: Settings, jobs: Path
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from millrace.runtime.launch.launcher import Launcher;"
        "from millrace.base.settings import Settings;"
        f"Launcher(Settings.load(), jobs=Path({str(jobs)!r})).start('one', 'light', params={{'wait_for':"
        f" {str(gate)!r}}});"
        "print('started', flush=True); time.sleep(600)"
    )
    include = str(Path(__file__).resolve().parents[2] / "include")
    starter = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, **settings.environment(), "PYTHONPATH": include},
        start_new_session=True,
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == b"started\n"
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert launcher.attach("one").state is RunState.RUNNING
    gate.touch()
    assert launcher.wait("one", deadline=30).state is RunState.FINISHED


def test_a_job_that_is_killed_is_lost_and_its_next_start_is_a_new_attempt(launcher: Launcher, gate: Path) -> None:
    first = launcher.start("one", "light", params={"wait_for": str(gate)})
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    lost = launcher.wait("one", deadline=10)
    assert lost.state is RunState.LOST
    assert lost.error is not None
    assert (lost.error.code, lost.error.retriable) == ("JOB_LOST", True)
    gate.touch()
    assert launcher.start("one", "light", params={"wait_for": str(gate)}).attempt == 2
    assert launcher.wait("one", deadline=30).state is RunState.FINISHED


def test_a_lost_jobs_children_are_gone_before_its_next_attempt(
    launcher: Launcher, gate: Path, settings: Settings
) -> None:
    first = launcher.start("one", "light", params={"wait_for": str(gate), "stubborn": True})
    folder = RunFolder(settings, "one")
    until(lambda: len(processes(folder)) == 2)
    child = next(pid for pid in processes(folder) if pid != first.pid)
    start = started(child).start
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    launcher.wait("one", deadline=10)
    gate.touch()
    launcher.start("one", "light", params={"wait_for": str(gate)})
    until(lambda: not is_alive(child, start))
    launcher.wait("one", deadline=30)


@pytest.mark.parametrize(
    ("error", "code", "retriable"),
    [("LogUnavailable", "LOG_UNAVAILABLE", True), ("TickTooOld", "TICK_TOO_OLD", False), ("Other", "ValueError", True)],
)
def test_a_failure_carries_its_code_and_whether_a_retry_helps(
    launcher: Launcher, error: str, code: str, retriable: bool
) -> None:
    launcher.start("one", "light", params={"fail": error})
    status = launcher.wait("one", deadline=30)
    assert status.state is RunState.FAILED
    assert status.error is not None
    assert (status.error.code, status.error.message, status.error.retriable) == (code, "as asked", retriable)
    assert "as asked" in status.tail()


def test_stop_ends_a_job_by_sigterm(launcher: Launcher, gate: Path) -> None:
    launcher.start("one", "light", params={"wait_for": str(gate)})
    until(lambda: at_work(launcher, "one"))
    status = launcher.stop("one")
    assert (status.state, status.error) == (RunState.STOPPED, None)


def test_a_job_that_hears_sigterm_from_anybody_says_that_it_was_stopped(launcher: Launcher, gate: Path) -> None:
    pid = launcher.start("one", "light", params={"wait_for": str(gate)}).pid
    until(lambda: at_work(launcher, "one"))
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    status = launcher.wait("one", deadline=10)
    assert (status.state, status.error) == (RunState.STOPPED, None)


def test_a_job_whose_stop_was_announced_is_not_lost_however_early_it_ends(launcher: Launcher, gate: Path) -> None:
    pid = launcher.start("one", "light", params={"wait_for": str(gate)}).pid
    launcher.announce_stop("one")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait("one", deadline=10).state is RunState.STOPPED


def test_a_lost_run_says_what_it_was_at(launcher: Launcher, gate: Path, settings: Settings) -> None:
    pid = launcher.start("one", "light", params={"wait_for": str(gate)}).pid
    until(lambda: at_work(launcher, "one"))
    RunFolder(settings, "one").log.write_bytes(b"")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    error = launcher.wait("one", deadline=10).error
    assert error is not None
    assert 'was killed while it reported "at work"' in error.message
    assert "log" not in error.message.partition("kernel's log")[0], "an empty log is not named"


def test_a_job_that_waits_in_turn_is_told_from_one_at_work(launcher: Launcher, gate: Path, settings: Settings) -> None:
    launcher.start("one", "light", params={"wait_for": str(gate)})
    until(lambda: at_work(launcher, "one"))
    assert not launcher.poll("one").waiting
    replace_json(RunFolder(settings, "one").progress, {"words": "waiting for a slot", "figures": {JOBS_AHEAD: 1}})
    assert launcher.poll("one").waiting
    gate.touch()
    assert not launcher.wait("one", deadline=30).waiting


def test_stop_kills_what_hears_no_sigterm_and_its_children(launcher: Launcher, gate: Path, settings: Settings) -> None:
    launcher.start("one", "light", params={"wait_for": str(gate), "stubborn": True})
    folder = RunFolder(settings, "one")
    until(lambda: len(processes(folder)) == 2)
    assert launcher.stop("one", deadline=0.3).state is RunState.STOPPED
    until(lambda: not processes(folder))


def test_what_a_job_started_for_others_in_a_session_of_its_own_is_left_alone(
    launcher: Launcher, settings: Settings, jobs: Path, tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    (jobs / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(told)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    launcher.start("one", "parent")
    until(lambda: told.exists() and bool(told.read_text()))
    server = int(told.read_text())
    start = started(server).start
    try:
        launcher.stop("one", deadline=5.0)
        assert not processes(RunFolder(settings, "one"))
        assert is_alive(server, start)
    finally:
        os.kill(server, signal.SIGKILL)


def test_a_result_that_nobody_took_is_handed_out_again_and_a_taken_one_is_not(launcher: Launcher) -> None:
    launcher.start("one", "light", params={"write": "first"})
    launcher.wait("one", deadline=30)
    again = launcher.start("one", "light", params={"write": "second"})
    assert (again.state, again.report) == (RunState.FINISHED, {"said": "first", "number": 1})
    launcher.mark_collected("one")
    assert launcher.start("one", "light", params={"write": "second"}).attempt == 2
    assert launcher.wait("one", deadline=30).report == {"said": "second", "number": 1}


def test_a_reused_process_id_is_another_process(launcher: Launcher, settings: Settings) -> None:
    launcher.start("one", "light")
    launcher.wait("one", deadline=30)
    identity = read_json(RunFolder(settings, "one").identity)
    assert identity is not None
    assert is_alive(os.getpid(), current_process().start)
    assert not is_alive(os.getpid(), identity["start"])


def test_a_job_gets_the_settings_and_none_of_airflows_secrets(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "hush")
    monkeypatch.setenv("TZ", "UTC")
    found = environment_of(settings, RunFolder(settings, "one"))
    assert found["MILLRACE_DATA"] == str(settings.data_dir)
    assert found["TZ"] == "UTC"
    assert "AIRFLOW__API_AUTH__JWT_SECRET" not in found


def test_what_does_not_exist_is_said_by_name(launcher: Launcher) -> None:
    with pytest.raises(InvalidArgument, match="jobs are light"):
        launcher.start("one", "heavy")
    with pytest.raises(InvalidArgument, match="run id"):
        launcher.start("../one", "light")
    with pytest.raises(RunNotFound, match="never started"):
        launcher.poll("one")


def test_cleaning_removes_ended_runs_and_leaves_running_ones(launcher: Launcher, gate: Path) -> None:
    launcher.start("old", "light")
    launcher.wait("old", deadline=30)
    launcher.start("running", "light", params={"wait_for": str(gate)})
    assert launcher.clean(older_than=0.0) == ["old"]
    assert [status.run_id for status in launcher.runs()] == ["running"]


def test_a_start_while_the_folder_is_cleaned_away_starts_the_job(launcher: Launcher, settings: Settings) -> None:
    folder = RunFolder(settings, "one")
    cleaner = folder.try_lock()
    assert cleaner is not None
    starter = threading.Thread(target=lambda: launcher.start("one", "light"))
    starter.start()
    shutil.rmtree(folder.path, ignore_errors=True)  # as the cleaner does: the starter may make a file there again
    os.close(cleaner)
    starter.join(30)
    assert launcher.wait("one", deadline=30).state is RunState.FINISHED


def test_a_running_jobs_log_is_put_aside_before_it_fills_the_disk(
    launcher: Launcher, gate: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.runtime.launch.launcher.LOG_BYTES", 1000)
    launcher.start("one", "light", params={"wait_for": str(gate)})
    folder = RunFolder(settings, "one")
    with folder.log.open("ab") as log:
        log.write(b"x" * 2000)
    launcher.poll("one")
    assert folder.log.stat().st_size < 1000
    assert folder.log.with_name("log.1").stat().st_size >= 2000


def test_the_history_is_bounded_and_read_from_its_newest_line(tmp_path: Path) -> None:
    path = tmp_path / "operations.jsonl"
    for number in range(100):
        append_history(path, {"number": number}, max_bytes=400)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 900
    assert [line["number"] for line in read_history(path, limit=3)] == [99, 98, 97]
