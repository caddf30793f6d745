"""Streams under Spark: the rows source against plain Delta, windows and keyed operators against Spark's own.

The keyed baseline is ``transformWithStateInPandas``. All use one session; a first round of each warms up.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

import millrace.spark as face
from bench.streams.events import RISING, batches
from millrace.base.settings import Settings
from millrace.demo.flights import flights, flights_schema
from millrace.streams.operators.windows import Windows
from millrace.testing import Deployment, deployment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ["id", "time_hour", "dep_time", "dep_delay", "arr_delay", "carrier", "origin", "dest", "distance"]


@contextmanager
def session_of(settings: Settings) -> Iterator[SparkSession]:
    spark = face.session("bench-streams", settings=settings)
    try:
        yield spark
    finally:
        spark.stop()


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _noop(frame: DataFrame, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if not frame.isStreaming:
        frame.write.format("noop").mode("overwrite").save()
        return
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(folder)).trigger(availableNow=True)
    query = writer.start()
    query.awaitTermination()


def turns(subjects: dict[str, Callable[[], Any]], *, rows: int, pairs: int, base: str) -> dict[str, Any]:
    """Rows a second of each, in turn, and ratios to `base`; one round before warms up."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(pairs + 1):
        for name, work in subjects.items():
            seconds = _seconds(work)
            if turn:
                times[name].append(seconds)
    return {
        "rows": rows,
        "rows_per_s": {name: round(rows / statistics.median(found)) for name, found in times.items()},
        "ratio": {
            name: round(statistics.median(b / a for a, b in zip(found, times[base], strict=True)), 2)
            for name, found in times.items()
            if name != base
        },
    }


def _filled(db: Deployment, spark: SparkSession, folder: Path, times: int) -> tuple[str, int]:
    """The flights `times` times over in a collection, settled, and as a plain Delta table."""
    columns = {name: f"{kind}?" if nullable else kind for name, kind, nullable in flights_schema()}
    db.create_collection("flights", columns, key="id", vchannels=2)
    year = flights()
    for turn in range(times):
        ids = pa.array([f"{turn}/{each}" for each in year["id"].to_pylist()])
        for first in range(0, year.num_rows, 50_000):
            part = year.set_column(0, "id", ids).slice(first, 50_000)
            db.collection("flights").insert(part)
    db.settle()
    plain = str(folder / "plain")
    face.read(spark, "flights", settings=db.settings).repartition(4).write.format("delta").save(plain)
    return plain, times * year.num_rows


def source(folder: Path, *, times: int, pairs: int) -> dict[str, Any]:
    """Measure batch, stream and snapshot of nine of twenty columns into a sink without output; then windows."""
    settings = Settings(data_dir=folder / "data")
    with deployment(folder / "data") as db, session_of(settings) as spark:
        plain, rows = _filled(db, spark, folder, times)
        given: dict[str, Any] = {"settings": db.settings, "columns": COLUMNS, "kinds": "skip others"}

        def delta(streaming: bool) -> DataFrame:
            reader: Any = spark.readStream if streaming else spark.read
            return reader.format("delta").load(plain).select(*COLUMNS)

        def run(make: Callable[[], DataFrame]) -> Callable[[], None]:
            return lambda: _noop(make(), folder / "checkpoint")

        found = {
            "batch": turns(
                {
                    "plain Delta": run(lambda: delta(False)),
                    "changes_between": run(lambda: face.changes_between(spark, "flights", **given)),
                },
                rows=rows, pairs=pairs, base="plain Delta",
            ),
            "stream": turns(
                {
                    "plain Delta": run(lambda: delta(True)),
                    "stream": run(lambda: face.stream(spark, "flights", **given)),
                    "snapshot, then stream": run(lambda: face.stream(spark, "flights", snapshot="now", **given)),
                },
                rows=rows, pairs=pairs, base="plain Delta",
            ),
        }  # fmt: skip
        found["windows"] = turns(_windows(spark, db, folder), rows=rows, pairs=pairs, base="Spark's own")
        return found


