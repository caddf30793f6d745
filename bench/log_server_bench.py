"""The log through its server: the cost of the wire, against the same log in process.

Every function takes a directory on the disk to be measured, leaves it empty, and returns plain data. MB are 10**6
payload bytes. The server is a separate process, as in a deployment; subject and baseline are interleaved.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from millrace.log.protocol import Log
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.ids import EARLIEST
from millrace.rpc.launch import ServerLaunch
from millrace.rpc.remote_log import RemoteLog, RemoteLogService

MIB = 1 << 20


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one append with its acknowledgement."""

    name: str
    appends: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Throughput:
    """Medians over `runs`, with their spread."""

    name: str
    runs: int
    mb_per_s: float
    mb_per_s_min: float
    mb_per_s_max: float
    entries_per_s: float


def batch_of(entry_bytes: int, batch_bytes: int) -> pa.LargeBinaryArray:
    """Return one batch of random entries."""
    count = max(1, batch_bytes // entry_bytes)
    offsets = np.arange(count + 1, dtype=np.int64) * entry_bytes
    data = os.urandom(count * entry_bytes)
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


@contextmanager
def served(directory: Path) -> Iterator[RemoteLog]:
    """Serve a log in `directory` for as long as the block lasts."""
    folder = directory / "served"
    with RemoteLogService.connect(folder, launch=ServerLaunch(idle_timeout=300.0)) as service:
        try:
            service.create("p0")
            yield service.open("p0")
        finally:
            service.shutdown()
            shutil.rmtree(folder)


def _latency(name: str, times: list[float]) -> Latency:
    ordered = sorted(times)
    return Latency(name, len(times), 1e3 * statistics.median(ordered), 1e3 * ordered[int(len(ordered) * 0.99)])


def append_latency(directory: Path, *, appends: int = 2000, entry_bytes: int = 1024) -> list[Latency]:
    """Compare one synced append: plain write + fdatasync, the log in process, the log through its server."""
    value = [os.urandom(entry_bytes)]
    plain = os.open(directory / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    times: dict[str, list[float]] = {"plain": [], "in process": [], "through the server": []}
    try:
        with RocksMQ(directory / "own") as engine, served(directory) as remote:
            engine.create("p0")
            own = engine.open("p0")
            for _ in range(appends):
                started = time.perf_counter()
                os.write(plain, value[0])
                os.fdatasync(plain)
                times["plain"].append(time.perf_counter() - started)
                for name, log in (("in process", own), ("through the server", remote)):
                    started = time.perf_counter()
                    log.append(value)
                    times[name].append(time.perf_counter() - started)
    finally:
        os.close(plain)
        (directory / "plain").unlink()
        shutil.rmtree(directory / "own", ignore_errors=True)
    return [_latency(name, each) for name, each in times.items()]


def _throughput(name: str, seconds: list[float], size: int, entries: int) -> Throughput:
    rates = [size / each / 1e6 for each in seconds]
    return Throughput(
        name, len(seconds), statistics.median(rates), min(rates), max(rates), entries / statistics.median(seconds)
    )


def _read_all(log: Log, max_bytes: int) -> int:
    position, size = EARLIEST, 0
    while (entries := log.read(position, max_bytes=max_bytes)).batch.num_rows:
        size += entries.batch.column("value").nbytes
        position = entries.next
    return size


def appends_and_reads(
    directory: Path, *, entry_bytes: int = 1024, batch_bytes: int = MIB, total: int = 512 * MIB, runs: int = 7
) -> list[Throughput]:
    """Measure pipelined appends by one producer, then a read of the whole log from the page cache."""
    batch = batch_of(entry_bytes, batch_bytes)
    batches = max(1, total // (len(batch) * entry_bytes))
    size, entries = batches * len(batch) * entry_bytes, batches * len(batch)
    writing, reading = [], []
    for _ in range(runs):
        with served(directory) as log:
            with log.pipeline() as pipeline:
                started = time.perf_counter()
                for _ in range(batches):
                    pipeline.submit(batch)
                pipeline.flush()
                writing.append(time.perf_counter() - started)
            _read_all(log, MIB)  # what the first read loads is loaded
            started = time.perf_counter()
            assert _read_all(log, 16 * MIB) >= size
            reading.append(time.perf_counter() - started)
    what = f"{entry_bytes} B entries"
    return [
        _throughput(f"append {what} in batches of {batch_bytes} B", writing, size, entries),
        _throughput(f"read {what}", reading, size, entries),
    ]


def small_appends(directory: Path, *, producers: int = 4, appends: int = 3000, entry_bytes: int = 1024) -> float:
    """Return appends per second of one entry each: every producer pipelines its own, the server groups commits."""
    value = [os.urandom(entry_bytes)]

    def produce(log: RemoteLog) -> None:
        with log.pipeline() as pipeline:
            for _ in range(appends):
                pipeline.submit(value)

    with served(directory) as log:
        threads = [threading.Thread(target=produce, args=(log,)) for _ in range(producers)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return producers * appends / (time.perf_counter() - started)


def main() -> None:
    """Run all measurements in the given directory (default: the current one) and print them as JSON."""
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".").absolute() / "log-server-bench"
    directory.mkdir(parents=True)
    try:
        found = {
            "latency_ms": [asdict(each) for each in append_latency(directory)],
            "throughput": [
                asdict(each)
                for entry_bytes in (1024, 64 * 1024)
                for each in appends_and_reads(directory, entry_bytes=entry_bytes)
            ],
            "small_appends_per_s": small_appends(directory),
        }
    finally:
        shutil.rmtree(directory)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
