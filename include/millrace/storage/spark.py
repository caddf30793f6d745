"""Tables in Spark, by the store's own URI and options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millrace.storage.store import TableStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession


def spark_frame(spark: SparkSession, store: TableStore, version: int) -> DataFrame:
    """Return the rows of a table at `version` as a DataFrame."""
    reader = spark.read.format("delta").options(**store.spark_options).option("versionAsOf", version)
    return reader.load(store.spark_uri)


def spark_zorder(spark: SparkSession, store: TableStore, columns: Sequence[str]) -> None:
    """Order the whole table by columns. Hold the table's lease: Spark does not know it."""
    from delta.tables import DeltaTable

    quoted = ("`" + name.replace("`", "``") + "`" for name in columns)  # Spark parses names
    DeltaTable.forPath(spark, store.spark_uri, dict(store.spark_options)).optimize().executeZOrderBy(*quoted)


def spark_save(writer: DataFrameWriter, store: TableStore) -> None:
    """Save the output of a configured writer to a table."""
    writer.format("delta").options(**store.spark_options).save(store.spark_uri)
