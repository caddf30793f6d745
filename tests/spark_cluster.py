"""A Spark cluster of a test: Kafka, an S3 and a master on this machine, and workers that share nothing else with it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.brokers.spark import SparkMaster, SparkWorker, spark_home
from millrace.brokers.versitygw import VersityGateway
from tests.network_namespaces import HOST, Machine, machines, require_namespaces
from tests.waiting import until


class Cluster:
    """Kafka, an S3 and a master on this machine; workers on machines that share nothing with it but these."""

    def __init__(self, folder: Path, settings: Settings, stack: ExitStack, away: list[Machine]) -> None:
        enter = stack.enter_context
        store = enter(VersityGateway(folder / "s3", settings=settings, host=HOST))
        os.environ.update(store.client_environment)
        self.kafka = enter(KafkaBroker(folder / "kafka", settings=settings, host=HOST))
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
            log=self.kafka.url,
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
        executors = [each for each in below if "CoarseGrainedExecutorBackend" in command_of(each)]
        for each in [*executors[0].children(recursive=True), executors[0]]:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process; "" if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@contextmanager
def cluster(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Cluster, list[Machine]]]:
    """Yield a cluster of two workers, and their machines. Skips the test where it cannot make network namespaces."""
    require_namespaces()
    for name in ("AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "")  # what it is set to goes at the end
    monkeypatch.setenv("SPARK_LOCAL_IP", HOST)
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with machines(2) as away, ExitStack() as stack:
        yield Cluster(folder, settings, stack, away), away


def tasks_run_in(folder: Path) -> bool:
    """Return whether tasks ran on the worker with this folder."""
    logs = (folder / "work").glob("app-*/*/stderr")
    return "Running task" in "".join(path.read_text(errors="replace") for path in logs)
