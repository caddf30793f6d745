"""A Spark cluster of a test: Kafka, an S3 and a master on this machine, and workers that share nothing else with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.brokers.etcd import EtcdServer
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.spark import SparkMaster, SparkWorker, spark_home
from millrace.brokers.versitygw import VersityGateway
from millrace.runtime.child_processes import ChildProcess
from tests.crash.kill_rig import end_server
from tests.network_namespaces import Machine, machines, require_namespaces
from tests.waiting import until


class Cluster:
    """Kafka, an S3 and a master on this machine; workers on machines that share nothing with it but these."""

    def __init__(self, folder: Path, settings: Settings, stack: ExitStack, away: list[Machine]) -> None:
        enter = stack.enter_context
        self.host = away[0].home
        store = enter(VersityGateway(folder / "s3", settings=settings, host=self.host))
        os.environ.update(store.client_environment)
        self.kafka = enter(KafkaBroker(folder / "kafka", settings=settings, host=self.host))
        self.master = enter(SparkMaster(folder / "master", settings=settings, host=self.host))
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
            # Of this cluster alone: a process keeps its client of a URI, and with it the address of the store.
            tables=f"{store.url}/{folder.name}",
            log=self.kafka.url,
            spark_master=self.master.url,
            spark_environment=str(archive),
            spark_cores=len(away),
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

    def executors(self, number: int) -> list[psutil.Process]:
        """Return the executors that a worker has now."""
        below = psutil.Process(self.workers[number].pid).children(recursive=True)
        return [each for each in below if "CoarseGrainedExecutorBackend" in command_of(each)]

    def count_executors(self) -> int:
        """Return how many executors all workers have."""
        return sum(len(self.executors(number)) for number in range(len(self.workers)))

    def kill_executor(self, number: int) -> None:
        """SIGKILL to the executor of a worker, with its Python workers."""
        executor = self.executors(number)[0]
        for each in [*executor.children(recursive=True), executor]:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)


class Drivers:
    """A deployment on a cluster: a node without Spark fills its tables; drivers run on one machine after another."""

    def __init__(self, spark: Cluster, folder: Path, stack: ExitStack, *, node: bool = True, **more: Any) -> None:
        """`node`: whether to run that node. `more` are settings of all machines."""
        self._folder, self._stack = folder, stack
        etcd = stack.enter_context(EtcdServer(folder / "etcd", settings=spark.settings, host=spark.host))
        own: dict[str, Any] = {
            "log_host": spark.host,
            "session_seconds": 5.0,
            "pchannels": 2,
        }  # executors append to the node
        self._shared = replace(spark.settings, meta_store=etcd.url, **own | more)
        self.home = self._machine("home")
        self.plain = replace(self.home, spark_master="", spark_environment="", spark_properties="")
        """Settings of the machine with the node, for a client."""
        self._process("service", self.plain, ["-m", "millrace.service", "--name", "service"])
        if node:
            self._process("node", replace(self.plain, node="node"), ["-m", "millrace.node.cluster"])

    def _machine(self, name: str, node: str = "") -> Settings:
        settings = replace(self._shared, data_dir=self._folder / name / "data", node=node)
        settings.run_path.mkdir(parents=True, mode=0o700)
        settings.data_dir.chmod(0o700)
        self._stack.callback(end_server, settings)
        return settings

    def _process(self, name: str, settings: Settings, command: list[str]) -> ChildProcess:
        env = {**settings.environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        process = ChildProcess([sys.executable, *command], log_file=self._folder / f"{name}.log", env=env)
        self._stack.callback(process.kill)
        return process

    @contextmanager
    def driver(self, name: str, job: str, *arguments: str, node: str = "") -> Iterator[ChildProcess]:
        """Run a file of jobs/ on a new machine. At the end the machine is gone with all that lay there."""
        settings = self._machine(name, node)
        process = self._process(name, settings, [str(ROOT.parent / "jobs" / f"{job}.py"), *arguments])
        try:
            yield process
        finally:
            process.kill()
            end_server(settings)
            shutil.rmtree(settings.data_dir)


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process; "" if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@contextmanager
def cluster(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, *, workers: int = 2
) -> Iterator[tuple[Cluster, list[Machine]]]:
    """Yield a cluster of `workers`, and their machines. Skips the test where it cannot make network namespaces."""
    require_namespaces()
    for name in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")  # what it is set to goes at the end
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with machines(workers) as away, ExitStack() as stack:
        monkeypatch.setenv("SPARK_LOCAL_IP", away[0].home)
        yield Cluster(folder, settings, stack, away), away


def tasks_run_in(folder: Path) -> bool:
    """Return whether tasks ran on the worker with this folder."""
    logs = (folder / "work").glob("app-*/*/stderr")
    return "Running task" in "".join(path.read_text(errors="replace") for path in logs)


def executors_left_in(folder: Path) -> bool:
    """Return whether executors of the worker with this folder, also killed ones, left their temporary files there."""
    return any((folder / "work").glob("app-*/*/tmp/spark-*/*"))
