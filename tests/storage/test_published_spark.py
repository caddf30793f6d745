"""Spark reads a published table, at any version and tick, and refuses to write to it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from millrace.storage.delta_log import first_commit
from millrace.storage.published_log import PHYSICAL_NAME
from millrace.storage.table import LogMaintenance
from tests.storage import published_world
from tests.storage.published_world import SCHEMA, Row, World, positions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    # Spark refuses versions that are older than the table's retention, by their ticks.
    monkeypatch.setattr(published_world, "FIRST_MS", time.time_ns() // 1_000_000 - 600_000)
    return World(tmp_path)


def rows(frame: DataFrame) -> list[Row]:
    found: pa.Table = frame.toArrow().select(SCHEMA.names)
    return sorted(zip(*(column.to_pylist() for column in found.columns), strict=True), key=lambda row: row[0])


def by_spark(spark: SparkSession, world: World, **options: Any) -> DataFrame:
    reader = spark.read.format("delta")
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load(str(world.folder))


@pytest.mark.slow
def test_versions_show_their_rows_also_after_a_checkpoint(spark: SparkSession, world: World) -> None:
    world.maintenance = LogMaintenance(checkpoint_commits=5, keep_commits=6)
    for _ in range(16):
        world.change_at_random()
    assert first_commit(world.store) >= 5, "the log was trimmed"
    assert by_spark(spark, world).count() == len(world.expected())
    for version in range(world.table.version - 3, world.table.version + 1):
        assert rows(by_spark(spark, world, versionAsOf=version)) == world.expected(version)


@pytest.mark.slow
def test_a_filter_finds_each_live_row_and_no_masked_one(spark: SparkSession, world: World) -> None:
    file = world.write(world.make_rows(12), masked=[0, 4, 11])
    world.commit(add=[file])
    frame = by_spark(spark, world)
    for at in (0, 4, 5, 10):
        row = world.rows[file.path][at]
        assert rows(frame.where(f"id = {row[0]}")) == ([] if at in (0, 4) else [row])


@pytest.mark.slow
def test_a_timestamp_of_a_tick_selects_its_version(spark: SparkSession, world: World) -> None:
    for ms in (1000, 2000, 3000):
        world.commit(ms=ms, add=[world.write(world.make_rows(1))])
    start = datetime.fromtimestamp(published_world.FIRST_MS / 1000, UTC)
    for ms, version in ((1000, 1), (1500, 1), (2000, 2), (2999, 2), (3000, 3)):
        moment = (start + timedelta(milliseconds=ms)).isoformat()
        assert rows(by_spark(spark, world, timestampAsOf=moment)) == world.expected(version), ms


@pytest.mark.slow
def test_a_renamed_column_and_one_that_files_lack(spark: SparkSession, world: World) -> None:
    world.commit(add=[world.write(world.make_rows(5), masked=[2])])
    place = SCHEMA.get_field_index("name")
    renamed = SCHEMA.set(place, pa.field("title", pa.string(), metadata={PHYSICAL_NAME: "name"}))
    world.commit(schema=renamed.append(pa.field("city", pa.string())))
    frame = by_spark(spark, world)
    assert frame.columns == ["id", "title", "at", "price", "city"]
    assert rows(frame.withColumnRenamed("title", "name")) == world.expected()
    title = world.expected()[0][1]
    assert frame.where(frame.title == title).count() == 1
    assert frame.where("city IS NULL").count() == 4


WRITES = {
    "INSERT": "INSERT INTO {} VALUES (1, 'x', TIMESTAMP '2026-01-01', NULL)",
    "DELETE": "DELETE FROM {} WHERE id = 1",
    "UPDATE": "UPDATE {} SET name = 'x'",
    "OPTIMIZE": "OPTIMIZE {}",
    "VACUUM": "VACUUM {} RETAIN 0 HOURS",
    "RESTORE": "RESTORE TABLE {} TO VERSION AS OF 1",
    "ALTER": "ALTER TABLE {} ADD COLUMN x BIGINT",
}


def test_spark_refuses_to_write(spark: SparkSession, world: World) -> None:
    for _ in range(3):
        world.commit(add=[world.write(world.make_rows(4), masked=[1])])
    before = {path for path in world.folder.rglob("*") if path.is_file()}
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    answers = {}
    for name, statement in WRITES.items():
        try:
            spark.sql(statement.format(f"delta.`{world.folder}`")).collect()
        except Exception as error:
            answers[name] = "millrace.published" in str(error) or str(error)
        else:
            answers[name] = "done"
    assert answers == dict.fromkeys(WRITES, True)
    after = {path for path in world.folder.rglob("*") if path.is_file()}
    # Spark may write files before it commits, and leave them; it changes nothing that is there.
    assert before <= after
    assert not [path for path in after - before if path.suffix == ".json"]
    world.commit(add=[world.write(world.make_rows(1))])
    assert rows(by_spark(spark, world)) == world.expected()


@pytest.mark.slow
def test_a_stream_of_the_table_names_its_option(spark: SparkSession, world: World, tmp_path: Path) -> None:
    old = world.write(world.make_rows(4))
    world.commit(add=[old])

    def stream(name: str, **options: Any) -> list[Row]:
        reader = spark.readStream.format("delta").options(**options)
        query = (
            reader.load(str(world.folder))
            .writeStream.format("memory")
            .queryName(name)
            .option("checkpointLocation", str(tmp_path / name))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return rows(spark.table(name))

    assert stream("appends") == world.expected()
    new = world.write([world.rows[old.path][at] for at in range(4)])
    world.commit(add=[new], remove=[old.path], rewrites=frozenset([old.path, new.path]))
    world.commit(mask={new.path: positions([0])}, add=[world.write(world.make_rows(2))])
    with pytest.raises(Exception, match=r"skipChangeCommits|ignoreDeletes|ignoreChanges"):
        stream("plain", startingVersion=0)
    # The rows that the commit with a mask added are skipped with it.
    assert stream("skipping", startingVersion=0, skipChangeCommits="true") == world.expected(1)
