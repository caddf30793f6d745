"""The publisher: what a publish of a few changed rows costs as the table grows, with many collections, and freshness.

Keys are in random order, so no bound of a file excludes a delete: the key index finds every row. Baselines of the same
run: Delta's MERGE of the same upserts by delta-rs, and a scan of the same rows that were written once.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from bench.deployment import deployment, spark_job
from bench.tables.orders import SCHEMA, orders
from millrace.base.settings import Settings
from millrace.client.database import Database
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.publish.definition import PublishLoop, publish_to_end
from millrace.node.publish.publisher import PublishFigures
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.runtime.spark.session import session
from millrace.storage.local import local_path
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import deletes_uri, published_uri, rows_uri
from millrace.tables.key_index.index import INDEX_FROM_ROWS
from millrace.tables.rewrite.fold import fold_files
from millrace.tables.rewrite.rewrite import merge_job

CALL_ROWS = 20_000
FLUSHES = 20
SCANS = 15


def upserts(folder: Path, *, rows: int, changed: int = 1_000, times: int = 8, baselines: bool = True) -> dict[str, Any]:
    """Publish `times` flushes of `changed` upserts of random keys among `rows`.

    `baselines` hold all rows in memory.
    """
    draw = np.random.default_rng(0)
    with deployment(folder) as (settings, client, _):
        target = client.create_collection("orders", SCHEMA, vchannels=2)
        loop = PublishLoop(settings, only=[target.id])
        planner, committer = loop.planner(), loop.committer(None)

        def publish() -> PublishFigures:
            pending = planner.pending(without=frozenset(), target=None, max_bytes=0)
            plans = planner.plan({each.channel: each.end for each in pending}, max_bytes=0)
            reports = [loop.run(plan) for plan in plans]
            assert committer.commit(reports).committed
            planned = reports[0].planned
            assert planned is not None
            return planned.figures

        for part in np.array_split(draw.permutation(rows), FLUSHES):
            for piece in np.array_split(part, max(1, len(part) // CALL_ROWS)):
                target.insert(orders(piece))
            _settle(settings, client, target.id)
        start = time.perf_counter()
        publish()
        found: dict[str, Any] = {"rows": rows, "first_publish_s": round(time.perf_counter() - start, 3)}
        cpu, wall, vectors = [], [], []
        for number in range(times + 2):
            piece = orders(draw.choice(rows, changed, replace=False), version=number + 1)
            target.upsert(piece)
            _settle(settings, client, target.id)
            begun, used = time.perf_counter(), time.process_time()
            figures = publish()
            if number >= 2:  # the first builds the index
                wall.append(time.perf_counter() - begun)
                cpu.append(time.process_time() - used)
                vectors.append(figures.vector_bytes)
                assert figures.rows_scanned < INDEX_FROM_ROWS  # fewer are read without an index
        uri = published_uri(settings, target.id)
        folder_of = local_path(uri)
        assert folder_of is not None
        found |= {
            "files": len(DeltaTable(str(folder_of)).file_uris()),
            "publish_p50_ms": round(statistics.median(wall) * 1e3, 1),
            "cpu_us_per_changed_row": round(statistics.median(cpu) / changed * 1e6, 1),
            "vector_bytes_per_changed_row": round(statistics.median(vectors) / changed, 1),
        }
        if not baselines:
            return found
        plain = folder / "plain"
        write_deltalake(str(plain), target.read())
        merged = []
        for number in range(2):
            piece = orders(draw.choice(rows, changed, replace=False), version=100 + number)
            used = time.process_time()
            table = DeltaTable(str(plain))
            merge = table.merge(piece, "t.id = s.id", source_alias="s", target_alias="t")
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
            merged.append(time.process_time() - used)
        found["delta_rs_merge_cpu_us_per_changed_row"] = round(min(merged) / changed * 1e6, 1)
        write_deltalake(str(folder / "once"), target.read())
        found |= _scans(folder_of, folder / "once")
        compact(settings, CompactionParams())  # as its DAG does every hour
        publish_to_end(settings, collections=[target.id])
        compacted = _scans(folder_of, folder / "once")
        return found | {f"{name}_compacted": figure for name, figure in compacted.items()}


def spark_merge(folder: Path, *, rows: int, changed: int = 1_000, times: int = 5) -> dict[str, Any]:
    """Merge `times` pieces of `changed` upserts of random keys into `rows` rows by Spark, with deletion vectors.

    The baseline of :func:`upserts`. CPU is that of the JVM. The first merge warms up.
    """
    draw = np.random.default_rng(0)
    plain, piece_folder = folder / "plain", folder / "pieces"
    piece_folder.mkdir(parents=True)
    for part in np.array_split(draw.permutation(rows), FLUSHES):
        write_deltalake(str(plain), orders(part), mode="append")
    spark = session("bench-published", settings=Settings(data_dir=folder))
    try:
        spark.sql(f"ALTER TABLE delta.`{plain}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = true)")
        cpu, wall = [], []
        for number in range(times + 1):
            file = piece_folder / f"{number}.parquet"
            pq.write_table(orders(draw.choice(rows, changed, replace=False), version=number + 1), file)
            spark.read.parquet(str(file)).createOrReplaceTempView("s")
            begun, used = time.perf_counter(), _jvm_seconds()
            spark.sql(
                f"MERGE INTO delta.`{plain}` t USING s ON t.id = s.id"
                " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            ).collect()
            if number:
                wall.append(time.perf_counter() - begun)
                cpu.append(_jvm_seconds() - used)
        return {
            "rows": rows,
            "merge_p50_ms": round(statistics.median(wall) * 1e3, 1),
            "merge_cpu_us_per_changed_row": round(statistics.median(cpu) / changed * 1e6, 1),
        }
    finally:
        spark.stop()


def _jvm_seconds() -> float:
    """Return the CPU seconds of this process's JVM."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    assert gateway is not None
    fields = Path(f"/proc/{gateway.proc.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _settle(settings: Settings, client: Database, *folded: int) -> None:
    """Flush what was appended, and join small files of the collections `folded` as the flusher does after a flush."""
    ingest_to_end(settings, client.log)
    flush_to_end(settings)
    for number in folded:
        for uri in (rows_uri(settings, number), deletes_uri(settings, number)):
            table = open_table(uri)
            if table is not None:
                fold_files(table, merge_job(table, ("id",)))


def _scans(published: Path, once: Path) -> dict[str, float]:
    """Measure a full scan by DuckDB of the published table, and of its rows written once by delta-rs."""
    import duckdb_extension_delta

    connection = duckdb.connect()
    (extension,) = Path(duckdb_extension_delta.__file__).parent.rglob("*.duckdb_extension")
    connection.execute(f"LOAD '{extension}'")
    wall: dict[Path, list[float]] = {published: [], once: []}
    cpu: dict[Path, list[float]] = {published: [], once: []}
    for _ in range(SCANS):
        for folder in wall:
            start, used = time.perf_counter(), time.process_time()
            query = "SELECT count(*), sum(quantity), sum(price), max(note), max(symbol), max(placed)"
            connection.execute(f"{query} FROM delta_scan('{folder}')").fetchall()
            wall[folder].append(time.perf_counter() - start)
            cpu[folder].append(time.process_time() - used)
    first, second = (statistics.median(each) for each in wall.values())
    used_first, used_second = (statistics.median(each) for each in cpu.values())
    return {
        "duckdb_scan_ms": round(first * 1e3, 1),
        "duckdb_scan_of_once": round(second / first, 2),
        "duckdb_scan_cpu_of_once": round(used_second / used_first, 2),
    }


def many(folder: Path, *, collections: int, changed: int = 10, times: int = 5) -> dict[str, Any]:
    """Publish flushes that change ten of many collections."""
    with deployment(folder) as (settings, client, _):
        made = [
            client.create_collection(f"c{number}", {"id": "int64", "n": "int64"}, key="id")
            for number in range(collections)
        ]
        for each in made:
            each.insert([{"id": 1, "n": 1}])
        _settle(settings, client)
        start = time.perf_counter()
        publish_to_end(settings)
        found: dict[str, Any] = {"collections": collections, "first_s": round(time.perf_counter() - start, 2)}
        loop = PublishLoop(settings)
        planner, committer = loop.planner(), loop.committer(None)
        spent, looks = [], []
        for number in range(times + 1):
            if number:
                for each in made[:changed]:
                    each.upsert([{"id": 1, "n": number}])
                _settle(settings, client)
            begun = time.process_time()
            while pending := list(planner.pending(without=frozenset(), target=None, max_bytes=0)):
                plans = planner.plan({each.channel: each.end for each in pending}, max_bytes=0)
                committer.commit([loop.run(plan) for plan in plans])
                looks.append(len(plans))
            if number:
                spent.append(time.process_time() - begun)
        assert looks[-1] == changed
        return found | {"cpu_ms_of_ten_p50": round(statistics.median(spent) * 1e3, 1)}


def freshness(folder: Path, *, interval: float, flush: float, times: int = 12) -> dict[str, Any]:
    """Measure the time from an append until delta-rs' QueryBuilder finds its row, with the jobs as drivers."""
    with deployment(folder) as (settings, client, _):
        chosen = replace(settings, publish_interval=interval, flush_interval=flush)
        target = client.create_collection("seen", {"id": "int64"}, key="id", vchannels=2)
        uri = local_path(published_uri(settings, target.id))
        draw = np.random.default_rng(0)
        spent = []
        with spark_job(chosen, "--with-flusher"):
            for number in range(times):
                start = time.perf_counter()
                target.insert([{"id": number}])
                while not _sees(uri, number):
                    time.sleep(0.1)
                    assert time.perf_counter() - start < 120
                spent.append(time.perf_counter() - start)
                time.sleep(float(draw.uniform(0, max(interval, 1.0))))
        return {
            "publish_interval_s": interval,
            "visible_p50_s": round(statistics.median(spent), 2),
            "visible_max_s": round(max(spent), 2),
        }


def _sees(folder: Path | None, number: int) -> bool:
    if folder is None or not DeltaTable.is_deltatable(str(folder)):
        return False
    query = QueryBuilder().register("t", DeltaTable(str(folder)))
    found = pa.table(query.execute(f"SELECT count(*) AS n FROM t WHERE id = {number}").read_all())
    return bool(found["n"][0].as_py())
