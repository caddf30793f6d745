"""A record that ends worker processes is found by ever smaller ranges, named, and put aside; the others go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.errors import SinkRefused
from millrace.base.settings import Settings
from millrace.flows.range_host.crashes import RangeWatch, Suspect, suspects_of
from millrace.flows.range_host.task import Done, Task
from millrace.flows.sinks.sink import Verdicts
from millrace.pipelines.declaration import pipeline_of
from tests.flows.range_host.lines import LinesFlow

ROOT = Path(__file__).parents[3]


@pytest.fixture
def watched(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


def watch(settings: Settings) -> RangeWatch:
    return RangeWatch(settings, "p", "in-0")


def crash(settings: Settings, start: int, end: int, records: int) -> None:
    """End a process in this range."""
    made = watch(settings)
    made._process = (1 << 22, 1.0)  # no process has this number
    made.enter(start, end, records)
    made.close()


def test_a_range_that_ended_is_no_crash_and_one_in_a_living_process_is_not(watched: Settings) -> None:
    with watch(watched) as made:
        made.enter(0, 100, 100)
        with watch(watched) as other:
            assert other.suspect is None
        made.leave()
    with watch(watched) as made:
        assert made.suspect is None
        assert made.limit(0, 1000) == 1000
    assert suspects_of(watched, "p") == {}


def test_a_process_that_has_the_number_of_a_dead_one_is_another(watched: Settings) -> None:
    made = watch(watched)
    made._process = (os.getpid(), 1.0)  # as in a container that was started again
    made.enter(0, 100, 100)
    made.close()
    with watch(watched) as made:
        assert made.suspect == Suspect(0, 100, 12, 1)


def test_ranges_are_narrowed_to_the_record_which_is_at_fault_after_so_many_crashes_alone(watched: Settings) -> None:
    for start, end, records, expected in (
        (0, 400, 400, Suspect(0, 400, 50, 1)),
        (50, 100, 50, Suspect(50, 100, 6, 2)),
        (62, 68, 6, Suspect(62, 68, 1, 3)),
        (64, 65, 1, Suspect(64, 65, 1, 4, 1)),
        (64, 65, 1, Suspect(64, 65, 1, 5, 2)),
    ):
        crash(watched, start, end, records)
        with watch(watched) as made:
            assert made.suspect == expected
            assert made.limit(start, 1000) == expected.records
            assert made.limit(end, 1000) == 1000
    assert suspects_of(watched, "p") == {"in-0": expected}
    assert "ended 5 times, 2 of them while it processed the record at 64 alone" in expected.words("p", "in-0")
    assert "millrace flows skip p in-0 64" in expected.words("p", "in-0")
    with watch(watched) as made:
        assert made.condemned(64, 2)
        assert not made.condemned(64, 3)
        assert not made.condemned(65, 2)
        made.passed(64)
        assert made.suspect is not None
        made.passed(65)
        assert made.suspect is None
    assert suspects_of(watched, "p") == {}


def test_a_crash_at_another_record_alone_begins_anew(watched: Settings) -> None:
    crash(watched, 5, 6, 1)
    crash(watched, 5, 6, 1)
    crash(watched, 6, 7, 1)
    with watch(watched) as made:
        assert made.suspect == Suspect(6, 7, 1, 3, 1)


def test_a_file_that_was_cut_by_a_crash_knows_nothing(watched: Settings) -> None:
    crash(watched, 0, 100, 100)
    with watch(watched):
        pass
    (path,) = (watched.data_dir / "pipelines" / "p" / "suspects").iterdir()
    path.write_text('{"start": 0')
    with watch(watched) as made:
        assert made.suspect is None
    assert suspects_of(watched, "p") == {}


def test_a_worker_that_ends_at_every_record_puts_no_topic_aside(tmp_path: Path) -> None:
    flow = LinesFlow(tmp_path, lambda batch: Verdicts(), errors={"in_a_row": 3, "tries": 1})
    flow.fill(range(3))
    with pytest.MonkeyPatch.context() as patched:
        flow.patch(patched)
        made = RangeWatch(flow.settings, "lines", "a-0")
        made._process = (1 << 22, 1.0)
        made.enter(0, 9, 1)
        made.close()
        task = Task(flow.settings, pipeline_of(flow.declared), "a", 0, open_rows=lambda _: pytest.fail("no lookup"))
        records = flow.records()
        assert task._condemned(Done("a-0", None, 0, 9, in_a_row=1), records) is not None
        with pytest.raises(SinkRefused, match="the worker or its sink is the cause"):
            task._condemned(Done("a-0", None, 0, 9, in_a_row=2), records)
        task.stop()


def test_a_record_at_which_the_sink_ends_the_process_is_put_aside_and_all_others_are_there(tmp_path: Path) -> None:
    flow = LinesFlow(tmp_path, lambda batch: Verdicts())
    flow.fill(range(60))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "include"), str(ROOT)])}
    command = [sys.executable, str(Path(__file__).parent / "crash_process.py"), str(tmp_path), "37"]
    codes, told = [], ""
    for _ in range(6):
        done = subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, timeout=60)
        codes.append(done.returncode)
        told = next((each.words("lines", "a-0") for each in suspects_of(flow.settings, "lines").values()), told)
        if done.returncode != -signal.SIGKILL:
            break
    assert codes == [-signal.SIGKILL] * 4 + [0], done.stderr.decode()[-2000:]
    assert "the record at 360 alone" in told
    taken = [int(line) for line in (tmp_path / "taken").read_text().split()]
    assert taken == [number for number in range(60) if number != 37]
    (letter,) = map(json.loads, (tmp_path / "letters").read_text().splitlines())
    assert letter == {"n": 37, "kind": "CRASHED", "attempts": 2}
    assert suspects_of(flow.settings, "lines") == {}
