"""Many callers that send one row and wait: threads, tasks, connections, batches, and consumers beside a producer.

Each measurement has a new deployment (default settings) or a new Kafka broker (one node, 512 MB heap, a topic of one
partition), so that a log's length plays no part. The callers run in processes of their own (bench.callers_load):
threads and tasks share one connection, "connections" are processes with a connection each. Kafka is called by
kafka-python: one shared KafkaProducer with acks=all. Its broker syncs nothing before it answers; Millrace does.

CPU and context switches (voluntary and not) are those of the callers' processes and of the server, per row. Those of
the server's threads that ended meanwhile are not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from kafka.admin import KafkaAdminClient, NewTopic

from bench.callers_load import NAME, Found, Task
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.client.database import connect
from millrace.rpc.discovery import read_record

COLUMNS = {"id": "int64", "device": "string", "value": "float64", "at": "int64"}
START_SECONDS = 120.0


@dataclass(frozen=True)
class Server:
    """A running server: where its clients find it, and its process."""

    backend: str
    where: str
    pid: int


@contextmanager
def served(backend: str, folder: Path) -> Iterator[Server]:
    """Start a new deployment, or a new broker, for as long as the block lasts."""
    if backend == "kafka":
        with KafkaBroker(folder, settings=Settings(), heap="512m").start() as broker:
            admin = KafkaAdminClient(bootstrap_servers=broker.address)
            admin.create_topics([NewTopic(NAME, num_partitions=1, replication_factor=1)])
            admin.close()
            yield Server(backend, broker.address, broker.pid)
        return
    with connect(settings=Settings(data_dir=folder, cache_dir=Settings.load().cache_dir)) as db:
        db.create_collection(NAME, COLUMNS, key="id")
        record = read_record(folder / "log")
        assert record is not None
        try:
            yield Server(backend, str(folder), record.pid)
        finally:
            db.connection.service.shutdown()


class Load:
    """A process of callers or consumers."""

    def __init__(self, task: Task) -> None:
        command = [sys.executable, "-m", "bench.callers_load", json.dumps(asdict(task))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ready(self) -> None:
        """Wait until it may begin."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == "ready\n", f"the callers' process failed before it began: {line!r}"

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def found(self) -> Found:
        """Wait for what it found."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the callers' process failed"
        return Found(**json.loads(line))

    def close(self) -> None:
        """End the process."""
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()


def switches(pid: int) -> int:
    """Return the context switches of a process's threads so far."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            lines = status.read_text().splitlines()
        except OSError:
            continue  # the thread has ended
        total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return total


def run(server: Server, loads: Sequence[Task]) -> tuple[list[Found], dict[str, float]]:
    """Run processes at once; return what they found, and the server's CPU seconds and context switches."""
    process = psutil.Process(server.pid)
    with ExitStack() as closing:
        running = []
        for task in loads:
            load = Load(task)
            closing.callback(load.close)
            running.append(load)
        for load in running:
            load.ready()
        before, switched = process.cpu_times(), switches(server.pid)
        for load in running:
            load.begin()
        found = [load.found() for load in running]
        after = process.cpu_times()
        cpu = after.user + after.system - before.user - before.system
        return found, {"cpu": cpu, "switches": switches(server.pid) - switched}


def called(server: Server, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return rows per second, latencies of a call in ms, and CPU and context switches per row on both sides."""
    found, used = run(server, tasks)
    return _summary(found, used)


def _summary(found: Sequence[Found], used: dict[str, float]) -> dict[str, Any]:
    rows, seconds = sum(each.rows for each in found), max(each.seconds for each in found)
    return {
        "rows_per_s": round(rows / seconds),
        "calls_per_s": round(sum(each.calls for each in found) / seconds),
        **_percentiles("call", found),
        "client_cpu_us_a_row": round(sum(each.cpu for each in found) / rows * 1e6, 1),
        "server_cpu_us_a_row": round(used["cpu"] / rows * 1e6, 1),
        "client_switches_a_row": round(sum(each.switches for each in found) / rows, 2),
        "server_switches_a_row": round(used["switches"] / rows, 2),
    }


def _percentiles(name: str, found: Sequence[Found]) -> dict[str, float]:
    values = np.array([each for one in found for each in one.latencies]) * 1000
    if not len(values):
        return {}
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {f"{name}_p50_ms": round(p50, 2), f"{name}_p99_ms": round(p99, 2)}


def callers(backend: str, folder: Path, *, kind: str, count: int, seconds: float, processes: int = 1) -> dict[str, Any]:
    """Measure `processes` processes of `kind` (bench.callers_load) at once."""
    with served(backend, folder) as server:
        task = Task(backend, server.where, kind, count, seconds)
        return called(server, [task] * processes)


def consumers(backend: str, folder: Path, *, count: int, seconds: float) -> dict[str, Any]:
    """Measure `count` consumers of one process beside one caller, at full speed and at 20 calls a second.

    A lag runs from before the call until a consumer has decoded the row. The calls per second are the caller's. The CPU
    is of the whole: the consumers' process, the caller's and the server, per row appended.
    """
    found: dict[str, Any] = {}
    with served(backend, folder) as server:
        for name, pause in (("full speed", 0.0), ("20 calls/s", 0.05)):
            caller = Task(backend, server.where, "threads", 1, seconds, pause)
            reader = Task(backend, server.where, "consume", count, seconds + 1)
            (read, called), used = run(server, [reader, caller])
            rows = max(1, called.rows)
            found[name] = {
                "calls_per_s": round(called.calls / called.seconds, 1),
                **_percentiles("call", [called]),
                **_percentiles("lag", [read]),
                "delivered": round(read.rows / (rows * count), 3),
                "consumers_cpu_us_a_delivery": round(read.cpu / max(1, read.rows) * 1e6, 1),
                "caller_cpu_us_a_row": round(called.cpu / rows * 1e6, 1),
                "server_cpu_us_a_row": round(used["cpu"] / rows * 1e6, 1),
                "consumers_switches_a_delivery": round(read.switches / max(1, read.rows), 2),
                "server_switches_a_row": round(used["switches"] / rows, 2),
            }
    return found
