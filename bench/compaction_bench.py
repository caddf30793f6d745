"""Compaction against Delta's own OPTIMIZE of the same table, and reads behind it against the same rows written once.

The table is a collection of flights, cut into files as micro-batches leave them. Both sides start from a copy of it in
the same warm Spark session, alternating. Ours sorts by key and tick; OPTIMIZE does not sort. There are no deletes, so
that both write the same rows.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from bench.deployment import deployment
from bench.flusher_bench import _fill
from bench.freshness_bench import freshness
from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import run
from millrace.runtime.progress import Progress
from millrace.runtime.spark.session import session
from millrace.storage.file_sink import FileSink
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import STATS_COLUMNS, rows_uri
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.spark import read_spark
from millrace.tables.rewrite.commits import RewriteCommitter
from millrace.tables.rewrite.files import FileGroup, live_files
from millrace.tables.rewrite.rewrite import RewriteResult

PARAMS = CompactionParams(fold="never", segments=False, vacuum=False)


def compaction(folder: Path, *, files: int = 1000, pairs: int = 5) -> dict[str, Any]:
    """Return the MB/s and rows/s of both, over interleaved pairs; then the reads."""
    with deployment(folder / "data") as (settings, client, _):
        collection_id, _rows = _fill(client)
        spark = session("bench-compaction", settings=settings)
        try:
            ingest_to_end(settings, client.log)
            flush_to_end(settings)
            path = Path(rows_uri(settings, collection_id))
            once, small = folder / "once", folder / "small"
            shutil.copytree(path, once)
            rows = _cut(path, files=files)
            shutil.copytree(path, small)
            spark.conf.set("spark.databricks.delta.optimize.maxThreads", str(settings.cores))
            ours: list[float] = []
            plain: list[float] = []
            for _ in range(pairs + 1):
                _restore(small, path)
                ours.append(
                    _timed(
                        lambda: run(
                            settings,
                            PARAMS,
                            Progress(),
                            session_factory=lambda: nullcontext(spark),
                            max_bytes_without_spark=0,
                        )
                    )
                )
                target = folder / "optimize"
                _restore(small, target)
                plain.append(_timed(partial(_optimize, spark, target)))
            found = _reads(spark, settings, collection_id, {"once": once, "small": small, "compacted": path}, pairs)
            ratios = [b / a for a, b in zip(ours, plain, strict=True)][1:]  # the first pair warms both up
            size = sum(file.size for file in live_files(table_at(small)))
            return {
                "rows": rows,
                "files": files,
                "mb": round(size / 1e6, 1),
                "pairs": pairs,
                "compaction_s": round(statistics.median(ours[1:]), 2),
                "optimize_s": round(statistics.median(plain[1:]), 2),
                "ratio": round(statistics.median(ratios), 2),
                "ratio_min": round(min(ratios), 2),
                "ratio_max": round(max(ratios), 2),
                "files_after": len(DeltaTable(str(path)).file_uris()),
                "reads": found,
            }
        finally:
            spark.stop()


def _cut(path: Path, *, files: int) -> int:
    """Cut the rows, in tick order, into about `files` files as micro-batches would; return the row count."""
    table = table_at(path)
    live = live_files(table)
    replacer = RewriteCommitter.of(table)
    total = sum(file.rows for file in live)
    each = max(1, total // files)
    done = []
    for file in live:
        rows = pq.read_table(path / file.path, partitioning=None)
        rows = rows.take(pc.sort_indices(rows["_time_tick"]))
        key = rows.column_names[0]
        actions = []
        for start in range(0, rows.num_rows, each):
            sink = FileSink.at(path, rows.schema, (key, *STATS_COLUMNS))
            sink.write(rows.slice(start, each), dict(file.partition))
            actions += sink.finish()
        done.append(RewriteResult(FileGroup((file,)), tuple(actions), rows.num_rows, rows.num_rows))
    assert replacer.commit(done)
    return total


def _restore(source: Path, target: Path) -> None:
    """Put the live files of `source` and its log where `target` is."""
    shutil.rmtree(target, ignore_errors=True)
    live = {file.path for file in live_files(table_at(source))}
    shutil.copytree(source / "_delta_log", target / "_delta_log")
    for name in live:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _reads(
    spark: SparkSession, settings: Settings, collection_id: int, places: dict[str, Path], pairs: int
) -> dict[str, Any]:
    """Return the seconds of whole reads, by the state of the table, and their ratio to the rows written once."""
    path = Path(rows_uri(settings, collection_id))
    kept = path.with_name("kept")
    path.rename(kept)
    places = {name: kept if place == path else place for name, place in places.items()}

    def arrow() -> None:
        assert read_arrow(settings, collection_id).num_rows

    def by_spark() -> None:
        assert read_spark(spark, settings, collection_id).groupBy("origin").avg("dep_delay").collect()

    seconds: dict[str, dict[str, list[float]]] = {"read_arrow": {}, "read": {}}
    ways: dict[str, Callable[[], None]] = {"read_arrow": arrow, "read": by_spark}
    for _ in range(pairs + 1):
        for state, place in places.items():
            _restore(place, path)
            for way, act in ways.items():
                seconds[way].setdefault(state, []).append(_timed(act))
    found: dict[str, Any] = {}
    for way, states in seconds.items():
        medians = {state: statistics.median(values[1:]) for state, values in states.items()}
        found[way] = {
            **{f"{state}_s": round(value, 3) for state, value in medians.items()},
            "compacted_to_once": round(medians["compacted"] / medians["once"], 2),
        }
    return found


def freshness_during_compaction(folder: Path, *, seconds: float = 60.0) -> dict[str, Any]:
    """Measure freshness under a steady load, with compaction in a process of its own and without it."""
    runs: list[int] = []

    @contextmanager
    def compacting(settings: Settings) -> Iterator[None]:
        stop = threading.Event()

        def again() -> None:
            while not stop.is_set():
                runs.append(_compaction_job(settings))

        thread = threading.Thread(target=again)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    alone = freshness(folder / "alone", seconds=seconds)
    with_it = freshness(folder / "beside", seconds=seconds, background=compacting)
    ratios = {
        kind: round(with_it[kind]["p50_s"] / alone[kind]["p50_s"], 2) for kind in ("wal_visible", "read_returned")
    }
    return {"alone": alone, "beside": with_it, "p50_ratio": ratios, "runs": len(runs), "files_merged": sum(runs)}


def _compaction_job(settings: Settings) -> int:
    """Run the job that merges and folds all there is; return the number of files that it replaced."""
    result = settings.run_path / "bench-compaction.json"
    params = {"min_files": 2, "fold": "always", "keep_history_hours": 0, "vacuum": False}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "millrace.operations",
            "compaction",
            "--params",
            json.dumps(params),
            "--result",
            str(result),
        ],
        env={**os.environ, **settings.environment()},
        stderr=subprocess.DEVNULL,
        check=True,
        start_new_session=True,  # as a launched job has, whose priority is its session's
    )
    works = json.loads(result.read_text())["report"]["collections"]
    return sum(work["rows"]["files_removed"] for work in works)


def _optimize(spark: SparkSession, table: Path) -> None:
    spark.sql(f"OPTIMIZE delta.`{table}`").collect()


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start
