"""The flusher against plain Spark: rows per second from ``wal`` into a collection's table, against Parquet → Delta."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.deployment import deployment
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.client.database import Database
from millrace.demo.flights import flights
from millrace.demo.load import LoadGenerator, ensure_collection
from millrace.node.flush.definition import FlushLoop
from millrace.node.ingest.definition import IngestLoop
from millrace.node.range_loop.query import start_query
from millrace.runtime.spark.session import session
from millrace.tables.collections.data_tables import deletes_uri, rows_uri

TIMES = 3
DEADLINE = 300


def flusher(folder: Path, *, pairs: int = 7) -> dict[str, Any]:
    """Return rows/s of both and the ratio, over interleaved pairs in a warm Spark session: 1,010,328 flights."""
    with deployment(folder) as (settings, client, _):
        collection_id, rows = _fill(client)
        spark = session("bench-flusher", settings=settings)
        try:
            metrics = Metrics()
            start_query(spark, IngestLoop(settings), metrics=metrics, available_now=True).awaitTermination()
            source = folder / "baseline.parquet"
            ours: list[float] = []
            plain: list[float] = []
            for _ in range(pairs + 1):
                _forget(settings, collection_id)
                start = time.perf_counter()
                query = start_query(spark, FlushLoop(settings), metrics=metrics, available_now=True)
                query.awaitTermination(DEADLINE)
                ours.append(rows / (time.perf_counter() - start))
                if not source.exists():
                    _baseline_source(Path(rows_uri(settings, collection_id)), source)
                target = folder / "baseline.delta"
                shutil.rmtree(target, ignore_errors=True)
                start = time.perf_counter()
                spark.read.parquet(str(source)).write.format("delta").save(str(target))
                plain.append(rows / (time.perf_counter() - start))
            ratios = [a / b for a, b in zip(ours, plain, strict=True)][1:]  # the first pair warms both up
            return {
                "rows": rows,
                "pairs": pairs,
                "flusher_rows_per_s": round(statistics.median(ours[1:])),
                "spark_rows_per_s": round(statistics.median(plain[1:])),
                "ratio": round(statistics.median(ratios), 2),
                "ratio_min": round(min(ratios), 2),
                "ratio_max": round(max(ratios), 2),
            }
        finally:
            spark.stop()


def _fill(client: Database) -> tuple[int, int]:
    collection = ensure_collection(client)
    load = LoadGenerator(client, collection, flights(), prefix="b")
    load.full_speed(TIMES)
    return collection.id, load.counts.inserted


def _forget(settings: Settings, collection_id: int) -> None:
    """Make the flusher begin at the beginning."""
    for path in (
        rows_uri(settings, collection_id),
        deletes_uri(settings, collection_id),
        settings.segments_uri,
        settings.checkpoints_uri,
        settings.spark_checkpoint_path(FlushLoop.name),
    ):
        shutil.rmtree(path, ignore_errors=True)


def _baseline_source(rows: Path, target: Path) -> None:
    """Write the collection's own rows as two Parquet files (one a core), as any job would have them."""
    target.mkdir()
    table = pa.concat_tables([pq.read_table(file, partitioning=None) for file in sorted(rows.rglob("*.parquet"))])
    half = len(table) // 2
    pq.write_table(table.slice(0, half), target / "0.parquet")
    pq.write_table(table.slice(half), target / "1.parquet")
