"""Inserts and upserts against MERGE: rows/s of single calls, and from the first append until all rows can be read.

Peers get the same changes to the same base table. delta-rs merges them in as many commits as our streaming node made
(the same batching). Spark's foreachBatch merges files of FILE_ROWS rows, at the files per trigger that suit it best.
Both have their input in memory or in Parquet files before the clock starts; ours begins at the producer, with every
call durable and judged separately.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from delta.tables import DeltaTable as SparkTable
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from bench.deployment import deployment, spark_job
from bench.tables.orders import calls_of, changes, collection_of, orders, write_base
from millrace.base.settings import Settings
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.client.produce.async_producer import AsyncProducer
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.runtime.spark.session import session

CALLERS = 8
TASKS = 256
FILE_ROWS = 10_000
DEADLINE = 300.0
MANY = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("value", "int32", False)), "id")


def calls(folder: Path, *, singles: int, rows: int, times: int = 3) -> dict[str, Any]:
    """Return rows/s of inserts and of upserts in equal, alternating calls; then of inserts, updates, deletes by key.

    `singles` calls of one row through ``batch()`` and by TASKS tasks of an AsyncProducer, a quarter of them by CALLERS
    threads; `rows` rows in calls of 10,000, a tenth of them in calls of 100. Reports the best of `times`.
    """
    found: dict[str, Any] = {}
    with deployment(folder) as (_, client, _collection):
        target = collection_of(client, "orders")
        table = changes(1 << 40, max(singles, rows), updates=0.0)
        one = list(calls_of(table.slice(0, singles), 1))
        ways: dict[str, Callable[[str], float]] = {
            f"{CALLERS} callers, 1 row": lambda kind: _callers(target, one[: singles // 4], kind),
            "batch(), 1 row": lambda kind: _batched(target, one, kind),
            f"async, {TASKS} tasks, 1 row": lambda kind: _tasks(client, target, one, kind),
            "calls of 100": lambda kind: _calls(target, table.slice(0, rows // 10), 100, kind),
            "calls of 10,000": lambda kind: _calls(target, table.slice(0, rows), 10_000, kind),
        }
        for name, way in ways.items():
            way("insert"), way("upsert")  # what the first calls load is loaded
            rounds = [(way("insert"), way("upsert")) for _ in range(times)]
            insert, upsert = (max(each) for each in zip(*rounds, strict=True))
            found[name] = {
                "insert_rows_per_s": round(insert),
                "upsert_rows_per_s": round(upsert),
                "upsert_to_insert": round(upsert / insert, 2),
            }
        found["changes in key order"] = _captured(target, rows)
    return found


def _timed_rows(count: int, act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return count / (time.perf_counter() - start)


def _callers(target: Collection, pieces: list[pa.RecordBatch], kind: str) -> float:
    with ThreadPoolExecutor(CALLERS) as pool:
        return _timed_rows(len(pieces), lambda: list(pool.map(getattr(target, kind), pieces)))


def _calls(target: Collection, table: pa.Table, rows: int, kind: str) -> float:
    pieces = list(calls_of(table, rows))
    return _timed_rows(table.num_rows, lambda: [getattr(target, kind)(piece) for piece in pieces])


def _batched(target: Collection, pieces: list[pa.RecordBatch], kind: str) -> float:
    producer = target.database.producer
    with producer.batch() as batch:

        def act() -> None:
            futures = [getattr(batch, kind)(piece, collection=target.definition) for piece in pieces]
            batch.flush()
            for future in futures:
                future.result().checked()

        return _timed_rows(len(pieces), act)


def _tasks(client: Database, target: Collection, pieces: list[pa.RecordBatch], kind: str) -> float:
    async def one(producer: AsyncProducer, share: list[pa.RecordBatch]) -> None:
        for piece in share:
            await getattr(producer, kind)(target.definition, piece)

    async def run() -> float:
        async with AsyncProducer(client.new_producer()) as producer:
            start = time.perf_counter()
            await asyncio.gather(*(one(producer, pieces[task::TASKS]) for task in range(TASKS)))
            return len(pieces) / (time.perf_counter() - start)

    return asyncio.run(run())


def _captured(target: Collection, rows: int) -> dict[str, int]:
    """Append changes as a database's log has them: by key, 40 % new, 40 % updated, 20 % deleted, in runs of 500."""
    table = orders(np.arange(rows), version=2)

    def act() -> None:
        with target.database.producer.batch() as batch:
            for number, piece in enumerate(calls_of(table, 500)):
                if number % 5 == 4:
                    batch.delete(piece.column("id"), collection=target.definition)
                else:
                    batch.upsert(piece, collection=target.definition)

    return {"rows_per_s": round(max(_timed_rows(rows, act) for _ in range(3)))}


