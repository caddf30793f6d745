"""Operations that start Spark run as many at once as there are places.

The others wait in turn, and know how long about.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.runtime.progress import Progress
from millrace.runtime.spark.slots import (
    DURATION_SAMPLES,
    DURATIONS_FILE,
    Ticket,
    expected_start,
    median_durations,
    spark_slot,
)

PATIENCE = 20.0


class Heard(Progress):
    """Keeps what was said, and tells when something was."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.said = threading.Event()

    def update(self, words: str, *, done: float | None = None, **figures: float | int | str) -> None:
        self.words.append(words)
        self.said.set()


class Running:
    """An operation in a thread that keeps its place until it is told to end."""

    def __init__(self, settings: Settings, job: str, pool: ThreadPoolExecutor) -> None:
        self.heard, self.begun, self.ends = Heard(), threading.Event(), threading.Event()
        self._settings, self._job = settings, job
        self.done = pool.submit(self._run)

    def _run(self) -> None:
        with spark_slot(self._settings, self._job, self.heard, poll=0.01):
            self.begun.set()
            assert self.ends.wait(PATIENCE)

    def end(self) -> None:
        self.ends.set()
        self.done.result(timeout=PATIENCE)


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("places", [1, 2])
def test_so_many_run_at_once_and_the_others_wait_in_turn(settings: Settings, places: int) -> None:
    settings = replace(settings, operations_at_once=places)
    with threads() as pool:
        running: list[Running] = []
        for number in range(5):
            running.append(Running(settings, f"job{number}", pool))
            found = running[-1].begun if number < places else running[-1].heard.said
            assert found.wait(PATIENCE)
        assert [each.begun.is_set() for each in running] == [number < places for number in range(5)]
        assert running[-1].heard.words[-1] == "waiting for a slot: 4 before it (job0, job1, job2, job3)"
        for number, each in enumerate(running):
            assert each.begun.wait(PATIENCE)
            assert not any(later.begun.is_set() for later in running[number + places :]), "in turn"
            each.end()
    assert not list((settings.run_path / "places").glob("*.json"))


def test_one_that_fails_gives_its_place_back(settings: Settings) -> None:
    settings = replace(settings, operations_at_once=1)
    with pytest.raises(ValueError, match="broken"), spark_slot(settings, "quality", Heard()):
        raise ValueError("broken")
    heard = Heard()
    with spark_slot(settings, "quality", heard):
        assert heard.words == []


KEEPS = """
import sys, time
from pathlib import Path
from millrace.runtime.progress import Progress
from millrace.runtime.spark.slots import spark_slot
from millrace.base.settings import Settings
with spark_slot(Settings(data_dir=Path(sys.argv[1]), operations_at_once=1), "quality", Progress()):
    print("here", flush=True)
    time.sleep(600)
"""


def test_one_that_was_killed_leaves_its_place_at_once(settings: Settings) -> None:
    settings = replace(settings, operations_at_once=1)
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPS, str(settings.data_dir)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root / "include")},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        with threads() as pool:
            waits = Running(settings, "restore", pool)
            assert waits.heard.said.wait(PATIENCE)
            assert not waits.begun.is_set()
            process.send_signal(signal.SIGKILL)
            assert waits.begun.wait(PATIENCE)
            waits.end()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_expected_start_adds_up_what_is_before() -> None:
    typical = {"quality": 60.0, "compaction": 100.0}
    quality = Ticket("quality", 1, 970.0, running=True)
    late = Ticket("quality", 1, 0.0, running=True)
    waiting = Ticket("compaction", 2, 990.0, running=False)
    assert expected_start([quality], typical, 1, now=1000.0) == 1030.0
    assert expected_start([late], typical, 1, now=1000.0) == 1000.0, "it takes longer than it used to"
    assert expected_start([quality, waiting], typical, 1, now=1000.0) == 1130.0
    assert expected_start([quality, late, waiting], typical, 2, now=1000.0) == 1030.0
    assert expected_start([Ticket("new", 3, 0.0, running=True)], typical, 1, now=1000.0) is None


def test_a_start_is_expected_in_any_order_of_holders_and_waiters() -> None:
    typical = {"quality": 60.0, "compaction": 100.0}
    holds = Ticket("quality", 1, 970.0, running=True)
    late = Ticket("compaction", 1, 0.0, running=True)
    waits = Ticket("compaction", 2, 990.0, running=False)
    assert expected_start([waits], typical, 1, now=1000.0) == 1100.0, "the holder has just ended"
    assert expected_start([holds, waits, late], typical, 1, now=1000.0) == 1130.0
    for places in (1, 2, 3):
        for before in permutations([holds, holds, late, waits, waits], 4):
            starts = expected_start(before, typical, places, now=1000.0)
            assert starts is not None
            assert starts >= 1000.0


def test_a_start_that_is_due_is_expected_in_no_time(settings: Settings) -> None:
    settings = replace(settings, operations_at_once=1)
    folder = settings.run_path / "places"
    with spark_slot(settings, "quality", Heard()):
        pass
    (folder / DURATIONS_FILE).write_text('{"quality": [0.0]}')
    with threads() as pool:
        first = Running(settings, "quality", pool)
        assert first.begun.wait(PATIENCE)
        second = Running(settings, "restore", pool)
        assert second.heard.said.wait(PATIENCE)
        assert second.heard.words[0].endswith("expected to begin in about 0 s")
        first.end()
        second.end()


def test_a_job_is_expected_to_take_as_long_as_it_last_had_its_place(settings: Settings) -> None:
    folder = settings.run_path / "places"
    for _ in range(DURATION_SAMPLES + 2):
        with spark_slot(settings, "quality", Heard()):
            pass
    (folder / DURATIONS_FILE).write_text('{"quality": [9.0, 60.0, 61.0], "odd": []}')
    assert median_durations(folder) == {"quality": 60.0}
    for _ in range(DURATION_SAMPLES + 2):
        with spark_slot(settings, "quality", Heard()):
            pass
    assert len(json.loads((folder / DURATIONS_FILE).read_text())["quality"]) == DURATION_SAMPLES
    settings = replace(settings, operations_at_once=1)
    with threads() as pool:
        first = Running(settings, "quality", pool)
        assert first.begun.wait(PATIENCE)
        second = Running(settings, "restore", pool)
        assert second.heard.said.wait(PATIENCE)
        assert second.heard.words[0].startswith("waiting for a slot: 1 before it (quality), expected to begin in about")
        first.end()
        second.end()


def test_a_small_machine_has_one_place(settings: Settings) -> None:
    assert [replace(settings, spark_cores=cores).spark_slots for cores in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert replace(settings, spark_cores=2, operations_at_once=3).spark_slots == 3
