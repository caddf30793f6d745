"""What streams ask of an object store, by a proxy that counts: docs/object-stores.md states these numbers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.client.database import Database
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.flows.spark_host.status import progress_name
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.spark.session import TIDY_SECONDS
from tests import running_brokers
from tests.flows.spark_host.four_streams import write_declarations
from tests.s3_server import Faults, bucket
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

START = datetime(2024, 3, 1, tzinfo=UTC)
NAMES = ("copied", "hourly", "rises", "arrived")
TIDY = 10
"""Instead of TIDY_SECONDS, so that the idle time below has several turns of it."""
IDLE_SECONDS = 40
BATCH = {"copied": 26, "hourly": 45, "rises": 50, "arrived": 36}
"""Most requests of a micro-batch with two tasks."""
IDLE_DAY = 500
"""Of an idle stream with a window's state; those without have none. Looks for commits: tests/node."""


class Streams:
    """The streams' driver, as a process, and what it has asked of the store."""

    def __init__(self, settings: Settings, faults: Faults, db: Database, topic: str) -> None:
        self.settings, self._faults, self._db, self._topic = settings, faults, db, topic
        self.asked: Counter[tuple[str, str, str]] = Counter()
        """By stream ("": of the tables), method and what of it was asked for."""
        self.encryptions = faults.encryptions
        faults.break_request = self._note
        self._sent = 0

    def _note(self, method: str, path: str) -> str:
        name, _, below = path.partition("?")[0].partition("/tables/")[2].partition("/")
        listed = path.partition("prefix=")[2].replace("%2F", "/").partition("&")[0]
        if listed:
            method, (name, _, below) = "LIST", listed.removeprefix("tables/").partition("/")
        stream, _, below = below.partition("/") if name == "streams" else ("", "", f"{name}/{below}")
        part = next((each for each in below.split("/") if each and not each.isdecimal()), "")
        self.asked[stream, method, part] += 1
        return ""

    def batches(self) -> dict[str, int]:
        """Return the micro-batches of each stream since its start."""
        found = {}
        for name in NAMES:
            path = self.settings.progress_path(progress_name(name))
            found[name] = json.loads(path.read_text())["batches"] if path.exists() else 0
        return found

    def send(self) -> None:
        """Give each stream rows for one micro-batch."""
        ids = range(self._sent, self._sent + 200)
        self._sent += 200
        at = START + timedelta(hours=ids.start // 200)
        self._db["numbers"].insert([{"id": n, "k": f"k{n % 7}", "at": at, "v": n * n % 101} for n in ids])
        ingest_to_end(self._db.settings, self._db.log)
        producer = Producer({"bootstrap.servers": running_brokers.kafka().address})
        for n in ids:
            producer.produce(self._topic, json.dumps({"n": n}))
        assert producer.flush(60) == 0

    def turn(self, process: ChildProcess) -> dict[str, int]:
        """Have all streams take rows; return how many micro-batches each one made of them."""
        before = self.batches()
        self.send()
        until(lambda: all(n > before[name] for name, n in self.batches().items()), "each has a batch", seconds=240)
        self.settle(process)
        return {name: n - before[name] for name, n in self.batches().items()}

    def settle(self, process: ChildProcess) -> None:
        """Wait until no stream has had a micro-batch for three seconds."""
        before, since = self.batches(), time.monotonic()

        def still() -> bool:
            nonlocal before, since
            assert process.running(), process.tail()
            if (now := self.batches()) != before:
                before, since = now, time.monotonic()
            return time.monotonic() - since > 3

        until(still, "the streams are idle", seconds=120)


@contextmanager
def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Streams, ChildProcess]]:
    monkeypatch.setenv("MILLRACE_CACHE", str(folder / "cache"))
    kafka, topic = running_brokers.kafka(), f"sent-{folder.name}"
    admin = AdminClient({"bootstrap.servers": kafka.address})
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(30)
    declared, properties = write_declarations(folder, kafka=kafka.address, topic=topic), folder / "spark.conf"
    properties.write_text(f"spark.sql.streaming.stateStore.maintenanceInterval {TIDY}s\n")
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "AES256")
    with Faults() as faults, bucket(monkeypatch, faults.at) as uri:
        settings = replace(
            Settings.load(env={"MILLRACE_CACHE": os.environ["MILLRACE_CACHE"]}), data_dir=folder / "data",
            tables=f"{uri}/tables", flow_declarations=str(declared), spark_properties=str(properties), spark_cores=2,
            pchannels=2,
        )  # fmt: skip
        with Database.in_folder(settings) as db:
            fields = {"id": "int64", "k": "string", "at": "timestamp", "v": "int64"}
            db.create_collection("numbers", fields, key="id", vchannels=2)
            db.catalog.create_collection("dead", LETTERS)
            streams = Streams(settings, faults, db, topic)
            env = {**settings.environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
            command = [sys.executable, str(ROOT.parent / "jobs" / "stream.py"), "all"]
            process = ChildProcess(command, log_file=folder / "streams.log", env=env)
            try:
                yield streams, process
            finally:
                process.stop(deadline=30)
                db.connection.service.shutdown()


def test_a_micro_batch_asks_little_and_an_idle_stream_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, monkeypatch) as (streams, process):
        for _ in range(3):  # what is opened once is open by now
            done = streams.batches()
            streams.send()
            until(
                lambda done=done: all(n > done[name] for name, n in streams.batches().items()), "a batch", seconds=240
            )
            streams.settle(process)
        before, _ = streams.batches(), streams.asked.clear()
        streams.send()
        until(lambda: all(n > before[name] for name, n in streams.batches().items()), "a batch", seconds=120)
        streams.settle(process)
        turns = {name: n - before[name] for name, n in streams.batches().items()}
        asked, found = Counter(streams.asked), ""
        for (name, method, part), count in sorted(asked.items()):
            found += f"{name or '-':8} {method:8} {part:14} {count}\n"
        print(turns, found, sep="\n")
        flush_to_end(streams.settings)
        streams.settle(process)
        streams.asked.clear()
        time.sleep(IDLE_SECONDS)
        idle = Counter(streams.asked)
        print("idle", *sorted(idle.items()), sep="\n")
        each = {name: sum(n for (of, _, _), n in asked.items() if of == name) / turns[name] for name in NAMES}
        assert all(each[name] <= BATCH[name] for name in NAMES), (each, found)
        tidied = sum(n for (_, _, part), n in idle.items() if part == "state") / (IDLE_SECONDS / TIDY)
        others = sum(n for (of, _, part), n in idle.items() if of and part != "state")
        assert set(streams.encryptions) == {"AES256"}, "Spark's own files, too"
        day = 86_400 / TIDY_SECONDS * tidied + 86_400 / IDLE_SECONDS * others
        assert day <= IDLE_DAY, idle