def many(folder: Path, *, rows: int, call: int = 100_000) -> dict[str, Any]:
    """Measure `rows` narrow rows in calls of `call`, flushed, and read back by `stream()`.

    Return rows/s of each step, peaks of memory, and bytes on disk by part. One piece at a time is judged and flushed,
    so that no more of the log waits than in a running deployment.
    """
    piece = max(call, min(rows, 10_000_000))
    with deployment(folder) as (settings, client, _):
        target = client.create_collection("many", MANY, vchannels=2)
        appending = settling = 0.0
        for begin in range(0, rows, piece):
            start = time.perf_counter()
            for first in range(begin, min(rows, begin + piece), call):
                target.insert(_narrow(first, min(call, rows - first)))
            appending += time.perf_counter() - start
            start = time.perf_counter()
            ingest_to_end(settings, client.log)
            flush_to_end(settings)
            settling += time.perf_counter() - start
        written = _peak_mib()
        start, seen, checked, most = time.perf_counter(), 0, 0, 0
        with target.stream() as batches:
            for batch in batches:
                seen += batch.num_rows
                checked += int(pc.sum(batch.column("value")).as_py())
                most = max(most, pa.total_allocated_bytes())
        reading = time.perf_counter() - start
        assert seen == rows
        assert checked == sum(int(_values(first, min(call, rows - first)).sum()) for first in range(0, rows, call))
        parts = {
            each.name: sum(file.stat().st_size for file in each.rglob("*") if file.is_file())
            for each in folder.iterdir()
        }
        return {
            "rows": rows,
            "append_rows_per_s": round(rows / appending),
            "judge_and_flush_rows_per_s": round(rows / settling),
            "stream_rows_per_s": round(rows / reading),
            "peak_rss_mib_written": written,
            "peak_rss_mib": _peak_mib(),
            "most_arrow_mib": round(most / (1 << 20)),
            "disk_mb": {name: round(size / 1e6) for name, size in parts.items() if size > 1e6},
            "disk_bytes_per_row": round(sum(parts.values()) / rows, 1),
        }


def _values(first: int, count: int) -> np.ndarray:
    return (np.arange(first, first + count) * 7919 % 1_000_003).astype(np.int32)


def _narrow(first: int, count: int) -> pa.Table:
    return pa.table({"id": np.arange(first, first + count), "value": _values(first, count)})


