"""``make run CLUSTER=2``: the streaming jobs' tasks run on Spark's standalone master, with workers that get this code,
and their libraries, as a packed environment, and share the log and the tables' store only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.server import LOOPBACK
from millrace.brokers.spark import SparkMaster, SparkWorker
from millrace.demo.cluster_faults import MIN_NODES, DemoServers

FOLDER = "brokers"
_PACK_SECONDS = 600
_REGISTER_SECONDS = 60.0


@contextmanager
def running_spark(
    settings: Settings,
    workers: int,
    root: Path,
    servers: DemoServers,
    console: Console,
    *,
    drivers: int = MIN_NODES + 1,
) -> Iterator[Settings]:
    """Yield the settings with a master that has `workers` (0: unchanged), each with a core for each of `drivers`."""
    if not workers:
        yield settings
        return
    if settings.spark_master:
        raise InvalidSettings(f"CLUSTER={workers}, but MILLRACE_SPARK_MASTER is {settings.spark_master}: choose one")
    folder = settings.data_dir / FOLDER / "spark"
    archive = folder / "environment.tar.gz"
    console.print(f"Packing the workers' environment ({archive}), which takes a minute …")
    pack = [str(root / "tools" / "pack_environment.sh"), str(Path(sys.executable).parent), str(archive)]
    done = subprocess.run(pack, cwd=root, capture_output=True, text=True, timeout=_PACK_SECONDS, check=False)
    if done.returncode:
        raise InvalidSettings(f"the environment could not be packed: {done.stderr[-2000:]}")
    os.environ["SPARK_LOCAL_IP"] = LOOPBACK
    with ExitStack() as stack:
        master = stack.enter_context(servers.added(SparkMaster(folder / "master", settings=settings)))
        started = [
            SparkWorker(folder / f"worker{number}", master=master.url, cores=drivers, memory="8g", settings=settings)
            for number in range(workers)
        ]
        for each in started:
            stack.enter_context(servers.added(each))
        end = Deadline.after(_REGISTER_SECONDS)
        while master.workers() < workers:
            if not end.pause(0.1):
                raise DeadlineExceeded(f"Spark's workers do not reach {master.url}: see their logs in {folder}")
        console.print(f"Spark: [bold]{master.url}[/], {workers} workers")
        yield replace(settings, spark_master=master.url, spark_environment=str(archive), spark_cores=workers)
