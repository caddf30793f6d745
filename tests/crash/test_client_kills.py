"""SIGKILL of the log's server and of a producer with a spool, at seeded moments and at each step of a retransmission.

The oracle stands outside: the producer notes, synced, which numbers it tried and which were taken (by the log or
by its spool). Every number that was taken is in the log once, one that was only tried at most once, and the
numbers of a key come in their order.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.client.produce.batch_appender import BatchLimits
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.discovery import read_record
from millrace.runtime.child_processes import ChildProcess
from tests.crash.spool_producer import KEYS

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("number", "int64", False)), "id")


class Rig:
    """A log server and a producer, each killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(
            data_dir=folder / "data", cache_dir=folder / "cache", append_deadline=5.0, append_retry_delay=0.02
        )
        self.folder = folder
        self.journal = folder / "journal.txt"
        self.journal.touch()
        self.producer: ChildProcess | None = None
        self.next_number = 0

    def start_server(self) -> None:
        connect(settings=self.settings).close()

    def kill_server(self) -> None:
        record = read_record(self.settings.log_path)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)

    def start_producer(self, *arguments: str, failpoint: str = "") -> ChildProcess:
        tried = [number for what, number in self.lines() if what == "tried"]
        first = max(tried, default=-1) + 1
        script = str(Path(__file__).with_name("spool_producer.py"))
        command = [sys.executable, script, str(self.journal), str(self.folder / "spool"), str(first), *arguments]
        env = {**self.settings.environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
        self.producer = ChildProcess(
            command, log_file=self.folder / "producer.log", env=env | ({VARIABLE: failpoint} if failpoint else {})
        )
        return self.producer

    def lines(self) -> list[tuple[str, int]]:
        whole = [
            line for line in self.journal.read_text(encoding="ascii").splitlines(keepends=True) if line[-1] == "\n"
        ]
        return [(what, int(number)) for what, number in (line.split() for line in whole)]

    def wait(self, what: set[str], more: int, *, deadline: float = 60.0) -> None:
        """Until `more` lines of that kind came, or the producer died where that was asked for."""
        assert self.producer is not None
        before = sum(kind in what for kind, _ in self.lines())
        end = time.monotonic() + deadline
        while sum(kind in what for kind, _ in self.lines()) < before + more:
            assert self.producer.running(), self.producer.tail()
            assert time.monotonic() < end, f"no {what} in time\n{self.producer.tail()}"
            time.sleep(0.01)  # the poll interval of a wait with a deadline

    def wait_dead(self, *, deadline: float = 60.0) -> None:
        assert self.producer is not None
        end = time.monotonic() + deadline
        while self.producer.running():
            assert time.monotonic() < end, "the producer did not come by its failpoint"
            time.sleep(0.01)  # the poll interval of a wait with a deadline

    def found(self, client: Database) -> dict[int, list[int]]:
        """By key the numbers that are in the log, in its order."""
        found: dict[int, list[int]] = {key: [] for key in range(KEYS)}
        until = max(client.connection.tick(name) for name in client.log.names())
        ingest_to_end(self.settings, client.log)  # what the host's tail has let go is read from the table
        with client.consumer("spooled", until=until) as consumer:
            for delivery in consumer:
                for change in delivery.changes():
                    for key, number in zip(
                        change.rows["id"].to_pylist(), change.rows["number"].to_pylist(), strict=True
                    ):
                        found[key].append(number)
        return found

    def check(self) -> None:
        """Drain what is left, and hold the log against the journal."""
        job = self.start_producer("drain")
        self.wait({"drained"}, 1)
        end = time.monotonic() + 30
        while job.running() and time.monotonic() < end:
            time.sleep(0.01)  # the poll interval of a wait with a deadline
        lines = self.lines()
        taken = {number for what, number in lines if what in ("judged", "spooled")}
        tried = {number for what, number in lines if what == "tried"}
        assert any(what == "spooled" for what, _ in lines), "nothing was ever spooled"
        with connect(settings=self.settings) as client:
            found = self.found(client)
        everything = [number for numbers in found.values() for number in numbers]
        assert len(everything) == len(set(everything)), "a row is there twice"
        assert taken <= set(everything), f"lost: {sorted(taken - set(everything))}"
        assert set(everything) <= tried
        assert all(numbers == sorted(numbers) for numbers in found.values()), "rows of a key changed their order"
        assert not (self.folder / "spool" / "rejected.jsonl").exists()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    try:
        with connect(settings=made.settings) as client:
            client.catalog.create_collection("spooled", SCHEMA, vchannels=2)
        yield made
    finally:
        if made.producer is not None and made.producer.running():
            made.producer.kill()
        with connect(settings=made.settings) as client:
            client.connection.service.shutdown()


@pytest.mark.slow
def test_a_producer_that_dies_while_it_sends_its_spool_leaves_nothing_out_and_doubles_nothing(rig: Rig) -> None:
    rig.start_producer(failpoint="spool.sent")
    rig.wait({"judged"}, 10)
    rig.kill_server()
    rig.wait({"spooled"}, 10)
    rig.start_server()
    rig.wait_dead()
    for failpoint in ("spool.sent", "spool.settled"):  # each finds what the one before left
        rig.start_producer(failpoint=failpoint)
        rig.wait_dead()
    rig.check()


def kill_at_random(rig: Rig, *, seed: int, rounds: int) -> None:
    chance = random.Random(seed)
    rig.start_producer()
    rig.wait({"judged"}, 3)
    for _ in range(rounds):
        victim = chance.choice(["server", "server", "producer", "both"])
        if victim != "producer":
            rig.kill_server()
            rig.wait({"spooled"}, chance.randrange(1, 30))
        if victim != "server":
            assert rig.producer is not None
            rig.producer.kill()
            rig.start_producer()
            rig.wait({"judged", "spooled"}, chance.randrange(1, 20))
        if victim != "producer":
            rig.start_server()
            if chance.random() < 0.5:
                rig.wait({"judged"}, 1)  # the spool is empty again
    assert rig.producer is not None
    rig.producer.kill()
    rig.check()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "rounds"), [(1, 3), (2, 12), (3, 12)])
