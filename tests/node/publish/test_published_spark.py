"""Spark reads every published version as a read at its tick, and finds a version by the time of its tick."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millrace.base.settings import Settings
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.spark import read_spark
from tests.node.publish.published_maker import PublishedMaker, rows_in
from tests.node.publish.test_published_reads import END
from tests.tables.read.test_base import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_reads_every_version(spark: SparkSession, settings: Settings) -> None:
    made = PublishedMaker(settings, start_ms=time.time_ns() // 10**6)  # Spark refuses a version of long ago
    for number in range(4):
        made.write(range(number, number + 6), f"v{number}")
        made.delete([number + 1])
        made.flush()
        made.publish()
    made.fold()
    made.publish()
    table = made.table()
    assert table is not None
    for version in range(1, table.version + 1):
        at = PublishedTable.open(store_at(str(made.folder)), version=version)
        assert at is not None
        wanted = made.read(at.tick)
        frame = spark.read.format("delta").option("versionAsOf", version).load(str(made.folder))
        assert rows_in(pa.table(frame.toArrow())) == rows_in(wanted), version
        assert frame.count() == wanted.num_rows


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_reads_the_changes_of_each_version_and_streams_them(spark: SparkSession, settings: Settings) -> None:
    made = PublishedMaker(replace(settings, publish_change_feed=True), start_ms=time.time_ns() // 10**6)
    for number in range(10):
        made.write(range(number, number + 6), f"v{number}")
        made.delete([number + 1])
        made.flush()
        made.publish()
    made.delete([3, 14])
    made.write([5], "last")
    made.flush()
    made.fold()
    made.publish()
    table = made.table()
    assert table is not None
    before: Counter[str] = Counter()
    for version in range(1, table.version + 1):
        feed = spark.read.format("delta").option("readChangeFeed", "true")
        frame = feed.option("startingVersion", version).option("endingVersion", version).load(str(made.folder))
        changes = pa.table(frame.toArrow())
        for kind, sign in (("insert", 1), ("delete", -1)):
            some = changes.filter(pc.equal(changes["_change_type"], kind)).select(["id", "body"])
            for row, count in rows_in(some).items():
                before[row] += sign * count
        at = PublishedTable.open(store_at(str(made.folder)), version=version)
        assert at is not None
        wanted = rows_in(made.read(at.tick))
        assert {row: count for row, count in before.items() if count} == wanted, version
    stream = spark.readStream.format("delta").option("readChangeFeed", "true").option("startingVersion", 1)
    query = (
        stream.load(str(made.folder))
        .writeStream.format("memory")
        .queryName("changes")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    counted = spark.sql("SELECT sum(if(_change_type = 'insert', 1, -1)) FROM changes").collect()[0][0]
    assert counted == table.row_count


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_spark_reads_the_name_of_a_rows_partition(spark: SparkSession, settings: Settings) -> None:
    made = PublishedMaker(replace(settings, publish_partition=True), start_ms=time.time_ns() // 10**6)
    for number, operation in enumerate([*(("insert", list(range(6)), each, 0) for each in (1, 2)), *END]):
        run(made, operation, number)
    made.delete([1])
    made.flush()
    made.publish()
    table = made.table()
    assert table is not None
    wanted = read_arrow(settings, 1, at=table.tick, confirmed=made.maker.confirmed(), with_ticks=True)
    frame = spark.read.format("delta").load(str(made.folder))
    assert frame.columns == ["id", "body", "_partition"]
    assert rows_in(pa.table(frame.toArrow())) == rows_in(wanted.select(frame.columns))
    assert frame.where("_partition = 'blue'").count() == 5
    assert read_spark(spark, settings, 1, confirmed=made.maker.confirmed()).columns == ["id", "body"]
