"""What a task has in hand is known to the next process.

The record whose steps have no end, or end the process, is tried apart, and alone in the error topic.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.base.errors import LogUnavailable
from millrace.base.settings import TASK_FOLDER, Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.hosts import TaskHost
from millrace.flows.range_host import in_hand, tried
from millrace.flows.range_host.in_hand import InHand, late
from millrace.flows.range_host.task import Task
from millrace.flows.records import Record
from millrace.flows.transform.transform import Transform
from millrace.pipelines.declaration import pipeline_of
from tests.flows.samples.test_trying import DECLARED, HOSTILE, _records
from tests.waiting import until

STEP, DOCUMENT, _ = HOSTILE["a pattern of the document's own"]
MILD = {"l": [], "r": ""}
HOLDER = """
import os, sys
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.range_host.in_hand import InHand
hand = InHand(Settings(data_dir=Path(sys.argv[1])), "p", "in-0")
hand.take(41)
hand.leave()
for offset in sys.argv[2:]:
    hand.take(int(offset))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("taken", "suspect"), [((), None), ((0,), 0), ((42, 17), 17)], ids=["nothing", "the first", "the last"]
)
def test_the_next_process_knows_what_was_in_hand_at_a_kill(
    tmp_path: Path, taken: tuple[int, ...], suspect: int | None
) -> None:
    for _ in range(2):
        subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path), *map(str, taken)], check=False)
        with InHand(Settings(data_dir=tmp_path), "p", "in-0") as hand:
            assert hand.suspect == suspect


STUCK = """
import re, sys
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.range_host import in_hand
in_hand.LATE_SECONDS = 0.5
with in_hand.InHand(Settings(data_dir=Path(sys.argv[1])), "p", "in-0") as hand:
    for offset in range(3):
        hand.take(offset)
    hand.leave()
    print("left", flush=True)
    in_hand.time.sleep(1.0)
    hand.take(40)
    with in_hand.alarm_paused():  # a lookup reads its collection
        in_hand.time.sleep(1.0)
    print("lives", flush=True)
    hand.take(41)
    re.fullmatch("(a*)*b", "a" * 60)  # no thread runs meanwhile, nor a handler
"""


def test_a_record_that_holds_an_executors_process_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody on that machine watches it: the next process there knows the record."""
    monkeypatch.setenv(TASK_FOLDER, str(tmp_path / "tasks"))
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)], check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (-signal.SIGALRM, ["left", "lives"]), done.stderr
    with InHand(Settings(data_dir=tmp_path), "p", "in-0") as hand:
        assert hand.suspect == 41


def test_who_has_a_record_in_hand_for_too_long_is_seen_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_hand, "LATE_SECONDS", 0.3)
    settings, me = Settings(data_dir=tmp_path), {os.getpid()}
    assert late(settings, "p", me) is None
    with InHand(settings, "p", "in/0") as hand, InHand(settings, "p", "other-0"):
        for offset in range(20):  # each for a moment
            hand.take(offset)
            threading.Event().wait(0.05)
            assert late(settings, "p", me) is None
        until(lambda: late(settings, "p", me), "it is late")
        assert str(late(settings, "p", me)).startswith("in/0 has had the record at offset 19 in hand for ")
        assert late(settings, "p", {1}) is None, "a process that is gone left it"
        hand.leave()
        assert late(settings, "p", me) is None


class _Told:
    def __init__(self) -> None:
        self.calls: list[int | None] = []

    def take(self, offset: int) -> None:
        self.calls.append(offset)

    def leave(self) -> None:
        self.calls.append(None)


def _pipeline(*steps: dict[str, Any]) -> Flow:
    return pipeline_of({"id": "p", **DECLARED, "steps": list(steps)})


def test_what_is_in_hand_is_told_before_the_steps_and_let_go_at_the_end() -> None:
    hand = _Told()
    lookup = {"kind": "lookup", "collection": "c", "key": "l", "into": "x"}
    Transform(_pipeline(STEP)).run([*_records(MILD, MILD), Record("t", 0, 2, b"k", b"no JSON", 0)], hand)
    assert hand.calls == [0, 1, None]
    with pytest.raises(LogUnavailable):
        Transform(_pipeline(lookup), open_rows=lambda _: _Raising()).run(_records({"l": "a"}), hand)
    assert hand.calls == [0, 1, None, 0, None]


class _Raising:
    def get(self, key: str) -> Any:
        raise LogUnavailable("it is away")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried, "LATE_SECONDS", 2.0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("hostile", [True, False])
def test_a_suspect_is_tried_apart_and_fails_alone_if_at_all(tmp_path: Path, hostile: bool) -> None:
    settings = Settings(data_dir=tmp_path)
    with InHand(settings, "p", "in-0") as before:
        before.take(1)
    pipeline = _pipeline({"kind": "drop", "fields": ["z"]}, STEP)
    task = Task(settings, pipeline, "in", 0, open_rows=lambda _: _Raising())
    try:
        found = task.process_json(_records(MILD, DOCUMENT if hostile else MILD, MILD))
    finally:
        task.stop()
    assert [each.record.offset for each in found.actions] == ([0, 2] if hostile else [0, 1, 2])
    assert [(each.record.offset, each.step, each.kind) for each in found.failures] == [
        (1, "1.compute", "TOO_MUCH_WORK")
    ] * hostile
    assert all("not done within 1 s" in each.reason for each in found.failures)
    assert in_hand.LATE_SECONDS > 10, "what is tried has less time than what is not, and that much"


BELOW = """
import sys, threading
from pathlib import Path
from millrace.base.settings import Settings
from millrace.flows.range_host.in_hand import InHand
hand = InHand(Settings(data_dir=Path(sys.argv[1])), "p", "in-0")
hand.take(7)
print("taken", flush=True)
threading.Event().wait()
"""


def test_the_process_below_spark_s_driver_that_has_one_in_hand_for_too_long_is_ended_and_the_driver_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_hand, "LATE_SECONDS", 1.0)
    settings = Settings(data_dir=tmp_path)
    declared = tmp_path / "p.json"
    declared.write_text(json.dumps({"id": "p", **DECLARED}))
    me = cast(Any, SimpleNamespace(pid=os.getpid()))  # the driver
    check = TaskHost(settings, declared).watch(0, me)
    with subprocess.Popen([sys.executable, "-c", BELOW, str(tmp_path)], stdout=subprocess.PIPE, text=True) as below:
        try:
            assert below.stdout is not None
            assert below.stdout.readline() == "taken\n"
            assert check() is None
            assert below.poll() is None
            until(lambda: late(settings, "p", {below.pid}), "it is late")
            other = cast(Any, SimpleNamespace(pid=below.pid + (1 << 22)))
            assert TaskHost(settings, declared).watch(0, other)() is None
            assert below.poll() is None, "a process of another driver is left alone"
            assert check() is None
            assert below.wait(20) == -signal.SIGKILL
        finally:
            below.kill()
    assert check() is None, "what it left is nobody's"