def test_kills_of_server_and_producer_lose_nothing_double_nothing_and_keep_the_order(
    rig: Rig, seed: int, rounds: int
) -> None:
    kill_at_random(rig, seed=seed, rounds=rounds)


@pytest.mark.parametrize("seed", [5])
def test_appends_in_flight_when_the_server_is_killed_take_effect_once_and_in_order(rig: Rig, seed: int) -> None:
    """Batches and pipelined inserts of one producer, across servers that die with appends at every stage."""
    chance = random.Random(seed)
    settings = replace(rig.settings, append_attempts=100, append_deadline=30.0)
    sent: dict[int, list[int]] = {key: [] for key in range(KEYS)}
    kills = threading.Event()

    def kill() -> None:
        for _ in range(3):
            if kills.wait(chance.uniform(0.3, 1.2)):
                return
            record = read_record(rig.settings.log_path)
            if record is not None and record.alive():
                os.kill(record.pid, signal.SIGKILL)

    with connect(settings=settings) as client:
        collection = client.definition("spooled")
        killer = threading.Thread(target=kill)
        killer.start()
        number = 0
        try:
            with client.new_producer() as producer, producer.batch(limits=BatchLimits(deadline=90.0)) as batch:
                futures = []
                while killer.is_alive() or number < 500:
                    count = chance.choice([1, 1, 5, 5000])
                    ids = [n % KEYS for n in range(number, number + count)]
                    for n in range(number, number + count):
                        sent[n % KEYS].append(n)
                    rows = pa.table({"id": ids, "number": list(range(number, number + count))})
                    futures.append(batch.insert(rows, collection=collection))
                    number += count
                batch.flush(deadline=90.0)
                assert sum(future.result(timeout=60).rows for future in futures) == number
                assert not any(future.result().rejections for future in futures)
        finally:
            kills.set()
            killer.join()
        assert rig.found(client) == sent