def _peak_mib() -> int:
    """Of this process, from its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


# --- until they can be read ------------------------------------------------------------------------------------------


def until_readable(folder: Path, *, base: int, count: int, call: int, updates: float) -> dict[str, Any]:
    """Rows/s from the first append until a read at the last one's tick answers, and of both peers.

    `count` rows go in by calls of `call` rows; `updates` of them are updates of the `base` rows that are there.
    """
    table = changes(base, count, updates=updates)
    seconds, commits = _ours(folder / "ours", base, table, call)
    batch = max(call, -(-count // commits))
    delta_rs = _delta_rs_merge(folder / "delta-rs", base, table, batch)
    spark = session("bench-tables", settings=Settings(data_dir=folder))
    spark.sparkContext.setLogLevel("OFF")  # merges that would take too long are cut off, with pages of traces
    try:
        _spark_merge(spark, folder / "warm", 1000, changes(1000, 2000, updates=0.1), 1)
        merges = {
            files: _spark_merge(spark, folder / f"spark-{files}", base, table, files)
            for files in sorted({1, -(-count // FILE_ROWS)})
        }
    finally:
        spark.stop()
    speed = count / seconds
    return {
        "rows": count,
        "rows_per_s": round(speed),
        "commits": commits,
        "delta_rs_rows_a_merge": batch,
        "delta_rs_rows_per_s": round(delta_rs),
        "to_delta_rs": round(speed / delta_rs, 2),
        "spark_rows_per_s_by_files": {str(each): round(value) for each, value in merges.items()},
        "to_spark": round(speed / max(merges.values()), 2),
    }


def _ours(folder: Path, base: int, table: pa.Table, call: int) -> tuple[float, int]:
    """Seconds, and how many commits ``wal`` got meanwhile."""
    with deployment(folder) as (settings, client, _), spark_job(settings, "--with-flusher"):
        target = collection_of(client, "orders", base=base)
        assert target.count(deadline=DEADLINE) == base
        before = DeltaTable(settings.wal_uri).version()
        new = len(set(range(base, base + table.num_rows)) & set(table.column("id").to_pylist()))
        start = time.perf_counter()
        if call < FILE_ROWS:
            with target.database.producer.batch() as batch:
                futures = [batch.upsert(piece, collection=target.definition) for piece in calls_of(table, call)]
            tick = max(future.result().checked().last_tick for future in futures)
        else:
            tick = max(target.upsert(piece).last_tick for piece in calls_of(table, call))
        assert (
            target.read(at=tick, where=f"id = {int(table.column('id')[-1].as_py())}", deadline=DEADLINE).num_rows == 1
        )
        seconds = time.perf_counter() - start
        commits = DeltaTable(settings.wal_uri).version() - before
        assert target.count(at=tick, deadline=DEADLINE) == base + new
        return seconds, max(1, commits)


def _delta_rs_merge(folder: Path, base: int, table: pa.Table, rows: int, *, most: float = 60.0) -> float:
    """Rows/s of merges of `rows` rows each, for at most about `most` seconds."""
    write_base(folder, base)
    done, start = 0, time.perf_counter()
    for piece in calls_of(table, rows):
        (
            DeltaTable(str(folder))
            .merge(pa.table(piece), "t.id = s.id", source_alias="s", target_alias="t")
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute()
        )
        done += piece.num_rows
        if time.perf_counter() - start > most:
            break
    return done / (time.perf_counter() - start)


def _spark_merge(
    spark: SparkSession, folder: Path, base: int, table: pa.Table, files: int, *, most: float = 90.0
) -> float:
    """Return rows/s of a stream of Parquet files whose foreachBatch merges `files` of them at a time.

    Measures only the first merges if all of them would take longer than about `most` seconds.
    """
    inbox, target = folder / "inbox", folder / "table"
    inbox.mkdir(parents=True)
    write_base(target, base)
    for number, piece in enumerate(calls_of(table, FILE_ROWS)):
        pq.write_table(pa.table(piece), inbox / f"{number:06}.parquet")

    def merge(frame: DataFrame, _number: int) -> None:
        (
            SparkTable.forPath(spark, str(target))
            .alias("t")
            .merge(frame.alias("s"), "t.id = s.id")
            .whenMatchedUpdateAll()
            .whenNotMatchedInsertAll()
            .execute()
        )
        ends.append(time.perf_counter())

    ends: list[float] = []
    stream = spark.readStream.schema(spark.read.parquet(str(inbox)).schema).option("maxFilesPerTrigger", files)
    start = time.perf_counter()
    query = (
        stream.parquet(str(inbox))
        .writeStream.foreachBatch(merge)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(int(most))
    while not ends and query.isActive:
        query.awaitTermination(1)
    query.stop()
    return min(table.num_rows, len(ends) * files * FILE_ROWS) / (ends[-1] - start)
