"""Tables as Spark opens them: by the store's own address and options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.storage.store import TableStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def spark_frame(spark: SparkSession, store: TableStore, version: int) -> DataFrame:
    """The rows of a table at `version`, whatever is committed meanwhile."""
    reader = spark.read.format("delta").options(**store.options).option("versionAsOf", version)
    return reader.load(store.spark_uri)
