"""The supervisor of a flow: kills of itself and of its children, pauses, back-off, and what it records.

Real small processes (tests/flows/supervised.py), and a model of the state machine on a clock that is moved by hand.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import psutil
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from millrace.base.errors import MetaUnavailable
from millrace.base.process import current_process, find_process
from millrace.base.settings import Settings
from millrace.flows import supervisor as supervision
from millrace.flows.control import start_workers, stop_flow
from millrace.flows.hosts import StreamHost
from millrace.flows.range_host import observed
from millrace.flows.range_host.supervision import last_pulse
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.status import FlowState, ProcessRecord, processes_of, records_of, supervised_folder
from millrace.flows.supervisor import end_orphans, supervise
from millrace.runtime.launch.command import JobSpec
from millrace.runtime.launch.launcher import Launcher, RunState
from tests.flows.supervised import RUN_ID, SmallHost
from tests.pipelines.api.test_routes import DECLARED
from tests.waiting import until

ROOT = Path(__file__).parents[2]


class Rig:
    """Supervisors of one small flow, one after another; all that they started ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(data_dir=folder, stop_deadline=1.0)
        self.started: list[subprocess.Popen[str]] = []
        self.seen: list[psutil.Process] = []

    def supervisor(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.flows.supervised", program, *arguments]
        found = subprocess.Popen(
            command, env={**os.environ, **self.settings.environment()}, cwd=ROOT, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.started.append(found)
        return found

    @property
    def record(self) -> ProcessRecord:
        return records_of(supervised_folder(self.settings, RUN_ID)).get(0, ProcessRecord())

    def said(self, words: str) -> int:
        path = self.settings.data_dir / "said"
        return path.read_text().splitlines().count(words) if path.exists() else 0

    def child(self, *, began: int = 1) -> psutil.Process:
        """The child, once `began` of them in all have said that they run."""
        until(lambda: self.said("began") == began and self.record.alive, f"child {began} runs", seconds=20)
        self.seen.append(psutil.Process(self.record.pid))
        return self.seen[-1]

    def end(self) -> None:
        for each in self.started:
            each.kill()
            each.communicate()
        end_orphans(supervised_folder(self.settings, RUN_ID), deadline=0.0)
        for each in self.seen:
            if each.is_running():
                each.kill()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "data")
    made.settings.data_dir.mkdir(mode=0o700)
    try:
        yield made
        assert made.said("two at once") == 0
    finally:
        made.end()


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_is_killed_is_started_again_and_the_record_says_why(rig: Rig) -> None:
    supervisor = rig.supervisor("well")
    rig.child().kill()
    second = rig.child(began=2)
    assert (rig.record.ends, rig.record.retry_at, rig.record.runs) == (1, None, ("small",))
    assert rig.record.cause.startswith("it ended with -9")
    supervisor.terminate()
    told = json.loads(supervisor.communicate(timeout=10)[0])
    assert (told["code"], told["error"]) == (0, None)
    assert gone(second)
    assert rig.said("ended") == 1, "it was asked to end, and could finish"
    assert rig.record.pid == 0


def test_a_child_ends_with_its_supervisor_and_the_next_one_starts_its_own(rig: Rig) -> None:
    supervisor = rig.supervisor("well")
    first = rig.child()
    supervisor.kill()
    until(lambda: gone(first), "it ends by itself", seconds=10)
    assert rig.said("ended") == 1
    rig.supervisor("well")
    assert rig.child(began=2).pid != first.pid


def test_a_child_that_hangs_when_its_supervisor_is_gone_kills_itself(rig: Rig) -> None:
    supervisor = rig.supervisor("hangs", "--patience", "0.2")
    first = rig.child()
    supervisor.kill()
    until(lambda: gone(first), "it is ended", seconds=10)
    assert rig.said("ended") == 1, "it was asked first"


def test_an_orphan_that_cannot_end_itself_is_ended_before_another_child_starts(rig: Rig) -> None:
    supervisor = rig.supervisor("well")
    first = rig.child()
    first.suspend()
    supervisor.kill()
    rig.supervisor("well")
    second = rig.child(began=2)
    assert gone(first)
    assert second.pid != first.pid


def test_what_a_killed_child_left_below_it_is_ended_by_the_next_supervisor(rig: Rig) -> None:
    supervisor = rig.supervisor("parent")
    said = rig.settings.data_dir / "said"
    until(lambda: said.exists() and said.read_text().startswith("below") and rig.record.alive, "it runs")
    below, child = psutil.Process(int(said.read_text().split()[1])), psutil.Process(rig.record.pid)
    rig.seen.append(below)
    for each in (psutil.Process(supervisor.pid), child):  # both at once: neither sees the other's end
        each.suspend()
    for each in (psutil.Process(supervisor.pid), child):
        each.kill()
    supervisor.wait()
    until(lambda: gone(child), "it is gone")
    assert not gone(below)
    rig.supervisor("well")
    rig.child()
    assert gone(below)


def test_a_child_that_is_deaf_to_sigterm_is_killed_at_the_deadline(rig: Rig) -> None:
    supervisor = rig.supervisor("deaf")
    child = rig.child()
    begun = time.monotonic()
    supervisor.terminate()
    assert json.loads(supervisor.communicate(timeout=10)[0])["code"] == 0
    assert gone(child)
    assert 0.7 < time.monotonic() - begun < 5


def test_a_child_that_dies_at_once_is_tried_after_growing_pauses_and_given_up(rig: Rig) -> None:
    supervisor = rig.supervisor("dies", "--attempts", "2")
    begun = time.monotonic()
    until(lambda: rig.record.ends >= 1 and rig.record.retry_at is not None, "it waits")
    assert rig.record.pid == 0
    told = json.loads(supervisor.communicate(timeout=30)[0])
    assert time.monotonic() - begun > 0.1 + 0.2
    assert (told["code"], told["error"]["code"]) == (3, "WORKER_ENDED")
    assert told["error"]["message"].endswith("the last cause: it ended with 3: no room")
    assert (rig.record.ends, rig.record.retry_at, rig.record.cause) == (3, None, "it ended with 3: no room")
    again = rig.supervisor("dies", "--attempts", "2")
    again.communicate(timeout=30)
    assert rig.record.ends == 3, "a new start has all its attempts"


def test_pauses_go_on_where_a_killed_supervisor_was(rig: Rig) -> None:
    supervisor = rig.supervisor("dies", "--attempts", "3")
    until(lambda: rig.record.ends == 2, "two have died")
    supervisor.kill()
    again = rig.supervisor("dies", "--attempts", "3")
    again.communicate(timeout=30)
    assert rig.record.ends in (1, 2), "of the four that it may fail in a row, the first one saw two or three"


def test_an_error_that_no_restart_cures_ends_the_supervisor_with_that_error(rig: Rig) -> None:
    told = json.loads(rig.supervisor("typed").communicate(timeout=20)[0])
    assert told["error"] == {"code": "INVALID_STREAM", "message": "no such column", "retriable": False}
    assert (rig.record.ends, rig.record.cause) == (1, "INVALID_STREAM: no such column")


def test_a_second_supervisor_is_refused_and_the_first_goes_on(rig: Rig) -> None:
    rig.supervisor("well")
    first = rig.child()
    told = json.loads(rig.supervisor("well").communicate(timeout=20)[0])
    assert told["code"] == "STREAM_BUSY"
    assert "`millrace flows stop small`" in told["message"]
    assert first.is_running()
    assert rig.said("began") == 1


def test_paused_it_has_no_child_and_none_has_failed(rig: Rig) -> None:
    paused = rig.settings.data_dir / "paused"
    paused.touch()
    supervisor = rig.supervisor("well")
    until(lambda: supervised_folder(rig.settings, RUN_ID).joinpath("lock").exists(), "it runs")
    threading.Event().wait(1.0)
    assert rig.said("began") == 0
    paused.unlink()
    child = rig.child()
    paused.touch()
    until(lambda: gone(child) and rig.record.pid == 0, "it is paused")
    assert (rig.said("ended"), rig.record.ends, rig.record.runs) == (1, 0, ())
    paused.unlink()
    rig.child(began=2)
    paused.touch()
    supervisor.terminate()
    assert json.loads(supervisor.communicate(timeout=10)[0])["code"] == 0


def test_a_process_that_was_given_the_id_of_an_earlier_child_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as other:
        try:
            found = find_process(other.pid)
            assert found is not None
            earlier = ProcessRecord(pid=other.pid, start=replace_ticks(found.start))
            earlier.write(tmp_path / "0.json")
            assert not earlier.alive
            assert end_orphans(tmp_path, deadline=0.0) == []
            assert other.poll() is None
            ProcessRecord(pid=other.pid, start=found.start).write(tmp_path / "0.json")
            assert end_orphans(tmp_path, deadline=5.0) == [other.pid]
            assert other.wait(10) == -signal.SIGTERM
        finally:
            other.kill()


def replace_ticks(start: str) -> str:
    boot, _, ticks = start.partition(":")
    return f"{boot}:{int(ticks) - 1}"


def test_a_run_of_the_launcher_is_adopted_stopped_and_says_why_it_waits(rig: Rig) -> None:
    """As control does it: the second start finds the first one's run."""
    launcher = Launcher(rig.settings)
    with small_run(rig, "well") as job:
        first = launcher.start(RUN_ID, job)
        rig.child()
        assert processes_of(rig.settings, RUN_ID).state is FlowState.RUNNING
        assert launcher.start(RUN_ID, job).pid == first.pid
        assert rig.said("began") == 1
        assert launcher.stop(RUN_ID).state is RunState.STOPPED
        found = processes_of(rig.settings, RUN_ID)
        assert (found.state, found.active, found.error) == (FlowState.STOPPED, False, None)
    with small_run(rig, "dies") as job:
        launcher.start(RUN_ID, job)
        until(lambda: processes_of(rig.settings, RUN_ID).state is FlowState.FAILED, "it waits", seconds=20)
        found = processes_of(rig.settings, RUN_ID)
        assert found.active
        assert str(found.error).startswith("it ended with 3: no room; it restarts")
        assert found.last_end.cause == "it ended with 3: no room"
        os.kill(launcher.poll(RUN_ID).pid or 0, signal.SIGKILL)
        until(lambda: processes_of(rig.settings, RUN_ID).state is FlowState.LOST, "it is lost")


@contextmanager
def small_run(rig: Rig, program: str) -> Iterator[JobSpec]:
    text = (
        "import sys; from tests.flows.supervised import *; stop = stop_on_signals(); settings = Settings.load();"
        " from millrace.base.files import replace_json; from pathlib import Path;"
        f" supervise(settings, SmallHost(settings.data_dir, {program!r}, attempts=None, patience=60.0), stop);"
        " replace_json(Path(sys.argv[sys.argv.index('--result') + 1]), {'ok': True, 'stopped': True})"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT))
        yield JobSpec("small", (sys.executable, "-c", text))


