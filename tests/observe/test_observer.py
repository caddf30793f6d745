"""The read model over a real deployment.

What it says of channels, jobs, collections, checkpoints, metrics; and at what cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import millrace
from millrace.base.errors import CollectionNotFound, InvalidArgument, TickNotReached
from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.metrics import METRICS_SUFFIX, Metrics
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.client.consume.positions import FilePositions
from millrace.message.ids import LogId, tick_physical_ms
from millrace.node.flush import definition as flusher_run
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.range_loop.parking import Parked, park, unpark
from millrace.observe import exposition
from millrace.observe.consumer_groups import LaneLags, group_lags
from millrace.observe.observer import Observer
from millrace.observe.wal_search import WalQuery
from millrace.runtime.launch import history as launch_history
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import WalSnapshot
from tests.observe.observe_world import HOSTILE, World, close_world, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = make_world(Settings(data_dir=tmp_path_factory.mktemp("observe") / "data"))
    yield world
    close_world(world)


@pytest.fixture
def observer(world: World) -> Iterator[Observer]:
    """One of its own for each test: nothing cached."""
    observer = Observer(world.settings)
    yield observer
    observer.close()


def _run_jobs(settings: Settings, *, pid: int, at: float) -> None:
    for name in ("streaming-node", "flusher"):
        replace_json(settings.progress_path(name), {"pid": pid, "at": at, "batches": 1, "rows": 1, "pchannels": {}})


@pytest.mark.slow
def test_the_whole_is_stopped_healthy_parked_or_lagging(world: World) -> None:
    def state() -> str:
        observer = Observer(world.settings)
        try:
            return observer.overview().state
        finally:
            observer.close()

    assert state() == "stopped"
    _run_jobs(world.settings, pid=os.getpid(), at=time.time())
    assert state() == "stopped", "the folder is a copy: this process reports to another one"
    _reporter = ProcessRegistration(world.settings.run_path)
    assert state() == "healthy"
    _run_jobs(world.settings, pid=os.getpid(), at=psutil.Process().create_time() - 60)
    assert state() == "stopped", "another process had this id"
    _run_jobs(world.settings, pid=os.getpid(), at=time.time())
    park(world.settings.parked_path, Parked("dml_1", "MALFORMED", "no such thing", LogId(0, 7), "2026-11-21T10:00:00Z"))
    assert state() == "parked"
    unpark(world.settings.parked_path, "dml_1")
    assert state() == "healthy"


def test_channels_are_told_with_what_the_wal_lacks(world: World, observer: Observer) -> None:
    overview = observer.overview()
    assert [each.name for each in overview.pchannels] == ["dml_0", "dml_1"]
    assert overview.totals.rejections == 6
    assert overview.totals.open_transactions == 1
    assert {each.lag_seconds for each in overview.pchannels} == {0.0}
    world.reject(1)
    later = Observer(world.settings)
    lags = {each.name: each.lag_seconds or 0.0 for each in later.overview().pchannels}
    later.close()
    assert lags["dml_0"] > 0
    assert lags["dml_1"] == 0
    world.settle()


@pytest.mark.slow
def test_a_sample_is_what_a_read_gives(world: World, observer: Observer) -> None:
    whole = observer.sample("users", limit=200)
    expected = read_arrow(world.settings, world.users.id, at=int(whole.tick)).to_pylist()
    place = whole.columns.index("id")
    assert sorted(row[place] for row in whole.rows) == sorted(row["id"] for row in expected)
    assert HOSTILE in {row[whole.columns.index("name")] for row in whole.rows}
    few = observer.sample("users", limit=7)
    assert few.rows == whole.rows[:7], "the newest first"
    earlier = min(int(row[whole.columns.index("_time_tick")]) for row in whole.rows)
    before = observer.sample("users", at=earlier, limit=200)
    then = read_arrow(world.settings, world.users.id, at=earlier)
    assert len(before.rows) == then.num_rows
    with pytest.raises(TickNotReached):
        observer.sample("users", at=(1 << 62))
    with pytest.raises(InvalidArgument):
        observer.sample("users", limit=100_000)


def test_a_sample_reads_past_the_flusher_too(world: World) -> None:
    producer = world.client.new_producer()
    producer.insert(world.users, world.rows(5000, 5010, name="tail"))
    producer.delete(world.users, [5000])
    for pchannel in ("dml_0", "dml_1"):
        world.client.connection.tick(pchannel)
    world.settle(flush=False)
    observer = Observer(world.settings)
    ids = {row[3] for row in observer.sample("users", limit=9).rows}
    observer.close()
    assert ids == set(range(5001, 5010))
    world.settle()


def test_a_collection_is_counted_by_its_tables(world: World, observer: Observer) -> None:
    found = observer.collection("users")
    assert observer.collection(str(world.users.id)) == found
    stored = sum(each.rows for each in observer.files("users", limit=500).items)
    assert found.rows == stored
    assert found.deletes >= 20
    assert found.segments["flushed"] == 2
    assert [(each.name, each.key, each.event_time) for each in found.field_list] == [
        ("id", True, False), ("name", False, False), ("at", False, True)
    ]  # fmt: skip
    assert observer.collections().items[0].name == "users"
    with pytest.raises(CollectionNotFound):
        observer.collection("nobody")


def test_a_log_that_cannot_be_described_is_told_of_its_pchannel_alone(
    world: World, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AppendClient.describe_all

    def describe(client: AppendClient) -> dict[str, dict[str, Any]]:
        found = real(client)
        del found["dml_0"]["log"]
        return found | {"dml_0": {**found["dml_0"], "log_error": "LOG_CORRUPTED: a record is damaged"}}

    monkeypatch.setattr(AppendClient, "describe_all", describe)
    found = {each.name: each for each in observer.overview().pchannels}
    assert found["dml_0"].parked == "log: LOG_CORRUPTED: a record is damaged"
    assert (found["dml_0"].log_end, found["dml_0"].lag_seconds) == (None, None)
    assert found["dml_1"].log_end is not None
    assert {each.pchannel: each.log_end for each in observer.checkpoints().checkpoints}["dml_0"] is None


def test_checkpoints_say_what_holds_the_log(world: World, observer: Observer) -> None:
    found = {each.pchannel: each for each in observer.checkpoints().checkpoints}
    assert "open transaction" in found["dml_0"].holds
    assert "last committed entry" in found["dml_1"].holds
    assert all(each.files == 1 and each.free_bytes == 0 for each in found.values())
    assert observer.checkpoints().history


def test_metrics_are_one_family_each_whoever_reports_them(world: World, observer: Observer) -> None:
    families = list(text_string_to_metric_families(observer.metrics().decode()))
    names = [each.name for each in families]
    assert len(names) == len(set(names))
    samples = [(each.name, tuple(sorted(each.labels.items()))) for family in families for each in family.samples]
    assert len(samples) == len(set(samples))
    by_name = {family.name: family for family in families}
    rows = {
        (each.labels["pchannel"], each.labels["kind"]): each.value
        for each in by_name["millrace_wal_committed_rows"].samples
    }
    overview = observer.overview()
    assert rows == {
        (each.name, kind): float(count)
        for each in overview.pchannels
        for kind, count in (("message", each.messages), ("rejection", each.rejections))
    }
    assert "millrace_wal_append_message" in by_name, "the append host's own are among them"
    assert {each.value for each in by_name["millrace_wal_lag_seconds"].samples} == {0.0}


def _sample(text: bytes, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(text.decode()):
        for each in family.samples:
            if each.name == f"millrace_{name}" and each.labels == labels:
                return each.value
    return None


@pytest.mark.slow
def test_one_endpoint_has_the_log_servers_the_jobs_and_the_read_models_metrics(world: World) -> None:
    settings = world.settings
    job = Metrics()
    read = world.client.collection("users").read(metrics=job)
    assert read.num_rows
    world.client.new_producer().insert(world.users, world.rows(7_000, 7_005))
    ingest_to_end(settings, world.client.log, metrics=job)
    flusher_run.flush_to_end(settings, metrics=job)
    _reporter = ProcessRegistration(settings.run_path)
    _run_jobs(settings, pid=os.getpid(), at=time.time())
    beat = settings.run_path / "streaming.heartbeat.json"
    replace_json(beat, {"pid": os.getpid(), "at": time.time(), "queries": {}})
    job.write_textfile(beat.with_suffix(METRICS_SUFFIX))
    observer = Observer(settings)
    try:
        text, overview = observer.metrics(), observer.overview()
    finally:
        observer.close()
    for each in overview.pchannels:
        assert _sample(text, "pchannel_info", pchannel=each.name, term=str(each.term), role="streaming-node") == 1
        assert _sample(text, "vchannel_total", pchannel=each.name) == each.vchannels == 1
        assert _sample(text, "log_stored_bytes", pchannel=each.name) == each.log_bytes
        assert _sample(text, "recovery_persisted_time_tick", pchannel=each.name) == float(each.flushed_tick)
        assert _sample(text, "wal_committed_time_tick", pchannel=each.name) == float(each.time_tick)
    assert (_sample(text, "log_server_process_resident_memory_bytes") or 0) > 1 << 20
    assert _sample(text, "read_duration_seconds_count") == 1
    for name in world.users.pchannels:
        assert (_sample(text, "flusher_time_tick", pchannel=name) or 0) > 0
        assert (_sample(text, "flusher_lag_seconds", pchannel=name) or 0) >= 0
    assert (_sample(text, "flusher_commit_duration_seconds_count", table="checkpoints") or 0) >= 1
    beat.unlink()
    replace_json(beat, {"pid": 2**22 + 1, "at": time.time(), "queries": {}})
    assert exposition.job_metrics(settings) == [], "a job that is gone reports nothing"
    beat.unlink()


def test_a_groups_backlog_is_what_the_wal_holds_behind_its_position(world: World) -> None:
    wal = WalSnapshot.open(Path(world.settings.wal_uri))
    assert wal is not None
    ticks = [tick for part in wal.messages("dml_0", columns=["time_tick"]) for tick in part["time_tick"].to_pylist()]
    positions, lags = FilePositions(world.settings.data_dir / "coord"), LaneLags()
    try:
        for place in (0, 1, len(ticks) // 2, len(ticks) - 1):
            positions.move("behind", {"dml_0": ticks[place]})
            text = exposition.backlog_metrics(group_lags(world.settings, lags))
            left = _sample(text, "consumer_backlog_messages", group="behind", pchannel="dml_0")
            assert left == len(ticks) - place - 1
        positions.move("new", {"dml_0": 0})
        positions.move("lanes", {"dml_0": ticks[-1], f"dml_0_{world.users.id}v0": 0})
        text = exposition.backlog_metrics(group_lags(world.settings, lags))
        assert _sample(text, "consumer_backlog_messages", group="new", pchannel="dml_0") == len(ticks)
        seconds = _sample(text, "consumer_group_lag_seconds", group="new", pchannel="dml_0")
        assert seconds == pytest.approx(time.time() - tick_physical_ms(ticks[0]) / 1000, abs=30.0)
        parts = list(wal.messages("dml_0", columns=["time_tick", "vchannel"]))
        own = sum(part["vchannel"].to_pylist().count(f"dml_0_{world.users.id}v0") for part in parts)
        assert _sample(text, "consumer_backlog_messages", group="lanes", pchannel="dml_0") == own > 0
    finally:
        for group in ("behind", "new", "lanes"):
            positions.drop(group, [])
        positions.close()


def test_operations_are_told_from_their_history(world: World, observer: Observer) -> None:
    path = launch_history.history_path(world.settings, launch_history.OPERATIONS)
    for number in range(5):
        launch_history.append_history(
            path,
            {
                "run_id": f"run-{number}", "job": "compaction" if number % 2 else "checkpoint", "attempt": 1,
                "state": "finished", "started_at": 100.0 + number, "ended_at": 110.0 + number, "params": {},
                "report": {"files": number}, "error": None,
            },
        )  # fmt: skip
    path.write_text(path.read_text() + '{"job": 7, "report": "odd", "error": {"code": "X"}}\n{"torn')
    found = observer.maintenance()
    assert [each.run_id for each in found.operations] == ["", "run-4", "run-3", "run-2", "run-1", "run-0"]
    assert [each.run_id for each in observer.operations(job="compaction")] == ["run-3", "run-1"]
    assert {each.name for each in found.tables} >= {"wal", "segments", "checkpoints", "tables/1/_rows", "deletes/1"}
    assert found.running == []


def test_foreign_files_in_the_run_folder_are_no_news(world: World, observer: Observer) -> None:
    path = world.settings.progress_path("flusher")
    for text in ("", "[]", '{"pid": "x"}', '{"pid": 1, "at": 1, "pchannels": [1]}', '{"pid": 1, "at": null}'):
        path.write_text(text)
        fresh = Observer(world.settings)
        assert {each.name: each.state for each in fresh.overview().jobs}["flusher"] == "never started", text
        fresh.close()
    path.unlink()


def test_nothing_is_made_by_looking(settings: Settings) -> None:
    observer = Observer(settings)
    assert observer.overview().state == "empty"
    assert observer.collections().items == []
    assert observer.rejections(WalQuery("rejection")).items == []
    assert observer.checkpoints().checkpoints == []
    assert observer.maintenance().tables == []
    assert not observer.quality().present
    observer.metrics()
    observer.close()
    assert not settings.data_dir.exists()


@pytest.mark.slow
def test_questions_load_neither_spark_nor_airflow() -> None:
    code = (
        "import json, sys; import millrace.observe.observer; "
        "print(json.dumps([name for name in ('pyspark', 'delta', 'airflow', 'great_expectations') if name in"
        " sys.modules]))"
    )
    package = str(Path(millrace.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": package},
    )
    assert json.loads(done.stdout) == []
