"""jobs/pipeline.py on Spark with its driver and its Python workers killed at seeded moments.

What came in is in the index or in the error topic.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.base.package import ROOT
from millrace.flows.range_host.logs import FILE
from millrace.flows.range_host.positions import positions_of
from millrace.flows.range_host.status import State, flow_folder
from millrace.flows.range_host.supervision import read_status
from millrace.runtime.child_processes import ChildProcess
from tests.flows.range_host.flights import Flights
from tests.flows.range_host.test_kills import _check, _records


class Driver:
    """The job as a process."""

    def __init__(self, folder: Path, flights: Flights) -> None:
        self._folder, self._flights = folder, flights
        self._file = folder / "pipeline.json"
        self._file.write_text(json.dumps(flights.declared))

    def start(self, *more: str) -> ChildProcess:
        command = [sys.executable, str(ROOT.parent / "jobs" / "pipeline.py"), "--declaration", str(self._file), *more]
        return ChildProcess(command, log_file=self._folder / "spark.log", env=self._flights.settings.environment())


def _workers(job: ChildProcess) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            if any("pyspark.daemon" in part or "pyspark/daemon" in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(540)
@pytest.mark.parametrize("seed", [1])
def test_spark_s_driver_and_workers_die_and_nothing_is_lost_or_doubled(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    flights = Flights(tmp_path, failure_threshold=1000)
    driver = Driver(tmp_path, flights)
    told: list[tuple[str, Any]] = []

    def send(count: int) -> None:
        part = _records(dice, count, len(told))
        flights.send(part)
        told.extend(part)

    def position() -> int:
        return sum(place.position for place in positions_of(flights.settings, flights.id).values())

    def reach(offsets: int, job: ChildProcess, seconds: float = 200) -> None:
        deadline = time.monotonic() + seconds
        while position() < offsets:
            assert job.running(), job.tail()
            assert time.monotonic() < deadline, job.tail()
            time.sleep(0.1)

    send(400)
    job = driver.start()
    killed = []
    try:
        reach(1, job)
        for victim in ("worker", "driver", "worker"):
            for _ in range(5):
                send(100)
                time.sleep(dice.uniform(0.0, 0.3))  # the moment is what is drawn
            if victim == "worker":
                workers = _workers(job)
                assert workers, "Spark has Python workers"
                for process in workers:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            else:
                job.kill()
                job = driver.start()
            killed.append(victim)
            send(200)
            reach(len(told), job)
        send(300)
        job.kill()
        job = driver.start("--available-now")
        assert job.wait(deadline=200) == 0, job.tail()
        assert read_status(flights.settings, flights.id).state is State.STOPPED
        lines = (flow_folder(flights.settings, flights.id) / FILE).read_text(encoding="utf-8").splitlines()
        assert {json.loads(line)["pipeline"] for line in lines} == {flights.id}
    finally:
        job.kill()
    assert killed == ["worker", "driver", "worker"]
    _check(flights, told)