def test_a_pipeline_s_own_worker_runs_below_the_supervisor_that_control_starts(rig: Rig) -> None:
    settings = rig.settings
    declared = settings.data_dir.parent / "p.json"
    declared.write_text(json.dumps({"id": "p", **DECLARED}))
    started = start_workers(settings, "p", declared)
    try:
        until(lambda: last_pulse(settings, "p") > started.started_at, "the worker has read its settings", seconds=30)
        (record,) = records_of(supervised_folder(settings, observed.run_id("p"))).values()
        assert (record.alive, record.ends) == (True, 0)
        rig.seen.append(psutil.Process(record.pid))
    finally:
        assert stop_flow(settings, observed.run_id("p")) == "stopped"
    assert gone(rig.seen[-1])


def test_a_supervisor_of_a_group_runs_those_of_its_streams_that_are_not_paused(tmp_path: Path) -> None:
    declared = tmp_path / "s.yaml"
    each = "{{name: {0}, group: both, source: users, sink: {{collection: out}}}}"
    declared.write_text("streams:\n" + "".join(f"- {each.format(name)}\n" for name in ("one", "two")))
    settings = Settings(data_dir=tmp_path / "data", stream_declarations=str(declared))
    host = StreamHost(settings, "both")
    assert (host.run_id, host.wanted()) == ("stream-both", ("one", "two"))
    Incarnations(settings, "one").pause(paused=True)
    assert host.wanted() == ("two",)
    silent = PropertyMock(side_effect=MetaUnavailable("no answer"))
    with patch.object(Incarnations, "state", silent):
        assert host.wanted() == ("two",), "a meta store that is away stops no stream"
    Incarnations(settings, "two").pause(paused=True)
    assert host.wanted() is None
    command = host.command(0, tmp_path / "r.json")
    assert command[1].endswith("jobs/stream.py")
    assert command[2:] == ["both", "--supervisor", str(os.getpid()), "--result", str(tmp_path / "r.json")]


