"""A cluster of real processes under a stream of rows.

Whatever becomes of its nodes, every row is in its collection once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pyarrow as pa
import pytest

from millrace.base.errors import MillraceError
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.brokers.etcd import EtcdServer
from millrace.brokers.mariadb import MariaDbServer
from millrace.brokers.server import LocalServer
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.delivery import CHANGES
from millrace.client.database import Database, connect
from millrace.coord import control
from millrace.coord.channels.record import CHANNEL_PREFIX
from millrace.coord.consumer_positions import read_group_positions
from millrace.coord.leadership import LEADER_KEY
from millrace.coord.session import APPEND
from millrace.demo.cluster import LocalCluster, MoveObserver
from millrace.message.ids import pchannel_of
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.range_loop.parking import restart_follower
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.restore import restore_backup as restore_backup
from millrace.operations.backup.run import backup
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.restore.run import run as restore_rows
from millrace.operations.verification import verify_channel, verify_collections
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.progress import Progress
from millrace.storage.local import LocalStore
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import read_checkpoints
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from tests import running_brokers
from tests.crash.kill_rig import ROOT, end_server

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("word", "string", True)), "id")
PCHANNELS = 4
WAIT = 90.0
"""Seconds for a move, on a machine that others use, too."""


class Stream(threading.Thread):
    """Inserts rows until it is stopped. `count` is the id after the last acknowledged one; `begin` is the first."""

    def __init__(self, client: Database, collection: CollectionInfo, *, begin: int = 0) -> None:
        super().__init__(name="stream", daemon=True)
        self._producer = client.new_producer()
        self._collection = collection
        self._ended = threading.Event()
        self.count = begin
        self.waited: list[float] = []
        """Seconds that each insert took."""
        self.failures: list[BaseException] = []

    def run(self) -> None:
        try:
            while not self._ended.wait(0.1):  # more would leave nodes that start little of two cores
                self._insert(range(self.count, self.count + 20))
        except BaseException as error:  # the test looks at it
            self.failures.append(error)

    def _insert(self, ids: range) -> None:
        begun = time.monotonic()
        self._producer.insert(self._collection, pa.table({"id": ids, "word": [f"row {each}" for each in ids]}))
        self.waited.append(time.monotonic() - begun)
        self.count = ids.stop

    def failed(self) -> bool:
        """Raises what ended it."""
        for failure in self.failures:
            raise failure
        return False

    def stop(self) -> None:
        self._ended.set()
        self.join(WAIT)
        assert not self.is_alive()


@contextmanager
def streaming(
    folder: Path, pchannels: int, **more: Any
) -> Iterator[tuple[Settings, Database, CollectionInfo, LocalCluster, Stream]]:
    settings = Settings(
        data_dir=folder / "data",
        session_seconds=3.0,
        balance_interval=1.0,
        balance_lag=60.0,  # on a machine that others use, too, what moves is seldom up to date
        trigger_interval=0.5,  # without a pause two nodes are busy with two cores, and the next takes long to start
        flush_interval=1.0,
        pchannels=pchannels,
        **more,
    )
    try:
        with connect(settings=settings) as client, LocalCluster(settings) as cluster:
            client.catalog.ensure_pchannels(pchannels)
            collection = client.catalog.create_collection("rows", SCHEMA, vchannels=pchannels)
            stream = Stream(client, collection)
            stream.start()
            try:
                yield settings, client, collection, cluster, stream
            finally:
                stream.stop()
    finally:
        end_server(settings)


def until(what: Callable[[], bool], cluster: LocalCluster) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end, cluster.log_tails()
        time.sleep(0.05)  # the poll interval of a wait with a deadline


def wait_flushed(settings: Settings, client: Database, cluster: LocalCluster) -> None:
    """Until the collection's table has all that was acknowledged before."""
    assert all(job.running() for job in cluster.jobs.values()), cluster.log_tails()
    ticks = {pchannel_of(name): tick for name, tick in client.catalog.flush("rows").items()}

    def flushed() -> bool:
        table = open_table(settings.checkpoints_uri)
        found = {} if table is None else read_checkpoints(table)
        return all(name in found and found[name].time_tick >= tick for name, tick in ticks.items())

    until(flushed, cluster)


