"""Spark reads every published version as a read at its tick, and finds a version by the time of its tick."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at
from tests.node.publish.published_maker import PublishedMaker, rows_in

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
