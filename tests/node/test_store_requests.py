"""What a deployment asks of an object store, by a proxy that counts: docs/object-stores.md states these numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.settings import Settings
from millrace.client.database import Database
from millrace.flows.sources.collection.rows import Place, RowsOf, RowsPlanner
from millrace.node.flush.definition import FlushLoop, flush_to_end
from millrace.node.ingest.definition import IngestLoop, ingest_to_end
from millrace.node.publish.definition import PublishState, publish
from millrace.node.publish.progress import ProgressReader
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.runtime.progress import Progress
from millrace.storage import log_mirror
from tests.s3_server import Faults, bucket

IDLE_DAY = 20_000


@pytest.fixture
def faults() -> Iterator[Faults]:
    with Faults() as proxy:
        yield proxy


@pytest.fixture
def db(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(log_mirror, "_made", {})
    with bucket(monkeypatch, faults.at) as uri:
        settings = replace(Settings.load(env={}), data_dir=tmp_path / "data", tables=f"{uri}/tables", pchannels=2)
        with Database.in_folder(settings) as found:
            yield found
            found.connection.service.shutdown()


def test_a_commit_a_flush_a_publish_and_a_read_ask_little(db: Database, faults: Faults) -> None:
    users = db.create_collection("users", {"id": "int64"}, key="id")
    number = db.catalog.collection("users").id
    most: dict[str, int] = {}

    def asked(step: str) -> None:
        most[step] = faults.requests.total()
        faults.requests.clear()

    for turn in range(4):
        users.insert([{"id": 1000 * turn + place} for place in range(100)])
        faults.requests.clear()
        ingest_to_end(db.settings, db.log)
        asked("commit")
        flush_to_end(db.settings)
        asked("flush")
        publish(db.settings, number)
        asked("publish")
        users.read()
        asked("first read")
        users.read()
        asked("read")
    assert most["commit"] <= 16, most
    assert most["flush"] <= 40, most
    assert most["publish"] <= 30, most
    assert most["first read"] <= 16, most
    assert most["read"] <= 10, most


@pytest.mark.parametrize("streams", [1, 20])
def test_nobody_polls_the_store_on_an_idle_day(
    db: Database, faults: Faults, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    for name in ("one", "two", "three"):
        db.create_collection(name, {"id": "int64"}, key="id").insert([{"id": 1}])
    ingest_to_end(db.settings, db.log)
    flush_to_end(db.settings)
    now = [log_mirror.boot_seconds()]
    monkeypatch.setattr(log_mirror, "boot_seconds", lambda: now[0])
    node = IngestLoop(db.settings, db.log).planner()
    flusher = FlushLoop(db.settings).planner()
    reader = ProgressReader(db.settings, lambda names: {})
    state = PublishState(db.settings, clock=lambda: now[0])
    readers = [RowsPlanner(RowsOf.find(db.settings, "one")) for _ in range(streams)]  # a flow of documents has one too
    place = readers[0].next(Place.behind(RowsOf.find(db.settings, "one")))
    assert all(each.next(place) is place for each in readers)
    step = 30  # seconds: a look at the store by any of them costs the same, however often they look at the news

    def look() -> None:
        for planner in (node, flusher):
            list(planner.pending(without=set(), target=None, max_bytes=1 << 20))  # type: ignore[attr-defined]
        reader.refresh()
        for each in readers:
            assert each.next(place) is place
            each.ends(exact=False)
        if now[0] % 60 < step:
            state.sweep(reader.collections())

    for _ in range(25):  # its pauses grow at first
        look()
        now[0] += step
    faults.requests.clear()
    for _ in range(3600 // step):
        look()
        now[0] += step
    assert 0 < 24 * faults.requests.total() <= 0.4 * IDLE_DAY, "the log server and readers look as well"


def test_a_checkpoint_without_news_asks_the_same_whatever_the_number_of_collections(
    db: Database, faults: Faults
) -> None:
    asked = []
    for names in (("one", "two"), ("three", "four", "five", "six")):
        for name in names:
            db.create_collection(name, {"id": "int64"}, key="id").insert([{"id": 1}])
        ingest_to_end(db.settings, db.log)
        flush_to_end(db.settings)
        for _ in range(2):
            faults.requests.clear()
            assert checkpoint(db.settings, db.log, CheckpointParams(), Progress()).ok
        asked.append(faults.requests.total())
    assert asked[0] == asked[1] <= 16, asked


COMPACTION_NEED = """
from millrace.base.settings import Settings
from millrace.operations.compaction.need import need
need(Settings.load())
"""
IDLE_RUNS = {
    # What the DAG starts, at most how many requests that makes with three collections, how often a day.
    "checkpoint": (["-m", "millrace.operations", "checkpoint"], 20, 288),
    "quality": (["-m", "millrace.operations", "quality"], 30, 48),
    "recovery": (["-m", "millrace.operations", "recovery", "--params", json.dumps({"mode": "diagnose"})], 120, 48),
    "compaction": (["-c", COMPACTION_NEED], 70, 24),
    "housekeeping": (["-m", "millrace.operations", "housekeeping"], 12, 1),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_operations_that_find_nothing_to_do_ask_little(db: Database, faults: Faults) -> None:
    for name in ("one", "two", "three"):
        db.create_collection(name, {"id": "int64"}, key="id").insert([{"id": 1}])
    ingest_to_end(db.settings, db.log)
    flush_to_end(db.settings)
    for name in ("one", "two", "three"):
        publish(db.settings, db.catalog.collection(name).id)
    asked: dict[str, int] = {}
    for _ in range(3):  # the first one has work to do, and that has news for the second one
        for name, (command, _, _) in IDLE_RUNS.items():
            faults.requests.clear()
            subprocess.run(
                [sys.executable, *command],
                env=os.environ | db.settings.environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
                check=True,
                capture_output=True,
                timeout=300,
            )
            asked[name] = faults.requests.total()
    assert all(asked[name] <= most for name, (_, most, _) in IDLE_RUNS.items()), asked
    assert sum(asked[name] * runs for name, (*_, runs) in IDLE_RUNS.items()) <= 0.7 * IDLE_DAY, asked