def check(settings: Settings, client: Database, collection: CollectionInfo, count: int) -> None:
    table = open_table(rows_uri(settings, collection.id))
    assert table is not None
    there = Counter(stored_ids(table))
    assert set(there) == set(range(count)), "rows are missing, or nobody appended them"
    assert max(there.values()) == 1, "rows are there twice"
    snapshot, wal = WalSnapshot.open(settings.wal_uri), WalTable.open(settings.wal_uri)
    assert snapshot is not None
    for pchannel in snapshot.pchannels():
        report = verify_channel(snapshot, wal, client.log, pchannel)
        assert report.ok, report
    for each in verify_collections(settings).values():
        assert each.ok, each


def stored_ids(table: TableHandle) -> list[int]:
    """Return the ids in the table's files: of a disk by another engine than wrote them."""
    if not isinstance(table.store, LocalStore):
        found: list[int] = table.delta.to_pyarrow_table(filesystem=table.store.filesystem)["id"].to_pylist()
        return found
    with duckdb.connect() as db:
        query = "select id from read_parquet(?, hive_partitioning=false)"
        return [row[0] for row in db.execute(query, [table.file_uris()]).fetchall()]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_nodes_sleep_die_are_drained_and_added_and_every_row_is_there_once(tmp_path: Path) -> None:
    with streaming(tmp_path, PCHANNELS) as (settings, client, collection, cluster, stream):
        cluster.coordinator()
        for name in ("n2", "n3"):
            cluster.node(name)
        cluster.wait_owned({"n2", "n3"}, pchannels=PCHANNELS, deadline=WAIT)
        moves = MoveObserver(settings, cluster.store)
        moves.start()
        sleeper, job = asleep_before_a_commit(cluster)
        cluster.wait_owned({"n2", "n3"}, pchannels=PCHANNELS, deadline=WAIT)
        wait_flushed(settings, client, cluster)
        session = cluster.session(sleeper)
        cluster.resume(sleeper)
        until(lambda: cluster.session(sleeper) not in ("", session), cluster)
        cluster.jobs.pop("n2").kill()
        cluster.wait_owned({sleeper, "n3"}, pchannels=PCHANNELS, deadline=WAIT)
        wait_flushed(settings, client, cluster)
        control.drain(cluster.store, "n3")
        cluster.wait_owned({sleeper}, pchannels=PCHANNELS, deadline=WAIT)
        assert not control.owned_by(cluster.store, "n3")
        cluster.node("n4")
        cluster.wait_owned({sleeper, "n4"}, pchannels=PCHANNELS, deadline=WAIT)
        stream.stop()
        wait_flushed(settings, client, cluster)
        moves.stop()
        assert set(cluster.stop().values()) == {0}, cluster.log_tails()
        check(settings, client, collection, stream.count)
        assert "was moved by another committer" in job.tail(400), "it slept between the check and its commit"
        found = list(moves.observed())
        assert {"lost", "drain", "balance"} <= {move.cause for move in found}
        assert any(move.downtime_seconds is not None for move in found)


def asleep_before_a_commit(cluster: LocalCluster) -> tuple[str, ChildProcess]:
    """A node that owns something and went to sleep between the check and its commit, but not in the midst of a write
    to the meta store, too, which would hold up all others (docs/coordinator.md).
    """
    for name in ("n1", "n5", "n6"):
        job = cluster.node(name, environment={VARIABLE: "commit.checked@4~"})
        until(lambda job=job: psutil.Process(job.pid).status() == psutil.STATUS_STOPPED, cluster)  # type: ignore[misc]
        if cluster.store_is_writable():
            return name, job
        cluster.jobs.pop(name).kill()
    raise AssertionError("each of three was writing to the meta store at that moment")


def on_kafka() -> str:
    return f"kafka://{running_brokers.kafka().address}/{uuid.uuid4().hex}"


def on_pulsar() -> str:
    broker = running_brokers.pulsar()
    return f"{broker.namespace_url}/{uuid.uuid4().hex}?admin={broker.admin_url}"


