"""An installation starts once, is known by identity and mark, survives kill -9, and leaves
nothing behind when it is stopped.

Real processes under a real keeper; what stands for Airflow here is a small program with children, so that it takes
moments. tests/e2e/test_system.py does the same with Airflow itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import DeadlineExceeded
from millrace.base.files import rotate_log
from millrace.base.process import ProcessInfo, all_processes, find_process
from millrace.base.settings import Settings
from millrace.installation import system
from millrace.installation.keeper import KeeperRecord, read_record, write_record
from millrace.installation.processes import MARK_VARIABLE, installation_processes
from millrace.installation.system import Installation
from millrace.runtime.child_processes import JobFailed
from millrace.runtime.launch.command import JobSpec
from millrace.runtime.launch.launcher import Launcher, RunState

AIRFLOW = """
import subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]) for _ in range(2)]
try:
    time.sleep(600)
except KeyboardInterrupt:
    for child in children:
        child.terminate()
        child.wait()
"""
DEAF = (
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM,"
    " signal.SIG_IGN); time.sleep(600)"
)
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

Make = Callable[..., Installation]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Installations of one data folder, stopped behind the test."""
    settings = Settings(data_dir=tmp_path / "data", stop_deadline=1.0, start_deadline=20.0)

    def installation(program: str = AIRFLOW, *, components: int = 2) -> Installation:
        return Installation(settings, command=[sys.executable, "-S", "-c", program], components=components, settle=5.0)

    yield installation
    installation().stop()


@pytest.fixture
def spawn() -> Iterator[Callable[..., ProcessInfo]]:
    """Processes of the test's own, ended behind it."""
    started: list[subprocess.Popen[bytes]] = []

    def process(command: list[str] = SLEEP, **environment: str) -> ProcessInfo:
        started.append(subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True))
        found = find_process(started[-1].pid)
        assert found is not None
        return found

    yield process
    for each in started:
        each.kill()
        each.wait()


def until(condition: Callable[[], object], *, deadline: float = 20.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)  # the poll interval of a wait with a deadline


def whole(installation: Installation) -> bool:
    """The keeper, the program and its two children."""
    return len(installation.processes()) == 4


def test_a_second_start_finds_the_first(make: Make) -> None:
    first = make().start(port=0)
    second = make().start(port=0)
    assert first.started_now
    assert not second.started_now
    assert (second.record.pid, second.address) == (first.record.pid, first.address)


def test_a_stop_leaves_no_process_and_the_next_start_goes_on_with_the_same_secrets(make: Make) -> None:
    installation = make()
    installation.start(port=0)
    until(lambda: whole(installation))
    secrets = installation.secrets()
    stopped = installation.stop()
    assert (stopped.ended, stopped.killed) == (4, 0)
    assert not installation.processes()
    assert installation.running() is None
    assert installation.stop().ended == 0
    assert installation.start(port=0).started_now
    assert installation.secrets() == secrets


@pytest.mark.slow
def test_a_program_that_does_not_listen_is_killed(make: Make) -> None:
    installation = make(DEAF, components=0)
    installation.start(port=0)
    until(lambda: len(installation.processes()) == 2)
    began = time.monotonic()
    installation.stop()
    assert not installation.processes()
    assert time.monotonic() - began < 15


def test_a_process_of_the_same_name_without_the_mark_is_left_alone(
    make: Make, spawn: Callable[..., ProcessInfo], tmp_path: Path
) -> None:
    twin = spawn([sys.executable, "-S", "-c", AIRFLOW])
    neighbour = spawn(**{MARK_VARIABLE: str(tmp_path / "another")})
    installation = make()
    installation.start(port=0)
    until(lambda: whole(installation))
    installation.stop()
    assert twin.alive()
    assert neighbour.alive()
    for each in all_processes().values():
        if each.parent == twin.pid:
            os.kill(each.pid, signal.SIGKILL)


def test_what_a_member_starts_is_a_member_even_where_it_drops_the_mark(
    spawn: Callable[..., ProcessInfo], tmp_path: Path
) -> None:
    parent = spawn(
        ["sh", "-c", 'env -i "$0" -S -c "import time; time.sleep(600)"; :', sys.executable],
        **{MARK_VARIABLE: str(tmp_path)},
    )
    until(lambda: len(installation_processes(tmp_path)) == 2)
    assert {each.session for each in installation_processes(tmp_path)} == {parent.pid}
    assert not installation_processes(tmp_path / "another")
    for each in installation_processes(tmp_path):
        os.kill(each.pid, signal.SIGKILL)


def test_a_stale_record_stops_nobody_and_keeps_no_start_away(make: Make, spawn: Callable[..., ProcessInfo]) -> None:
    installation = make()
    installation.start(port=0)
    record = read_record(installation.state)
    installation.stop()
    assert record is not None
    bystander = spawn()
    published = write_record(installation.state, replace(record, pid=bystander.pid))  # the id was given out again
    assert installation.running() is None
    published.close()
    assert installation.stop().ended == 0
    assert bystander.alive()
    assert installation.start(port=0).started_now


