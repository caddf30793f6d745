"""The session: Delta works from jars given by path, workers run this Python with this package, times are UTC."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import millrace
from millrace.base.settings import Settings
from millrace.runtime.spark.jars import JARS
from millrace.runtime.spark.session import spark_configuration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.slow
def test_a_delta_table_is_written_changed_and_read_back_by_another_reader(
    spark: SparkSession, settings: Settings
) -> None:
    path = str(Path(settings.wal_uri))
    spark.range(5).write.format("delta").save(path)
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 3")
    assert sorted(DeltaTable(path).to_pyarrow_table()["id"].to_pylist()) == [0, 1, 2, 4]


def test_what_the_jvm_writes_is_its_users_alone(spark: SparkSession, settings: Settings) -> None:
    path = settings.data_dir / "derived" / "t"
    spark.range(5).selectExpr("id", "id % 2 as p").write.format("delta").partitionBy("p").save(str(path))
    made = [path, *path.rglob("*")]
    assert len(made) > 5
    assert [each for each in made if each.stat().st_mode & 0o077] == []


def test_workers_run_this_python_with_this_package(spark: SparkSession) -> None:
    def look(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        import sys

        import millrace

        for _ in batches:
            yield pa.record_batch({"python": [sys.executable], "package": [millrace.__file__]})

    row = spark.range(1).mapInArrow(look, "python string, package string").collect()[0]
    assert (row["python"], row["package"]) == (sys.executable, millrace.__file__)


def test_times_are_utc_and_nothing_is_fetched_at_start(spark: SparkSession) -> None:
    assert spark.sql("SELECT CAST(timestamp_micros(0) AS STRING) AS t").collect()[0]["t"] == "1970-01-01 00:00:00"
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.jars.packages") is None
    assert len(conf.get("spark.jars").split(",")) == len(JARS)


def test_sizes_fit_the_cores(tmp_path: Path) -> None:
    conf = spark_configuration(Settings(data_dir=tmp_path, spark_cores=3))
    assert conf["spark.master"].startswith("local[3,")
    assert conf["spark.sql.shuffle.partitions"] == conf["spark.databricks.delta.snapshotPartitions"] == "3"
    assert conf["spark.speculation"] == "false"


def test_a_light_jvm_has_no_optimising_compiler_and_logs_as_any_other(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    options, light = (
        spark_configuration(settings, light_jvm=each)["spark.driver.extraJavaOptions"].split() for each in (False, True)
    )
    assert light[: len(options)] == options
    assert "-XX:TieredStopAtLevel=1" in set(light) - set(options)