@contextmanager
def appending_nodes(
    folder: Path, url: str, meta: str = ""
) -> Iterator[tuple[Settings, Database, CollectionInfo, LocalCluster, Stream]]:
    """A stream of rows on a broker whose PChannels two nodes, n1 and n2, have come to
    have, with etcd as the meta store.
    """
    meta = meta or f"{running_brokers.etcd().url}/{uuid.uuid4().hex}"
    with streaming(folder, 4, log=url, meta_store=meta) as (settings, client, collection, cluster, stream):
        until(lambda: stream.failed() or stream.count > 0, cluster)
        assert client.connection.router.known() == {}  # a deployment of one node: everything goes to the log's server
        cluster.coordinator()
        for name in ("n1", "n2"):
            cluster.node(name)
        cluster.wait_owned({"n1", "n2"}, pchannels=4, deadline=WAIT)
        until(lambda: stream.failed() or len(set(client.connection.router.known().values())) == 2, cluster)
        yield settings, client, collection, cluster, stream


def goes_on(stream: Stream, cluster: LocalCluster) -> None:
    before = stream.count
    until(lambda: stream.failed() or stream.count > before + 60, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("log", [on_kafka, pytest.param(on_pulsar, marks=pytest.mark.slow)])
@pytest.mark.timeout(400)
def test_on_a_broker_the_appends_move_too_and_a_producer_sees_latency_alone(
    tmp_path: Path, log: Callable[[], str]
) -> None:
    with appending_nodes(tmp_path, log()) as (settings, client, collection, cluster, stream):
        terms = {each.name: each.term for each in client.catalog.pchannels()}
        assert min(terms.values()) > 1  # each owner opened one
        cluster.jobs.pop("c1").kill()
        until(lambda: cluster.store.get(LEADER_KEY) is None, cluster)
        goes_on(stream, cluster)  # nobody leads: who has a PChannel has it still
        cluster.coordinator("c2")
        cluster.jobs.pop("n1").kill()
        cluster.wait_owned({"n2"}, pchannels=4, deadline=WAIT)
        goes_on(stream, cluster)
        until(lambda: stream.failed() or len(set(client.connection.router.known().values())) == 1, cluster)
        restart_follower(client.connection, "dml_0")  # at the log's server, and at the node that has it
        until(lambda: "following dml_0 again" in cluster.jobs["n2"].tail(400), cluster)
        goes_on(stream, cluster)
        stream.stop()
        wait_flushed(settings, client, cluster)
        assert set(cluster.stop().values()) == {0}, cluster.log_tails()
        assert stream.failures == []
        check(settings, client, collection, stream.count)
        # With no node left the log's server appends by itself again.
        client.new_producer().insert(collection, pa.table({"id": [-1], "word": ["afterwards"]}))


@pytest.mark.slow
@pytest.mark.parametrize("log", [on_kafka, on_pulsar])
@pytest.mark.timeout(500)
def test_nodes_that_append_are_suspended_drained_and_added(tmp_path: Path, log: Callable[[], str]) -> None:
    with appending_nodes(tmp_path, log()) as (settings, client, collection, cluster, stream):
        moves = MoveObserver(settings, cluster.store, role=APPEND)
        moves.start()
        cluster.jobs.pop("n1").kill()
        cluster.wait_owned({"n2"}, pchannels=4, deadline=WAIT)
        goes_on(stream, cluster)
        cluster.node("n3")
        cluster.wait_owned({"n2", "n3"}, pchannels=4, deadline=WAIT)
        session = cluster.session("n2")
        cluster.suspend("n2")
        cluster.wait_owned({"n3"}, pchannels=4, deadline=WAIT)
        goes_on(stream, cluster)
        cluster.resume("n2")
        until(lambda: cluster.session("n2") not in ("", session), cluster)
        control.drain(cluster.store, "n3")
        cluster.wait_owned({"n2"}, pchannels=4, deadline=WAIT)
        goes_on(stream, cluster)
        stream.stop()
        wait_flushed(settings, client, cluster)
        moves.stop()
        assert set(cluster.stop().values()) == {0}, cluster.log_tails()
        assert stream.failures == []
        check(settings, client, collection, stream.count)
        assert {"lost", "drain"} <= {move.cause for move in moves.observed()}


class Reader(threading.Thread):
    """A consumer of a group, which acknowledges what comes: `ids` were delivered."""

    def __init__(self, client: Database) -> None:
        super().__init__(name="reader", daemon=True)
        self._client = client
        self._ended = threading.Event()
        self.ids: set[int] = set()
        self.failures: list[BaseException] = []

    def run(self) -> None:
        try:
            with self._client.consumer("rows", group="readers", filters=[CHANGES]) as consumer:
                while not self._ended.is_set():
                    delivery = consumer.poll(timeout=0.2)
                    if delivery is not None:
                        for change in delivery.changes():
                            self.ids.update(change.rows.column("id").to_pylist())
                        consumer.acknowledge(delivery)
        except BaseException as error:  # the test looks at it
            self.failures.append(error)

    def stop(self, count: int, cluster: LocalCluster) -> None:
        """Behind all that was appended."""
        until(lambda: bool(self.failures) or len(self.ids) == count, cluster)
        self._ended.set()
        self.join(WAIT)
        assert self.failures == []
        assert self.ids == set(range(count))


def lose_the_store(server: LocalServer, cluster: LocalCluster, names: tuple[str, ...]) -> None:
    """Kill the meta store and start it again: at once, and once more when the nodes' sessions have ended."""
    server.kill()
    server.start()
    cluster.wait_owned(set(names), pchannels=PCHANNELS, deadline=WAIT)
    ended = {name: _ends(cluster, name) for name in names}
    server.kill()
    until(lambda: all(_ends(cluster, name) > ended[name] for name in names), cluster)
    server.start()
    cluster.wait_owned(set(names), pchannels=PCHANNELS, deadline=WAIT)


def _ends(cluster: LocalCluster, name: str) -> int:
    return cluster.jobs[name].tail(10_000).count("the session of this node has ended")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EtcdServer, MariaDbServer])
