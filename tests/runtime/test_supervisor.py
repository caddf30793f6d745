"""A supervisor starts its process, restarts it after growing pauses, and stops it with everything that it started.

Real processes. Those that have to outlive a signal to their supervisor are found by their id in a file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.supervisor import Fault, RestartBackoff, Supervisor
from tests.waiting import until

SLEEPS = "import time; time.sleep(600)"
DEAF = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({ready!r}, 'w').close(); time.sleep(600)"
)
PARENT = """
import subprocess, sys, time
for apart in (False, True):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=apart)
    print(child.pid, file=open({pids!r}, "a"))
time.sleep(600)
"""


class Child:
    """A child process that is well while it runs."""

    def __init__(self, program: str, folder: Path) -> None:
        self.process = ChildProcess([sys.executable, "-S", "-c", program], log_file=folder / "log", env={})
        self.code: int | None = None

    def fault(self) -> Fault | None:
        if self.process.running():
            return None
        return Fault(f"it ended with {self.process.wait(deadline=0)}")

    def stop(self, *, deadline: float) -> None:
        self.code = self.process.stop(deadline=deadline)


class Rig:
    """A supervisor of such children, in a thread; what it started and what it said."""

    def __init__(self, folder: Path, program: str, backoff: RestartBackoff, **options: object) -> None:
        self.children: list[Child] = []
        self.faults: list[str] = []
        self.stop = threading.Event()
        self.ended: list[Fault | None] = []

        def start() -> Child:
            self.children.append(Child(program, folder))
            return self.children[-1]

        def on_fault(fault: Fault) -> None:
            self.faults.append(fault.cause)

        given = {"stop_deadline": 5.0, "poll": 0.01, **options}
        self.supervisor = Supervisor(start, backoff=backoff, on_fault=on_fault, **given)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.ended.append(self.supervisor.run(self.stop.wait))

    def end(self) -> Fault | None:
        self.stop.set()
        self._thread.join(30)
        return self.ended[0]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes supervisors, which end with the test, whatever it found."""
    rigs: list[Rig] = []

    def make(program: str, backoff: RestartBackoff, **options: object) -> Rig:
        rigs.append(Rig(tmp_path, program, backoff, **options))
        return rigs[-1]

    yield make
    for each in rigs:
        each.end()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_runs_is_left_alone_and_ended_with_its_supervisor(made: Callable[..., Rig]) -> None:
    rig = made(SLEEPS, RestartBackoff(0.01, 0.01))
    until(lambda: rig.children, "it is started")
    assert rig.end() is None
    assert [each.code for each in rig.children] == [-signal.SIGTERM]
    assert (rig.supervisor.restarts, rig.faults) == (0, [])


def test_a_child_that_dies_at_its_start_is_given_up_after_so_many_attempts(made: Callable[..., Rig]) -> None:
    rig = made("raise SystemExit(3)", RestartBackoff(0.01, 0.01), attempts=2)
    until(lambda: rig.ended, "it is given up")
    assert rig.ended == [Fault("it ended with 3")]
    assert (len(rig.children), rig.supervisor.restarts) == (3, 2)
    assert rig.faults == ["it ended with 3"] * 3


def test_a_child_that_dies_again_and_again_is_restarted_after_growing_pauses(made: Callable[..., Rig]) -> None:
    rig = made(SLEEPS, RestartBackoff(0.2, 0.8))
    ended: list[float] = []
    for number in range(1, 5):
        until(lambda number=number: len(rig.children) == number, "it runs")
        rig.children[-1].process.kill()
        ended.append(time.monotonic())
    until(lambda: len(rig.children) == 5, "it runs again")
    assert time.monotonic() - ended[-1] >= 0.7, "the fourth pause is the longest"
    assert ended[1] - ended[0] < 0.8 <= ended[-1] - ended[-3]
    assert rig.supervisor.restarts == 4
    rig.end()


def test_failures_are_forgotten_once_a_process_has_run_long_enough(made: Callable[..., Rig]) -> None:
    backoff = RestartBackoff(0.01, 60.0, steady=0.3)
    for _ in range(3):
        backoff.record_failure("before")
    rig = made(SLEEPS, backoff)
    until(lambda: rig.children, "it runs")
    until(lambda: backoff.failures == 0, "it is steady")
    rig.end()


