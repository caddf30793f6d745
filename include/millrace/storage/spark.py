"""Tables in Spark, by the store's own URI and options. On an object store, Spark reads tables and never writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from millrace.base.errors import InvalidArgument, InvalidSettings
from millrace.storage.store import OBJECT_STORES, TableStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_TABLE_NAME: Final = re.compile(r"\w+", re.ASCII)
"""Names of tables that Spark's session catalog allows."""


def spark_frame(spark: SparkSession, store: TableStore, version: int) -> DataFrame:
    """Return the rows of a table at `version` as a DataFrame."""
    reader = spark.read.format("delta").options(**store.spark_options).option("versionAsOf", version)
    return reader.load(store.spark_uri)


def spark_zorder(spark: SparkSession, store: TableStore, columns: Sequence[str]) -> None:
    """Order the whole table by columns. Hold the table's lease: Spark does not know it.

    Raises InvalidSettings on an object store.
    """
    require_spark_writer(store)
    from delta.tables import DeltaTable

    quoted = ("`" + name.replace("`", "``") + "`" for name in columns)  # Spark parses names
    DeltaTable.forPath(spark, store.spark_uri, dict(store.spark_options)).optimize().executeZOrderBy(*quoted)


def spark_writes(store: TableStore) -> bool:
    """Return whether Spark may write there: on an object store its commits could overwrite another writer's."""
    return store.uri.partition("://")[0] not in OBJECT_STORES


def require_spark_writer(store: TableStore) -> None:
    """Raise InvalidSettings unless Spark may write there."""
    if not spark_writes(store):
        raise InvalidSettings(
            f"Spark does not write {store.uri}: its Delta commits to an object store without a condition, so that of"
            " two drivers both would win. Only Millrace's own committer writes tables there; Spark reads them"
        )


def spark_register(spark: SparkSession, database: str, stores: Mapping[str, TableStore]) -> list[str]:
    """Create an external table in the session's catalog for each store, by name. Returns the tables' full names.

    A table that was registered before is replaced: its collection may have been created again elsewhere. Names that
    Spark does not allow are left out.
    Raises InvalidArgument if a table of that name is not one of external files.
    """
    spark.sql(f"CREATE DATABASE IF NOT EXISTS `{database}`")
    made = []
    for name, store in stores.items():
        if _TABLE_NAME.fullmatch(name) is None:
            continue
        full = f"`{database}`.`{name}`"
        if spark.catalog.tableExists(full):
            kind = spark.catalog.getTable(full).tableType
            if kind != "EXTERNAL":
                raise InvalidArgument(
                    f"{database}.{name} is a table of type {kind}: register the collection in another database"
                )
            spark.sql(f"DROP TABLE {full}")
        options = ", ".join(f"{_text(key)} {_text(value)}" for key, value in store.spark_options.items())
        options = f"OPTIONS ({options})" if options else ""
        spark.sql(f"CREATE TABLE {full} USING delta {options} LOCATION {_text(store.spark_uri)}")
        made.append(f"{database}.{name}")
    return made


def _text(value: str) -> str:
    """Return a string literal of Spark's SQL."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