@pytest.mark.timeout(560)
def test_the_meta_store_is_killed_under_a_running_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., LocalServer]
) -> None:
    with kind(tmp_path / "meta", settings=Settings()).start() as server:
        for name, value in server.client_environment.items():
            monkeypatch.setenv(name, value)
        with streaming(tmp_path, PCHANNELS, meta_store=server.url) as (settings, client, collection, cluster, stream):
            reader = Reader(client)
            reader.start()
            cluster.coordinator()
            for name in ("n1", "n2"):
                cluster.node(name)
            cluster.wait_owned({"n1", "n2"}, pchannels=PCHANNELS, deadline=WAIT)
            lose_the_store(server, cluster, ("n1", "n2"))
            goes_on(stream, cluster)
            wait_flushed(settings, client, cluster)
            cluster.jobs.pop("n2").kill()
            cluster.wait_owned({"n1"}, pchannels=PCHANNELS, deadline=WAIT)
            stream.stop()
            assert stream.failures == []
            reader.stop(stream.count, cluster)
            wait_flushed(settings, client, cluster)
            assert set(cluster.stop().values()) == {0}, cluster.log_tails()
            check(settings, client, collection, stream.count)
            assert set(read_group_positions(settings)) == {"readers"}, "it stands in the meta store"


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_etcd_is_killed_and_compacted_under_nodes_that_append(tmp_path: Path) -> None:
    with (
        EtcdServer(tmp_path / "meta", settings=Settings()).start() as server,
        appending_nodes(tmp_path, on_kafka(), server.url) as (settings, client, collection, cluster, stream),
    ):
        ended = threading.Event()

        def compact() -> None:
            """All the time up to the newest revision: each follower that is not at that takes everything anew."""
            while not ended.wait(0.1):
                with contextlib.suppress(MillraceError):
                    cluster.store.compact(cluster.store.list(CHANNEL_PREFIX).revision)

        compacting = threading.Thread(target=compact)
        compacting.start()
        try:
            lose_the_store(server, cluster, ("n1", "n2"))
            goes_on(stream, cluster)
            cluster.jobs.pop("n1").kill()
            cluster.wait_owned({"n2"}, pchannels=PCHANNELS, deadline=WAIT)
            goes_on(stream, cluster)
            until(lambda: len(set(client.connection.router.known().values())) == 1, cluster)
        finally:
            ended.set()
            compacting.join()
        stream.stop()
        assert stream.failures == []
        wait_flushed(settings, client, cluster)
        assert set(cluster.stop().values()) == {0}, cluster.log_tails()
        check(settings, client, collection, stream.count)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_backups_and_restores_beside_moves_are_whole(tmp_path: Path) -> None:
    with streaming(tmp_path, PCHANNELS) as (settings, client, collection, cluster, stream):
        cluster.coordinator()
        for name in ("n1", "n2"):
            cluster.node(name)
        cluster.wait_owned({"n1", "n2"}, pchannels=PCHANNELS, deadline=WAIT)
        moves = MoveObserver(settings, cluster.store)
        moves.start()
        ended = threading.Event()
        to_and_fro = threading.Thread(target=drain_in_turn, args=(cluster, ("n1", "n2"), ended))
        to_and_fro.start()
        made, copies = [], []
        try:
            for number in range(2):
                before = stream.count
                report = backup(settings, client.connection.service, BackupParams(to=str(tmp_path / "b")), Progress())
                made.append((before, Path(report.folder)))
                params = RestoreParams(collection="rows", into=f"copy_{number}")
                copies.append((before, restore_rows(settings, params, Progress(), session_factory=no_spark).rows))
        finally:
            ended.set()
            to_and_fro.join()
        stream.stop()
        wait_flushed(settings, client, cluster)
        moves.stop()
        assert set(cluster.stop().values()) == {0}, cluster.log_tails()
        assert len(list(moves.observed())) >= PCHANNELS, "nothing moved beside them"
        check(settings, client, collection, stream.count)
        assert all(rows >= before for before, rows in copies)
        for before, folder in made:
            there = replace(settings, data_dir=tmp_path / f"restored-{before}", node="")
            restore_backup(there, folder)
            try:
                with connect(settings=there) as other:
                    ingest_to_end(there, other.log)
                    ids = other.collection("rows").read().column("id").to_pylist()
            finally:
                end_server(there)
            assert len(set(ids)) == len(ids), "rows are doubled in the restored deployment"
            # Of an insert that was under way each PChannel has its part or does not.
            assert set(range(before)) <= set(ids) <= set(range(stream.count))