def _windows(spark: SparkSession, db: Deployment, folder: Path) -> dict[str, Callable[[], None]]:
    """Return hourly delays by origin: Spark's windows into Delta, and ours with late rows dropped or put aside."""
    from pyspark.sql import functions as F

    columns = ["origin", "time_hour", "dep_delay"]

    def rows() -> DataFrame:
        return face.stream(spark, "flights", settings=db.settings, columns=columns, kinds="skip others")

    def own() -> None:
        shutil.rmtree(folder / "own", ignore_errors=True)
        hourly = (
            rows()
            .withWatermark("time_hour", "1 day")
            .groupBy("origin", F.window("time_hour", "1 hour"))
            .agg(F.count("*").alias("flights"), F.avg("dep_delay").alias("delay"))
        )
        writer = hourly.writeStream.format("delta").option("checkpointLocation", str(folder / "own" / "checkpoint"))
        writer.trigger(availableNow=True).start(str(folder / "own" / "table")).awaitTermination()

    def ours(late: Any) -> None:
        shutil.rmtree(folder / "ours", ignore_errors=True)
        operator = Windows(
            keys=("origin",), time="time_hour", size=timedelta(hours=1), late=late,
            aggregates={"flights": ("count", None), "delay": ("avg", "dep_delay")},
        )  # fmt: skip
        place = folder / "ours"
        query = face.operate(
            rows(), operator, table=str(place / "table"), checkpoint=place / "checkpoint",
            delay=timedelta(days=1), available_now=True,
        )  # fmt: skip
        query.awaitTermination()

    return {
        "Spark's own": own,
        "operator, late dropped": lambda: ours("drop"),
        "operator, late aside": lambda: ours("side"),
    }


def stateful(folder: Path, *, count: int, keys: int, size: int) -> dict[str, Any]:
    """Measure three rising values of a key, `size` events per micro-batch, from Parquet.

    Compares the operator with ``transformWithStateInPandas`` on RocksDB, which gets a quarter of the events because it
    takes so long. Rates are of the micro-batches after the first. The upper bound is an operator without work or state:
    the same shuffle to Python's tasks, which count the rows.
    """
    given = folder / "events"
    given.mkdir(parents=True)
    for number, rows in enumerate(batches(count, keys=keys, size=size)):
        path = given / f"{number:04}.parquet"
        pq.write_table(rows, path)
        os.utime(path, (time.time() - 10_000 + number,) * 2)
    with session_of(Settings(data_dir=folder / "data")) as spark:
        spark.conf.set(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )

        def frame() -> DataFrame:
            schema = spark.read.parquet(str(given)).schema
            return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(given))

        ours = face.operate(
            frame(),
            RISING,
            table=str(folder / "ours"),
            checkpoint=folder / "ours-checkpoint",
            delay=0,
            available_now=True,
        )
        ours.awaitTermination()
        mine = _rate(ours)
        bare = _rate(_shuffled_alone(frame(), folder / "bare"))
        most = max(2, count // size // 4)
        for path in sorted(given.iterdir())[most:]:
            path.unlink()
        theirs = _rate(_transform_with_state(frame(), folder / "theirs"))
        return {
            "events": count, "keys": keys, "batch": size, "ours_per_s": mine,
            "transform_with_state_per_s": theirs, "ratio": round(mine / theirs, 2),
            "shuffled_alone_per_s": bare, "ratio_of_that": round(bare / theirs, 2),
        }  # fmt: skip


def _rate(query: Any) -> int:
    heard = [each for each in query.recentProgress if each.numInputRows][1:]
    return round(
        sum(each.numInputRows for each in heard) / sum(each.durationMs["triggerExecution"] for each in heard) * 1e3
    )


def _shuffled_alone(frame: DataFrame, folder: Path) -> Any:
    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([{"rows": sum(each.num_rows for each in batches)}])

    def take(rows: DataFrame, _: int) -> None:
        rows.repartition(2, "k").mapInArrow(counted, "rows long").collect()

    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(folder))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def _transform_with_state(frame: DataFrame, folder: Path) -> Any:
    import pandas as pd
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Rising(StatefulProcessor):
        """The last two values of a key."""

        def init(self, handle: Any) -> None:
            self._last = handle.getValueState("last", "one long, two long")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            one, two = self._last.get() if self._last.exists() else (None, None)
            found = []
            for values in rows:
                for value in values.sort_values("t")["v"].tolist():
                    if one is not None and one < two < value:
                        found.append((key[0], one, value))
                    one, two = two, value
            self._last.update((one, two))
            yield pd.DataFrame(found, columns=["k", "a", "c"])

        def close(self) -> None:
            pass

    answers = frame.groupBy("k").transformWithStateInPandas(
        Rising(), outputStructType="k long, a long, c long", outputMode="Append", timeMode="None"
    )
    writer = answers.writeStream.format("delta").option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(folder / "table"))
    query.awaitTermination()
    return query
