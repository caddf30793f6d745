"""The streaming node: from the embedded log through the chain into committed ``wal``, with each part's share.

Every function takes a folder on the disk to be measured, leaves it empty, and returns plain data. MB are 10**6 bytes of
log entries; a message has one Arrow row with random bytes, which neither compress nor repeat.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from bench.deployment import deployment, rows, spark_job
from millrace.base.files import make_folder
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.brokers.spark import SparkMaster, SparkWorker
from millrace.log.protocol import Log
from millrace.message import builders
from millrace.message.payload.rows import encode_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_columns, encode_entry
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.definition import IngestLoop
from millrace.node.ingest.ingester import IngestPlan, run_ingest
from millrace.node.range_loop.schedule import UNBOUNDED
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.table import WalTable
from millrace.wal.chain import CHAIN_VERSION
from millrace.wal.digest import digest_rows

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")
ENTRY_BYTES = 256 << 10
"""What a producer that batches puts into one entry."""


@dataclass(frozen=True)
class NodeThroughput:
    """One pass over a backlog.

    Shares are parts of the task's time; reads and writes run in parallel with the chain, so theirs is the time that it
    waits for them. `cpu_us` is the task's CPU time per message, which other load changes least. `commit_ms` is the
    driver's Delta commit.
    """

    message_bytes: int
    messages: int
    mb_per_s: float
    messages_per_s: float
    read: float
    chain: float
    write: float
    cpu_us: float
    commit_ms: float


def fill(log: Log, pchannel: str, *, message_bytes: int, total_bytes: int) -> int:
    """Append a term's opening, a collection and inserts of `message_bytes` each, `total_bytes` in sum; the inserts."""
    vchannel = f"{pchannel}_1v0"
    log.append(
        [
            encode_entry([builders.term_opening(term=1, chain_version=CHAIN_VERSION, config={})]),
            encode_entry(
                [
                    builders.create_collection(
                        "c",
                        SCHEMA,
                        vchannel=vchannel,
                        vchannels=[vchannel],
                        collection_id=1,
                        partitions={"p": 1},
                        term=1,
                    )
                ]
            ),
        ]
    )
    each = max(1, ENTRY_BYTES // message_bytes)
    random = np.random.default_rng(1)
    pending: list[bytes] = []
    count = total_bytes // message_bytes
    for first in range(0, count, each):
        payloads = _payloads(first, each, random.bytes(each * message_bytes))
        pending.append(
            encode_columns(
                type=MessageType.INSERT,
                vchannel=vchannel,
                payloads=payloads,
                term=1,
                collection_id=1,
                partition_id=1,
                schema_version=1,
                rows=1,
            )
        )
        if len(pending) * ENTRY_BYTES >= 16 << 20:
            log.append(pending)
            pending = []
    if pending:
        log.append(pending)
    return -(-count // each) * each


def _payloads(first: int, count: int, bodies: bytes) -> list[bytes]:
    """Return one-row payloads with ids from `first` and equal shares of `bodies`: one encoded row, patched for each."""
    size = len(bodies) // count
    number, body = 0x0123456789ABCDEF, b"\xab" * size
    row = pa.record_batch([pa.array([number]), pa.array([body])], schema=SCHEMA.arrow())
    template = bytes(encode_rows(row))
    id_at, body_at = template.index(number.to_bytes(8, "little")), template.index(body)
    made = np.tile(np.frombuffer(template, dtype=np.uint8), (count, 1))
    made[:, id_at : id_at + 8] = np.arange(first, first + count, dtype="<i8").view(np.uint8).reshape(count, 8)
    made[:, body_at : body_at + size] = np.frombuffer(bodies, dtype=np.uint8).reshape(count, size)
    return [each.tobytes() for each in made]


def ranges(folder: Path, *, message_bytes: int, total_bytes: int = 512 << 20, passes: int = 3) -> list[NodeThroughput]:
    """Measure the task's work and the commit without Spark: each pass into a new table; one core, one PChannel."""
    results = []
    with RemoteLogService.connect(folder / "log") as service:
        service.create("p0")
        log = service.open("p0")
        messages = fill(log, "p0", message_bytes=message_bytes, total_bytes=total_bytes)
        for number in range(passes):
            table = WalTable.create(folder / f"wal{number}")
            committer = WalCommitter(WalTable.open(table.uri))
            plan = IngestPlan(table.position("p0"), log.describe().end, UNBOUNDED)
            start, start_cpu = time.perf_counter(), time.process_time()
            report = run_ingest(plan, log=log, table=Path(table.uri))
            task, cpu = time.perf_counter() - start, time.process_time() - start_cpu
            assert report.failure is None, report.failure
            assert report.totals.messages >= messages, report.totals
            commit = committer.commit([report]).seconds
            results.append(
                NodeThroughput(
                    message_bytes,
                    messages,
                    round(report.log_bytes / (task + commit) / 1e6, 1),
                    round(messages / (task + commit)),
                    round(report.seconds["read"] / task, 3),
                    round(report.seconds["chain"] / task, 3),
                    round(report.seconds["write"] / task, 3),
                    round(cpu / messages * 1e6, 2),
                    round(commit * 1e3, 1),
                )
            )
            shutil.rmtree(Path(table.uri))
        service.shutdown()
    shutil.rmtree(folder)
    return results


def node(folder: Path, *, message_bytes: int, total_bytes: int = 1 << 30, pchannels: int = 2) -> dict[str, Any]:
    """Measure the whole node on Spark, catching up on a backlog over `pchannels` PChannels in a warm session."""
    from millrace.node.range_loop.query import start_query
    from millrace.runtime.spark.session import session

    settings = Settings(data_dir=folder, cache_dir=Settings.load().cache_dir)
    names = [f"p{number}" for number in range(pchannels)]
    with RemoteLogService.connect(settings.log_path) as service:
        for name in [*names, "warm"]:
            service.create(name)
        fill(service.open("warm"), "warm", message_bytes=1024, total_bytes=1 << 20)
        spark = session("bench", settings=settings)
        start_query(spark, IngestLoop(settings), metrics=Metrics(), available_now=True).awaitTermination()
        messages = sum(
            fill(service.open(name), name, message_bytes=message_bytes, total_bytes=total_bytes // pchannels)
            for name in names
        )
        size = sum(service.open(name).describe().bytes for name in names)
        start = time.perf_counter()
        query = start_query(spark, IngestLoop(settings), metrics=Metrics(), available_now=True)
        query.awaitTermination()
        seconds = time.perf_counter() - start
        batches = [item.durationMs for item in query.recentProgress if item.numInputRows]
        spark.stop()
        service.shutdown()
    shutil.rmtree(folder)
    return {
        "message_bytes": message_bytes,
        "messages": messages,
        "mb_per_s": round(size / seconds / 1e6, 1),
        "messages_per_s": round(messages / seconds),
        "batches": len(batches),
        "batch_ms": {part: statistics.median(item.get(part, 0) for item in batches) for part in batches[-1]},
    }


def driver(folder: Path, *, pchannels: int, seconds: float, rate: int = 2000) -> dict[str, Any]:
    """Measure what a commit costs the node's driver on a standalone master with one worker, whose tasks do the rest.

    A producer sends `rate` rows a second over `pchannels` PChannels. Tasks and shuffled bytes are those of Spark's
    event log; CPU is that of the driver's process and its JVM.
    """
    with ExitStack() as stack:
        master = stack.enter_context(SparkMaster(folder / "master"))
        stack.enter_context(SparkWorker(folder / "worker", master=master.url, cores=2, memory="4g"))
        settings, client, collection = stack.enter_context(deployment(folder / "data", pchannels=pchannels))
        events = folder / "events"
        make_folder(events)
        properties = folder / "spark.conf"
        options = {"enabled": "true", "dir": f"file://{events}", "compress": "false"}
        lines = [f"spark.eventLog.{name} {value}\n" for name, value in options.items()]
        properties.write_text("".join(lines), encoding="utf-8")
        settings = replace(settings, spark_master=master.url, spark_properties=str(properties), spark_cores=2)
        job = stack.enter_context(spark_job(settings))
        producer, ids = client.new_producer(), itertools.count(step=rate // 4)

        def feed(lasting: float) -> None:
            end = time.monotonic() + lasting
            while (start := time.monotonic()) < end:
                producer.insert(collection, rows(next(ids), rate // 4))
                time.sleep(max(0.0, start + 0.25 - time.monotonic()))

        feed(_WARM_SECONDS)
        begun = 1000 * time.time()
        before, cpu = WalTable.open(settings.wal_uri).version, _cpu_seconds(job.pid)
        feed(seconds)
        commits = WalTable.open(settings.wal_uri).version - before
        cpu = _cpu_seconds(job.pid) - cpu
    tasks = stages = shuffled = 0
    for path in events.rglob("events_*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["Event"] == "SparkListenerTaskEnd":
                tasks += event["Task Info"]["Launch Time"] >= begun
                shuffled += event["Task Metrics"]["Shuffle Write Metrics"]["Shuffle Bytes Written"]
            if event["Event"] == "SparkListenerStageCompleted":
                stages += event["Stage Info"]["Submission Time"] >= begun
    return {
        "pchannels": pchannels,
        "commits": commits,
        "commits_per_s": round(commits / seconds, 2),
        "driver_cpu_ms_per_commit": round(1000 * cpu / max(commits, 1), 1),
        "tasks_per_stage": round(tasks / max(stages, 1), 2),
        "shuffled_bytes": shuffled,
    }


_WARM_SECONDS = 20.0


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children. A cluster's executors are children of the worker."""
    found = psutil.Process(pid)
    times = [each.cpu_times() for each in (found, *found.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def digest_cost(*, message_bytes: int = 1024, rows: int = 20_000) -> float:
    """Return the microseconds that the content digest costs per row."""
    from millrace.wal.schema import ROW_SCHEMA

    columns = []
    for item in ROW_SCHEMA:
        if pa.types.is_dictionary(item.type):
            column = pa.array(["x"] * rows).dictionary_encode().cast(item.type)
        elif pa.types.is_integer(item.type):
            column = pa.array(np.arange(rows), pa.int64()).cast(item.type)
        else:
            column = pa.array([b"x" * message_bytes] * rows if item.name == "payload" else [None] * rows, item.type)
        columns.append(column)
    batch = pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        digest_rows(batch)
        best = min(best, time.perf_counter() - start)
    return round(best / rows * 1e6, 3)


if __name__ == "__main__":
    place = Path(sys.argv[1]).absolute()
    print("digest", digest_cost(), "us a row of 1 KB")
    for size in (1024, 64 << 10):
        for result in ranges(place / "ranges", message_bytes=size):
            print(json.dumps(asdict(result)))
    for size in (1024, 64 << 10):
        print(json.dumps(node(place / "node", message_bytes=size)))