def test_a_child_that_ignores_sigterm_is_killed_after_the_deadline(made: Callable[..., Rig], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    rig = made(DEAF.format(ready=str(ready)), RestartBackoff(1.0, 1.0), stop_deadline=0.3)
    until(ready.exists, "it ignores the signal")
    began = time.monotonic()
    rig.end()
    assert 0.3 <= time.monotonic() - began < 5
    assert rig.children[0].code == -signal.SIGKILL


@pytest.mark.parametrize("how", ["stopped", "killed", "of itself"])
def test_grandchildren_go_with_their_parent_those_of_another_session_too(
    made: Callable[..., Rig], tmp_path: Path, how: str
) -> None:
    pids = tmp_path / "pids"
    rig = made(PARENT.format(pids=str(pids)), RestartBackoff(60.0, 60.0))
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2, "they run")
    within, apart = map(int, pids.read_text().split())
    if how == "of itself":
        os.kill(rig.children[0].process.pid, signal.SIGKILL)
        until(lambda: rig.faults, "it is noticed")
        assert gone(within)
        os.kill(apart, signal.SIGKILL)  # nobody knows any more whose it was
    elif how == "killed":
        rig.children[0].process.kill()
        assert gone(within)
        assert gone(apart)
    rig.end()
    until(lambda: gone(within) and gone(apart), "they are gone")


def test_a_stop_during_a_pause_starts_nothing_more(made: Callable[..., Rig]) -> None:
    rig = made("raise SystemExit(1)", RestartBackoff(60.0, 60.0))
    until(lambda: rig.faults, "it ended")
    assert rig.end() is None
    assert len(rig.children) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_ends_the_watch_ends_the_process(tmp_path: Path, error: type[BaseException]) -> None:
    child = Child(SLEEPS, tmp_path)

    def interrupted(seconds: float) -> bool:
        if seconds:
            raise error
        return False

    supervisor = Supervisor(lambda: child, backoff=RestartBackoff(1.0, 1.0), stop_deadline=5.0)
    with pytest.raises(error):
        supervisor.run(interrupted)
    assert not child.process.running()


def test_a_detached_process_outlives_its_supervisor_and_ends_for_a_fault_alone(tmp_path: Path) -> None:
    child = Child(SLEEPS, tmp_path)
    faults = iter([None, Fault("it hangs", restart=False)])
    child.fault = lambda: next(faults)  # type: ignore[method-assign]
    supervisor = Supervisor(lambda: child, backoff=RestartBackoff(1.0, 1.0), stop_deadline=5.0, detached=True)
    assert supervisor.run(lambda seconds: bool(seconds)) is None
    assert child.process.running()
    assert supervisor.run(lambda seconds: False) == Fault("it hangs", restart=False)
    assert not child.process.running()


def test_pauses_outlive_the_supervisor_and_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "restarts.json"
    for _ in range(3):
        RestartBackoff(1.0, 60.0, path=path).record_failure("it ended")
    known = RestartBackoff(1.0, 60.0, path=path)
    assert known.failures == 3
    assert 3.5 < known.remaining_pause() <= 4.0
    known.record_failure("a document", first=True)
    assert (known.failures, known.remaining_pause() <= 1.0) == (1, True)
    path.write_text(f'{{"failures": 2, "at": {time.time()}, "why": "it ended"}}')
    assert 0 < known.remaining_pause() <= 60.0
    path.write_text(f'{{"failures": 2, "at": {time.time() - 61}, "why": "it ended"}}')
    assert known.remaining_pause() == 0
    known.reset()
    assert (known.failures, path.exists()) == (0, False)


SUPERVISES = """
import sys, threading
from pathlib import Path
from millrace.runtime.process_setup import stop_on_signals
sys.path.insert(0, sys.argv[2])
from millrace.runtime.supervisor import RestartBackoff, Supervisor
from tests.runtime.test_supervisor import SLEEPS, Child
stop = stop_on_signals()
def start():
    child = Child(SLEEPS, Path(sys.argv[1]))
    print(child.process.pid, flush=True)
    return child
Supervisor(start, backoff=RestartBackoff(60.0, 60.0), stop_deadline=5.0).run(stop.wait)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_of_the_supervisor_ends_what_it_runs(tmp_path: Path, number: signal.Signals) -> None:
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", SUPERVISES, str(tmp_path), root]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        supervisor.send_signal(number)
        assert supervisor.wait(30) == 0
        assert gone(child)
