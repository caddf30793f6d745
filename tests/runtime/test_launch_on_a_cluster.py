"""The setting `spark_master`: the launcher's job submits to Spark's own standalone master, and its tasks run there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.brokers.spark import SparkMaster, SparkWorker
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.wire import TOKEN_VARIABLE
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.launch.launcher import Launcher, RunState
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_checkpoints
from tests.network_namespaces import Machine
from tests.spark_cluster import Cluster, Drivers, cluster, executors_left_in, tasks_run_in
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PARTITION_SECONDS = 15.0
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False),), "id")


@pytest.fixture
def master(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkMaster]:
    """A standalone master with one worker, which shares this machine's folders."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    with (
        SparkMaster(tmp_path / "master", settings=settings) as started,
        SparkWorker(tmp_path / "worker", master=started.url, cores=2, memory="1g", settings=settings),
    ):
        until(lambda: started.workers() == 1, "the worker is registered")
        yield started


def test_a_streaming_job_runs_its_tasks_on_the_master(settings: Settings, master: SparkMaster, tmp_path: Path) -> None:
    launcher = Launcher(replace(settings, spark_master=master.url, spark_memory="512m"))
    with connect(settings=settings) as client:
        try:
            client.catalog.ensure_pchannels(1)
            collection = client.catalog.create_collection("c", SCHEMA)
            client.new_producer().insert(collection, pa.table({"id": list(range(1000))}))
            launcher.start("once", "streaming_node", arguments=["--with-flusher", "--available-now"])
            status = launcher.wait("once", deadline=240)
            assert status.state is RunState.FINISHED, f"{status.error}\n{status.tail(60)}"
            assert client.collection("c").read().num_rows == 1000
        finally:
            launcher.stop("once")
            client.connection.service.shutdown()
    assert tasks_run_in(tmp_path / "worker")


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_that_share_no_folder_run_the_tasks_through_lost_executors_and_a_partition(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Rows are acknowledged all the time; each is in the collection once at the end."""
    with cluster(tmp_path, settings, monkeypatch, workers=workers) as (spark, away):
        _lose_executors_and_a_worker(spark, away)


def _lose_executors_and_a_worker(spark: Cluster, away: list[Machine]) -> None:
    launcher = Launcher(spark.settings)
    with connect(settings=spark.settings) as client:
        try:
            client.catalog.ensure_pchannels(4)
            client.catalog.create_collection("c", SCHEMA, vchannels=4)
            launcher.start("node", "streaming_node", arguments=["--with-flusher"])
            _wait_until_flushed(spark.settings, _send(client, range(20_000)), launcher)
            spark.kill_executor(0)
            _wait_until_flushed(spark.settings, _send(client, range(20_000, 40_000)), launcher)
            away[1].cut_off()
            _send(client, range(40_000, 60_000))
            time.sleep(PARTITION_SECONDS)
            away[1].join()
            _wait_until_flushed(spark.settings, _send(client, range(60_000, 80_000)), launcher)
            assert sorted(client.collection("c").read()["id"].to_pylist()) == list(range(80_000))
        finally:
            launcher.stop("node")
            with RemoteLogService.connect(spark.settings.log_path, start=False) as server:
                server.shutdown()
    assert all(tasks_run_in(folder) for folder in spark.folders)
    assert executors_left_in(spark.folders[0]), "the archive of the killed executor is in its folder, not in /tmp"
    assert not Path("tasks").exists(), "the planner has the data folder of its driver"


def test_a_nodes_driver_goes_with_its_folder_and_another_machine_goes_on(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-all-machines-have")
    with cluster(tmp_path, settings, monkeypatch) as (spark, _), ExitStack() as stack:
        rig = Drivers(spark, tmp_path, stack, node=False)
        db = stack.enter_context(connect(settings=rig.plain))
        db.catalog.ensure_pchannels(2)
        db.catalog.create_collection("c", SCHEMA, vchannels=2)

        def flushed(process: ChildProcess, tick: int) -> None:
            def all_of_them() -> bool:
                assert process.running(), process.tail()
                table = open_table(rig.plain.checkpoints_uri)
                found = {} if table is None else read_checkpoints(table)
                return len(found) == 2 and all(each.time_tick >= tick for each in found.values())

            until(all_of_them, f"the rows up to {tick} are in the tables", seconds=240)

        sent = 0
        for turn in range(3):
            with rig.driver(f"driver{turn}", "streaming_node", "--with-flusher", node=f"n{turn}") as process:
                flushed(process, _send(db, range(sent, sent + 5000)))
                _send(db, range(sent + 5000, sent + 10_000))  # somewhere on its way
                sent += 10_000
        with rig.driver("last", "streaming_node", "--with-flusher", node="last") as process:
            flushed(process, _send(db, range(sent, sent + 1000)))
        assert sorted(db["c"].read()["id"].to_pylist()) == list(range(sent + 1000))
        assert all(tasks_run_in(folder) for folder in spark.folders)


def _send(client: Database, ids: range) -> int:
    """Insert rows, and return the tick of the last one."""
    collection = client.collection("c")
    begins = range(ids.start, ids.stop, 1000)
    return max(collection.insert(pa.table({"id": list(range(at, at + 1000))})).last_tick for at in begins)


def _wait_until_flushed(settings: Settings, tick: int, launcher: Launcher) -> None:
    """Wait until the tables have everything up to `tick`, which only tasks write there."""

    def flushed() -> bool:
        (status,) = launcher.runs()
        assert status.state is RunState.RUNNING, f"{status.error}\n{status.tail(60)}"
        found = read_checkpoints(open_table(settings.checkpoints_uri))
        return len(found) == 4 and all(each.time_tick >= tick for each in found.values())

    until(flushed, f"the rows up to {tick} are in the tables", seconds=240)
