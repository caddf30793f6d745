"""Backfill against plain Spark, and a load of files against a producer, with the same rows and session or server.

Several slices have two baselines: one write of everything, and one write for each slice, the cost of repeating each
slice alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bench.deployment import deployment
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.demo.flights import flights
from millrace.demo.flights_hourly import TABLES
from millrace.demo.load import ensure_collection
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill import load
from millrace.operations.backfill.declaration import BackfillParams, LoadParams
from millrace.operations.backfill.run import run
from millrace.runtime.progress import Progress
from millrace.runtime.spark.session import session
from millrace.tables.collections.data_tables import rows_uri

START, END = datetime(2013, 2, 2, tzinfo=UTC), datetime(2014, 1, 2, tzinfo=UTC)
"""Days of one cell of the grid that slices of 8,784 hours are cut on."""
SLICE_HOURS = {"one slice": 8784, "slices of 30 days": 720}


def backfill(folder: Path, *, pairs: int = 7, times: int = 3) -> dict[str, Any]:
    """Compare a year's rebuild with plain Spark, and a load with a producer's inserts, by source rows per second."""
    with deployment(folder) as (settings, client, _):
        collection = ensure_collection(client)
        year = flights()
        found = {"load": _load(folder, client, collection, year, times=times)}
        ingest_to_end(settings, client.log)
        flush_to_end(settings)
        rows = times * 2 * len(year)
        spark = session("bench-backfill", settings=settings)
        try:
            for name, hours in SLICE_HOURS.items():
                found[name] = _rebuild(spark, settings, collection, rows, hours=hours, pairs=pairs)
        finally:
            spark.stop()
    return found


def _rebuild(
    spark: SparkSession, settings: Settings, collection: CollectionInfo, rows: int, *, hours: int, pairs: int
) -> dict[str, Any]:
    params = BackfillParams(start=START, end=END, slice_hours=hours)
    ours: list[float] = []
    plain: list[float] = []
    sliced: list[float] = []
    for _ in range(pairs + 1):
        start = time.perf_counter()
        report = run(spark, settings, params, Progress())
        ours.append(rows / (time.perf_counter() - start))
        assert {each.outcome for each in report.slices} == {"written"}
        start = time.perf_counter()
        written = _plain(spark, settings, collection, [(START, END)])
        plain.append(rows / (time.perf_counter() - start))
        assert report.rows == spark.read.format("delta").load(written).count()
        if len(report.slices) > 1:
            start = time.perf_counter()
            _plain(spark, settings, collection, [(each.start, each.end) for each in report.slices])
            sliced.append(rows / (time.perf_counter() - start))
    found = {
        "source_rows": rows,
        "rows": report.rows,
        "slices": len(report.slices),
        "pairs": pairs,
        "backfill_rows_per_s": round(statistics.median(ours[1:])),
        "spark_rows_per_s": round(statistics.median(plain[1:])),
        **_ratio(ours, plain),
    }
    return found | ({"to_spark_by_slice": _ratio(ours, sliced)} if sliced else {})


def _plain(
    spark: SparkSession, settings: Settings, collection: CollectionInfo, parts: Sequence[tuple[datetime, datetime]]
) -> str:
    """Rebuild as a Spark user would, at once or slice by slice; return the folder of the table."""
    target = str(settings.data_dir / "plain.delta")
    for start, end in parts:
        source = spark.read.format("delta").load(str(rows_uri(settings, collection.id)))
        within = (F.col("time_hour") >= start) & (F.col("time_hour") < end)
        made = TABLES[0].build(source.where(within)).withColumn("date", F.to_date("hour"))
        writer = made.write.format("delta").mode("overwrite").partitionBy("date")
        if len(parts) > 1:
            writer = writer.option("replaceWhere", f"date >= '{start:%Y-%m-%d}' AND date < '{end:%Y-%m-%d}'")
        writer.save(target)
    return target


def _load(folder: Path, client: Database, collection: CollectionInfo, year: pa.Table, *, times: int) -> dict[str, Any]:
    loaded: list[float] = []
    produced: list[float] = []
    for number in range(times):
        file = folder / f"input-{number}.parquet"
        pq.write_table(_keyed(year, f"l{number}/"), file)
        params = LoadParams(collection=collection.name, files=[str(file)], partition_by="origin")
        start = time.perf_counter()
        assert load.run(client.settings, params, Progress()).rows == len(year)
        loaded.append(len(year) / (time.perf_counter() - start))
        again = _again(year, folder)
        start = time.perf_counter()
        client.new_producer().insert(collection, pq.read_table(again), partition_by="origin")
        produced.append(len(year) / (time.perf_counter() - start))
    return {
        "rows": len(year),
        "load_rows_per_s": round(statistics.median(loaded[1:] or loaded)),
        "producer_rows_per_s": round(statistics.median(produced[1:] or produced)),
        **_ratio(loaded, produced),
    }


def _again(year: pa.Table, folder: Path) -> Path:
    """Write the same rows under other keys, as a file."""
    file = folder / "produced.parquet"
    pq.write_table(_keyed(year, f"p{time.monotonic_ns()}/"), file)
    return file


def _keyed(rows: pa.Table, prefix: str) -> pa.Table:
    place = rows.column_names.index("id")
    return rows.set_column(place, "id", pc.binary_join_element_wise(prefix, rows.column("id"), ""))


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the ratio of the pairs after the first, which warms both up."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)][1 if len(ours) > 1 else 0 :]
    return {
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
    }