# --- a model ----------------------------------------------------------------------------------------------------------


class World:
    """Children, a clock and what is asked of the flow, all moved by a script of (seconds, action)."""

    def __init__(self, folder: Path, script: list[tuple[float, str]], attempts: int) -> None:
        self.now, self.script, self.attempts = 1_000.0, list(script), attempts
        self.next_at = self.now + script[0][0] if script else 0.0
        self.wanted: tuple[str, ...] | None = ("a",)
        self.stopped = False
        self.alive: list[Any] = []
        self.starts: list[float] = []
        self.deaths: list[float] = []
        self.ends: dict[int, int] = {}
        self.host = SmallHost(folder, "well", attempts=attempts, patience=60.0)
        self.host.wanted = lambda: self.wanted  # type: ignore[method-assign]
        self.path = folder / "run" / "flows" / RUN_ID / "0.json"

    # of the event
    def is_set(self) -> bool:
        return self.stopped

    def set(self) -> None:
        self.stopped = True

    def wait(self, seconds: float) -> bool:
        """Let time pass; do what the script says on the way."""
        end = self.now + seconds
        while self.script and self.next_at <= end and not self.stopped:
            self.now = max(self.now, self.next_at)
            self.act(self.script.pop(0)[1])
            self.next_at = self.now + self.script[0][0] if self.script else 0.0
        if not self.script and not self.stopped and seconds:
            self.act("stop")
        if not self.stopped:
            self.now = end
        self.check()
        return self.stopped

    def act(self, what: str) -> None:
        if what == "stop":
            self.stopped = True
        elif what == "pause":
            self.wanted = None
        elif what in ("a", "b"):
            self.wanted = (what,)
        elif self.alive:
            self.alive[0].code = {"die": 1, "refuse": 2, "end": 0}[what]
            self.deaths.append(self.now)

    def check(self) -> None:
        """What holds at every moment."""
        assert len(self.alive) <= 1
        record = ProcessRecord.read(self.path)
        if self.alive and self.alive[0].code is None:
            assert record.pid == self.alive[0].pid
            assert record.retry_at is None
        assert record.ends <= len(self.deaths)


