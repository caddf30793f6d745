"""Kafka, OpenSearch and the worker killed at seeded moments, and the worker at each step of a range.

What came in is in the index or in the error topic, by content, and no document's version ever goes back.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from opensearchpy import OpenSearch
from opensearchpy.exceptions import OpenSearchException

from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.opensearch import OpenSearchServer
from millrace.flows.range_host.positions import positions_of
from millrace.flows.sinks.collection.history import history_schema
from millrace.runtime.child_processes import ChildProcess
from millrace.testing import Deployment
from tests.flows.range_host.flights import Flights

KEYS = 40


class Worker:
    """The worker of one pipeline as a process."""

    def __init__(self, folder: Path, flights: Flights) -> None:
        self._folder, self._flights = folder, flights
        self._file = folder / "pipeline.json"
        self._file.write_text(json.dumps(flights.declared))
        self.job: ChildProcess | None = None

    def start(self, *arguments: str, failpoint: str = "") -> ChildProcess:
        env = {**self._flights.settings.environment(), **({VARIABLE: failpoint} if failpoint else {})}
        command = [sys.executable, "-m", "millrace.flows.range_host", str(self._file), *arguments]
        self.job = ChildProcess(command, log_file=self._folder / "worker.log", env=env)
        return self.job

    def kill(self) -> None:
        if self.job is not None:
            self.job.kill()
            self.job = None

    def to_the_end(self, seconds: float) -> None:
        """Run until the topics end; killed and begun again nowhere."""
        deadline = time.monotonic() + seconds
        while True:
            job = self.start("--until-end")
            code = job.wait(deadline=max(1.0, deadline - time.monotonic()))
            if code == 0:
                return
            assert time.monotonic() < deadline, job.tail()


def _records(dice: random.Random, count: int, first: int = 0) -> list[tuple[str, Any]]:
    made: list[tuple[str, Any]] = []
    for number in range(first, first + count):
        key, roll = f"k{dice.randrange(KEYS)}", dice.random()
        made.append(
            (key, None if roll < 0.05 else {"flight": "bad", "n": number} if roll < 0.1 else {"flight": number})
        )
    return made


def _check(flights: Flights, told: list[tuple[str, Any]]) -> None:
    expected: dict[str, Any] = {}
    bad = []
    for key, value in told:
        if value is None:
            expected.pop(key, None)
        elif value["flight"] == "bad":
            bad.append(value["n"])
        else:
            expected[key] = value["flight"]
    assert {key: value["flight"] for key, value in flights.index().items()} == expected
    errors = [json.loads(message.value())["n"] for message in flights.errors()]
    assert sorted(set(errors)) == sorted(bad)
    places = positions_of(flights.settings, flights.id).values()
    assert sum(place.position for place in places) == len(told)
    assert sum(place.records_in for place in places) == len(told)
    # What a kill repeats in other ranges meets its own newer documents: stale, and written all the same.
    assert sum(each.records_out + each.records_stale + each.records_error for each in places) == len(told)


@pytest.mark.parametrize(
    "point",
    [
        "pipeline.written",
        pytest.param("pipeline.failures", marks=pytest.mark.slow),
        pytest.param("pipeline.commit", marks=pytest.mark.slow),
        pytest.param("pipeline.committed", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_at_a_step_does_the_range_again(tmp_path: Path, point: str) -> None:
    flights = Flights(tmp_path)
    worker = Worker(tmp_path, flights)
    told = _records(random.Random(point), 300)
    flights.send(told)
    job = worker.start("--until-end", failpoint=point)
    assert job.wait(deadline=60) != 0
    worker.to_the_end(60)
    _check(flights, told)


@pytest.mark.parametrize(
    "point",
    [
        "sink.sent",
        pytest.param("sink.journaled", marks=pytest.mark.slow),
        pytest.param("pipeline.written", marks=pytest.mark.slow),
        pytest.param("pipeline.failures", marks=pytest.mark.slow),
        pytest.param("pipeline.committed", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_at_a_step_writes_no_row_of_a_collection_twice(
    tmp_path: Path, point: str, deployed: Callable[[Settings], Deployment]
) -> None:
    """Each key's changes are its documents in their order, each once, and what failed is in the error topic."""
    flights = Flights(tmp_path, flush={"items": 10, "seconds": 0.2, "mib": 1})
    db = deployed(flights.settings)
    db.create_collection("out", {"id": "string", "flight": "int8"}, key="id", vchannels=3)
    flights.declared["sink"] = {"kind": "collection", "collection": "out"}
    told = [(f"k{number}", {"flight": number % 150, "id": f"k{number}"}) for number in range(300)]
    flights.send(told)
    worker = Worker(tmp_path, flights)
    for visit in (1, 2):
        job = worker.start("--until-end", failpoint=f"{point}@{visit}")
        assert job.wait(deadline=60) != 0
    worker.to_the_end(60)
    good = {key: value["flight"] for key, value in told if value["flight"] < 128}
    db.settle()
    changes = db.collection("out").changes_between().read_all().to_pylist()
    # To a reader, an upsert deletes the row of its key, and inserts the new one.
    inserted = [(each["id"], each["flight"]) for each in changes if each["_change"] == "insert"]
    assert sorted(inserted) == sorted(good.items())
    assert {json.loads(message.value())["id"] for message in flights.errors()} == dict(told).keys() - good.keys()
    places = positions_of(flights.settings, flights.id).values()
    assert sum(each.records_in for each in places) == len(told)
    assert sum(each.records_error for each in places) == len(told) - len(good)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["sink.journaled", "sink.sent", "pipeline.written", "pipeline.committed"])