def drain_in_turn(cluster: LocalCluster, names: tuple[str, str], ended: threading.Event) -> None:
    """Have one node emptied, then the other, until `ended`; both are there in the end."""
    turns = itertools.cycle([names, names[::-1]])
    while not ended.is_set():
        source, to = next(turns)
        control.undrain(cluster.store, to)
        control.drain(cluster.store, source)
        cluster.wait_owned({to}, pchannels=PCHANNELS, deadline=WAIT)
    for name in names:
        control.undrain(cluster.store, name)


def no_spark() -> Any:
    raise AssertionError("so few rows are read without Spark")


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_driver_of_spark_is_a_node_as_another_one(tmp_path: Path) -> None:
    with streaming(tmp_path, 4) as (settings, client, collection, cluster, stream):
        cluster.coordinator()
        cluster.node("n1", job=ROOT / "jobs" / "streaming_node.py")
        cluster.wait_owned({"n1"}, pchannels=4, deadline=240.0)
        wait_flushed(settings, client, cluster)
        cluster.node("n2")
        cluster.wait_owned({"n1", "n2"}, pchannels=4, deadline=WAIT)
        wait_flushed(settings, client, cluster)
        cluster.jobs.pop("n2").kill()
        cluster.wait_owned({"n1"}, pchannels=4, deadline=WAIT)
        wait_flushed(settings, client, cluster)
        cluster.node("n3")
        cluster.wait_owned({"n1", "n3"}, pchannels=4, deadline=WAIT)
        control.drain(cluster.store, "n1")
        cluster.wait_owned({"n3"}, pchannels=4, deadline=WAIT)
        stream.stop()
        wait_flushed(settings, client, cluster)
        assert cluster.stop()["n1"] == 0, cluster.log_tails()
        check(settings, client, collection, stream.count)
        assert settings.spark_checkpoint_path("streaming-node@n1").exists()
