"""Tables as Spark opens them: by the store's own address and options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millrace.storage.store import TableStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession


def spark_frame(spark: SparkSession, store: TableStore, version: int) -> DataFrame:
    """The rows of a table at `version`, whatever is committed meanwhile."""
    reader = spark.read.format("delta").options(**store.spark_options).option("versionAsOf", version)
    return reader.load(store.spark_uri)


def spark_zorder(spark: SparkSession, store: TableStore, columns: Sequence[str]) -> None:
    """Order the whole table by columns. Spark knows nothing of the table's lease: hold it."""
    from delta.tables import DeltaTable

    quoted = ("`" + name.replace("`", "``") + "`" for name in columns)  # Spark parses what it is given as a name
    DeltaTable.forPath(spark, store.spark_uri, dict(store.spark_options)).optimize().executeZOrderBy(*quoted)


def spark_save(writer: DataFrameWriter, store: TableStore) -> None:
    """What a writer was told to write, into a table."""
    writer.format("delta").options(**store.spark_options).save(store.spark_uri)