def test_a_worker_that_dies_at_a_step_makes_no_version_twice(
    tmp_path: Path, point: str, deployed: Callable[[Settings], Deployment]
) -> None:
    """Changes come out of order and twice; the history is what they are in order."""
    flights = Flights(tmp_path, flush={"items": 10, "seconds": 0.2, "mib": 1})
    db = deployed(flights.settings)
    schema = history_schema(
        db.create_collection("plain", {"id": "string", "flight": "int64?"}, key="id").schema, clock="int64"
    )
    db.create_collection("out", schema, vchannels=2)
    flights.declared["sink"] = {"kind": "collection", "collection": "out", "history": {"sequence": "at"}}
    dice = random.Random(point)
    changes = [(f"k{number % 7}", {"id": f"k{number % 7}", "flight": number, "at": number}) for number in range(200)]
    told = sorted(changes, key=lambda each: each[1]["at"] + dice.randrange(30)) + changes[50:70]
    flights.send(told)
    worker = Worker(tmp_path, flights)
    for visit in (1, 2):
        assert worker.start("--until-end", failpoint=f"{point}@{visit}").wait(deadline=60) != 0
    worker.to_the_end(60)
    found = db.collection("out").read().to_pylist()
    versions = sorted((row["id"], row["valid_from"], row["valid_to"], row["flight"]) for row in found)
    assert versions == sorted(
        (key, each["at"], each["at"] + 7 if each["at"] + 7 < 200 else None, each["flight"]) for key, each in changes
    )
    assert sum(row["versions"] or 0 for row in found) == len(changes) - 7


