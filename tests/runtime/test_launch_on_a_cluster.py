"""The setting `spark_master`: the launcher's job submits to Spark's own standalone master, and its tasks run there."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.spark import SparkMaster, SparkWorker, spark_home
from millrace.brokers.versitygw import VersityGateway
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.rpc.remote_log import RemoteLogService
from millrace.runtime.launch.launcher import Launcher, RunState
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_checkpoints
from tests.network_namespaces import HOST, Machine, machines, require_namespaces
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
    assert _tasks_run_in(tmp_path / "worker")


class Cluster:
    """Kafka, an S3 and a master on this machine; workers on machines that share nothing with it but these."""

    def __init__(self, folder: Path, settings: Settings, stack: ExitStack, away: list[Machine]) -> None:
        enter = stack.enter_context
        store = enter(VersityGateway(folder / "s3", settings=settings, host=HOST))
        os.environ.update(store.client_environment)
        kafka = enter(KafkaBroker(folder / "kafka", settings=settings, host=HOST))
        self.master = enter(SparkMaster(folder / "master", settings=settings, host=HOST))
        archive = folder / "environment.tar.gz"
        pack = [ROOT.parent / "tools" / "pack_environment.sh", ROOT.parent / ".venv" / "bin", archive]
        subprocess.run(pack, cwd=ROOT.parent, timeout=300, check=True)
        self.folders = [folder / f"worker{machine.number}" for machine in away]
        self.workers = [
            enter(self._worker(machine, home, settings)) for machine, home in zip(away, self.folders, strict=True)
        ]
        until(lambda: self.master.workers() == len(away), "the workers are registered")
        self.settings = replace(
            settings,
            tables=store.url,
            log=kafka.url,
            spark_master=self.master.url,
            spark_environment=str(archive),
            spark_cores=2,
            spark_memory="512m",
            flush_interval=1.0,
        )

    def _worker(self, machine: Machine, home: Path, settings: Settings) -> SparkWorker:
        within = machine.within(home, shown=spark_home(), hidden=[settings.data_dir])
        worker = SparkWorker(
            home, master=self.master.url, cores=2, memory="2g", host=machine.host, within=within, settings=settings
        )
        worker.home = home / "spark"
        return worker

    def kill_executor(self, number: int) -> None:
        """SIGKILL to the executor of a worker, with its Python workers."""
        below = psutil.Process(self.workers[number].pid).children(recursive=True)
        executors = [each for each in below if "CoarseGrainedExecutorBackend" in _command(each)]
        for each in [*executors[0].children(recursive=True), executors[0]]:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture
def cluster(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Cluster, list[Machine]]]:
    require_namespaces()
    for name in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")  # what it is set to goes at the end
    monkeypatch.setenv("SPARK_LOCAL_IP", HOST)
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with machines(2) as away, ExitStack() as stack:
        yield Cluster(tmp_path, settings, stack, away), away


def test_workers_that_share_no_folder_run_the_tasks_through_lost_executors_and_a_partition(
    cluster: tuple[Cluster, list[Machine]],
) -> None:
    """Rows are acknowledged all the time; each is in the collection once at the end."""
    spark, away = cluster
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
    assert all(_tasks_run_in(folder) for folder in spark.folders)
    assert not Path("tasks").exists(), "the planner has the data folder of its driver"


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


def _tasks_run_in(folder: Path) -> bool:
    logs = (folder / "work").glob("app-*/*/stderr")
    return "Running task" in "".join(path.read_text(errors="replace") for path in logs)