def child_of(world: World) -> type:
    class Child:
        ids = itertools.count(1 << 23)
        log_file = Path("log")

        def __init__(self, *arguments: object, **options: object) -> None:
            assert world.wanted is not None, "nothing is started that is not to run"
            assert not world.alive, "one at a time"
            self.pid, self.code = next(Child.ids), None
            world.alive.append(self)
            world.starts.append(world.now)

        def running(self) -> bool:
            return self.code is None

        def stop(self, *, deadline: float) -> int:
            if self in world.alive:
                world.alive.remove(self)
            return -15 if self.code is None else self.code

        def tail(self, lines: int) -> str:
            return "no room"

    return Child


ACTIONS = st.sampled_from(["die", "die", "die", "end", "refuse", "pause", "a", "b", "stop"])


@examples(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.05, 90.0), ACTIONS), max_size=30), st.integers(1, 4))
def test_whatever_happens_one_child_at_most_runs_and_the_record_says_how_it_is(
    script: list[tuple[float, str]], attempts: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder))
        world = World(Path(folder), script, attempts)
        refused = {"error": {"code": "NO", "message": "never", "retriable": False}}
        clock: Callable[[], float] = lambda: world.now  # noqa: E731

        def result(path: Path) -> dict[str, Any] | None:
            if not path.name.endswith("result.json"):
                return json.loads(path.read_text()) if path.exists() else None
            return refused if world.alive and world.alive[0].code == 2 else None

        with (
            patch.object(supervision, "ChildProcess", child_of(world)),
            patch.object(supervision, "read_json", result),
            patch.object(supervision.time, "time", clock),
            patch("millrace.runtime.supervisor.time.time", clock),
            patch("millrace.runtime.supervisor.time.monotonic", clock),
            patch("millrace.runtime.supervisor.jittered", lambda seconds: seconds),
        ):
            ended = supervise(settings, world.host, world)  # type: ignore[arg-type]
        assert world.alive == [], "nothing is left"
        record = ProcessRecord.read(world.path)
        assert (record.pid, record.retry_at) == (0, None)
        assert not world.path.with_name("0.restarts.json").exists()
        if ended.code:
            given_up = ended.error is not None and ended.error["code"] == "WORKER_ENDED"
            assert given_up == (record.cause != "NO: never")
            assert not given_up or record.ends > attempts
        # Between a death and the next start is a pause: the first, doubled with each death in a row.
        in_a_row = 0
        for death in world.deaths:
            began = max(each for each in world.starts if each <= death)
            in_a_row = 1 if death - began >= world.host.restarts.steady + 1 else in_a_row + 1
            following = min((each for each in world.starts if each > death), default=None)
            if following is not None and in_a_row == 1:
                assert following - death >= world.host.restarts.first - 1e-6


def test_a_record_that_was_cut_or_is_of_another_build_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    assert ProcessRecord.read(path) == ProcessRecord()
    path.write_text('{"pid": 7, "sta')
    assert ProcessRecord.read(path) == ProcessRecord()
    path.write_text('{"pid": 7, "start": "b:1", "runs": ["a"], "of_tomorrow": true}')
    assert ProcessRecord.read(path) == ProcessRecord(pid=7, start="b:1", runs=("a",))
    me = current_process()
    mine = ProcessRecord(pid=me.pid, start=me.start, cause="x" * 9_000)
    mine.write(path)
    assert ProcessRecord.read(path) == replace(mine, cause="x" * 2_000)
    assert ProcessRecord.read(path).alive