class _Watcher(threading.Thread):
    """Reads documents while things die: no version of an id may ever be older than one that was seen.

    OpenSearch shows a document before it is synced, so a kill of it may take back what was seen and not acknowledged.
    """

    def __init__(self, flights: Flights) -> None:
        super().__init__(daemon=True)
        self._flights, self.end = flights, threading.Event()
        self.seen: dict[str, int] = {}
        self.back: list[str] = []
        self.looks = 0

    def run(self) -> None:
        client = OpenSearch(self._flights.opensearch.url, timeout=5, max_retries=0)
        while not self.end.wait(0.1):
            seen = self.seen  # another one from a kill of OpenSearch on, whatever is answered meanwhile
            with suppress(OpenSearchException):
                found = client.mget(index=self._flights.id, body={"ids": [f"k{n}" for n in range(KEYS)]})
                self.looks += 1
                for doc in found["docs"]:
                    if doc.get("found"):
                        if doc["_version"] < seen.get(doc["_id"], -1):
                            self.back.append(f"{doc['_id']}: {doc['_version']} after {seen[doc['_id']]}")
                        seen[doc["_id"]] = doc["_version"]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[KafkaBroker, OpenSearchServer]]:
    kafka = KafkaBroker(tmp_path / "kafka", settings=Settings())
    opensearch = OpenSearchServer(tmp_path / "opensearch", settings=Settings())
    with kafka, opensearch:
        yield kafka, opensearch


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_whoever_is_killed_whenever(tmp_path: Path, servers: tuple[KafkaBroker, OpenSearchServer], seed: int) -> None:
    dice = random.Random(seed)
    kafka, opensearch = servers
    flights = Flights(
        tmp_path, kafka=kafka, opensearch=opensearch, failure_threshold=1000,
        sink={"timeout_ms": 3000, "patience_ms": 5000}, source={"socket_timeout_ms": 5000},
    )  # fmt: skip
    worker, watcher = Worker(tmp_path, flights), _Watcher(flights)
    told: list[tuple[str, Any]] = []
    worker.start()
    watcher.start()
    killed: list[str] = []
    try:
        for turn in range(9):
            part = _records(dice, 400, len(told))
            flights.send(part)
            told += part
            time.sleep(dice.uniform(0.2, 1.5))  # the moment is what is drawn
            victim = ("worker", "opensearch", "kafka")[turn % 3]
            killed.append(victim)
            if victim == "worker":
                worker.kill()
                worker.start()
            else:
                server = opensearch if victim == "opensearch" else kafka
                server.kill()
                if server is opensearch:
                    watcher.seen = {}
                time.sleep(dice.uniform(0.0, 1.0))
                server.start()
        worker.kill()
        worker.to_the_end(300)
    finally:
        worker.kill()
        watcher.end.set()
        watcher.join(30)
    assert watcher.looks > 10
    assert not watcher.back, watcher.back
    assert set(killed) == {"worker", "opensearch", "kafka"}
    _check(flights, told)


@pytest.mark.slow
def test_the_supervisor_starts_a_worker_that_died_again(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1, recovery={"interval_minutes": 0.01})
    told = _records(random.Random(3), 50)
    flights.send(told)
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps(flights.declared))
    command = [
        sys.executable,
        "-m",
        "millrace",
        "flows",
        "run",
        str(file),
        "--data",
        str(flights.settings.data_dir),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        first = _pid(flights, 0, deadline)
        import os
        import signal

        os.kill(first, signal.SIGKILL)
        assert _pid(flights, first, deadline) != first
        while sum(place.position for place in positions_of(flights.settings, flights.id).values()) < len(told):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.terminate()
        assert process.wait(30) == 0
    _check(flights, told)


@pytest.mark.slow
def test_a_worker_whose_supervisor_is_killed_ends_too(tmp_path: Path) -> None:
    flights = Flights(tmp_path, partitions=1)
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps(flights.declared))
    data = str(flights.settings.data_dir)
    command = [sys.executable, "-m", "millrace", "flows", "run", str(file), "--data", data]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        worker = psutil.Process(_pid(flights, 0, time.monotonic() + 60))
    finally:
        process.kill()
        process.wait(30)
    worker.wait(60)


def _pid(flights: Flights, other: int, deadline: float) -> int:
    from millrace.flows.range_host.supervision import read_status

    while (found := read_status(flights.settings, flights.id).pid) in (0, other):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
def test_a_read_only_index_holds_the_worker_up_and_nothing_is_lost(tmp_path: Path) -> None:
    flights = Flights(tmp_path, sink={"patience_ms": 300}, failure_threshold=1000)
    told = _records(random.Random(4), 200)
    flights.send(told[:100])
    worker = Worker(tmp_path, flights)
    worker.to_the_end(60)
    client = OpenSearch(flights.opensearch.url)
    client.indices.put_settings(index=flights.id, body={"index.blocks.read_only_allow_delete": True})
    flights.send(told[100:])
    worker.start()
    try:
        from millrace.flows.range_host.supervision import read_tasks, tasks_path

        deadline = time.monotonic() + 60
        while not any(
            task.code == "SINK_BUSY" for task in read_tasks(tasks_path(flights.settings, flights.id)).values()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        client.indices.put_settings(index=flights.id, body={"index.blocks.read_only_allow_delete": None})
        while sum(place.position for place in positions_of(flights.settings, flights.id).values()) < 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        worker.kill()
    _check(flights, told)