def test_a_copied_folder_neither_shows_nor_stops_the_installation_of_the_original(
    make: Make, spawn: Callable[..., ProcessInfo]
) -> None:
    installation = make()
    installation.state.mkdir(parents=True)
    bystander = spawn()
    write_record(installation.state, KeeperRecord(bystander.pid, bystander.start, "http://127.0.0.1:9", 0.0)).close()
    assert installation.running() is None, "nobody holds the record: it was copied"
    assert installation.stop().ended == 0
    assert bystander.alive()


def test_after_kill_9_of_everything_the_next_start_goes_on(make: Make) -> None:
    installation = make()
    first = installation.start(port=0)
    until(lambda: whole(installation))
    for each in installation.processes():
        os.kill(each.pid, signal.SIGKILL)
    until(lambda: installation.running() is None)
    second = installation.start(port=0)
    assert second.started_now
    assert second.record.pid != first.record.pid
    until(lambda: whole(installation))


def test_after_kill_9_of_the_keeper_orphans_are_ended_and_a_job_that_runs_is_adopted(
    make: Make, spawn: Callable[..., ProcessInfo]
) -> None:
    installation = make()
    running = installation.start(port=0)
    until(lambda: whole(installation))
    job = spawn(**{MARK_VARIABLE: str(installation.settings.data_dir)})
    orphans = [each for each in installation.processes() if each.pid not in (running.record.pid, job.pid)]
    os.kill(running.record.pid, signal.SIGKILL)
    until(lambda: installation.running() is None)
    installation.start(port=0)
    assert not any(each.alive() for each in orphans)
    assert job.alive()
    stopped = installation.stop()
    assert not job.alive()
    assert stopped.ended >= 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("victim", ["program", "component"])
def test_what_dies_is_started_anew_and_the_record_says_why(make: Make, victim: str) -> None:
    installation = make()
    running = installation.start(port=0)
    until(lambda: whole(installation))
    program = next(each for each in installation.processes() if each.parent == running.record.pid)
    component = next(each for each in installation.processes() if each.parent == program.pid)
    os.kill((program if victim == "program" else component).pid, signal.SIGKILL)
    until(lambda: (read_record(installation.state) or running.record).restarts == 1)
    record = read_record(installation.state)
    assert record is not None
    assert ("components ended" if victim == "component" else "Airflow ended with -9") in record.reason
    until(lambda: whole(installation))
    assert not program.alive()
    assert not component.alive()


@pytest.mark.slow
def test_a_slow_start_is_told_of_and_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "AIRFLOW_START_SECONDS", 0.0)
    installation = make()
    running = installation.start(port=0)
    quick = Installation(replace(installation.settings, start_deadline=1.0))
    said: list[str] = []
    with pytest.raises(DeadlineExceeded, match="the start continues: `millrace system status`"):
        quick.wait_airflow(running, on_progress=said.append)
    assert said[-1].startswith("this takes longer than 1 s and continues: ")
    assert any("web server is starting" in each for each in said)
    until(lambda: whole(installation))
    assert installation.running() is not None


@pytest.mark.slow
def test_airflow_that_cannot_start_ends_the_wait(make: Make) -> None:
    installation = make("import sys; sys.exit(3)")
    running = installation.start(port=0)
    with pytest.raises(JobFailed, match="Airflow ended with 3"):
        installation.wait_airflow(running)


def test_a_stop_says_of_jobs_that_they_were_stopped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    installation = make()
    installation.start(port=0)
    monkeypatch.setenv(MARK_VARIABLE, str(installation.settings.data_dir.resolve()))
    launcher = Launcher(installation.settings)
    deaf = JobSpec("deaf", (sys.executable, "-S", "-c", DEAF))
    launcher.start("deaf-1", deaf)
    installation.stop()
    assert launcher.poll("deaf-1").state is RunState.STOPPED


def test_a_log_that_has_grown_is_put_aside_and_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "airflow.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        rotate_log(log, 100)
        assert log.stat().st_size == 100
        writer.write(b"more")
        rotate_log(log, 100)
        writer.write(b"after")
    assert log.read_bytes() == b"after"
    assert (tmp_path / "airflow.log.1").read_bytes().endswith(b"xmore")


def test_settings_take_an_environment_with_the_mark(tmp_path: Path) -> None:
    assert Settings.load(env={MARK_VARIABLE: str(tmp_path), "HOME": str(tmp_path)}).pchannels == 2


def test_a_second_keeper_of_an_installation_ends_and_changes_nothing(make: Make) -> None:
    installation = make()
    running = installation.start(port=0)
    second = [sys.executable, "-m", "millrace.installation.keeper", f"--state={installation.state}", "--", *SLEEP]
    ended = subprocess.run(second, capture_output=True, text=True, timeout=60, start_new_session=True)
    assert ended.returncode == 1
    assert "another keeper runs for this installation" in ended.stdout
    assert read_record(installation.state) == running.record
    until(lambda: whole(installation))
