"""Z-orders by columns of the user's choice: with delta-spark's OPTIMIZE, on an object store with delta-rs'.

Useful for tables that are read by columns other than the key. The columns are added to those that have bounds in the
Delta log, so that readers skip files by them. Files that the flusher writes later have no such bounds until they are
ordered too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import SparkSession

from millrace.base.errors import InvalidArgument
from millrace.message.schema import CollectionSchema
from millrace.storage.commit import set_properties
from millrace.storage.spark import spark_writes, spark_zorder
from millrace.storage.table import TableHandle

STATS: Final = "delta.dataSkippingStatsColumns"


def zorder_columns(table: TableHandle, schema: CollectionSchema, names: Sequence[str]) -> list[str]:
    """Return the columns that store the fields, the newest of each.

    Raises InvalidArgument if a name is not a field of the table's rows.
    """
    have = set(table.columns)
    found = {
        field.name: field.stored_columns[-1].name for field in schema.fields if field.stored_columns[-1].name in have
    }
    wrong = [name for name in names if name not in found]
    if wrong:
        raise InvalidArgument(
            f"zorder_by: {', '.join(wrong)} is not a field of the collection; its fields are {', '.join(found)}"
        )
    return [found[name] for name in names]


def zorder(spark: SparkSession, table: TableHandle, schema: CollectionSchema, fields: Sequence[str]) -> None:
    """Z-order the whole table.

    Appends continue meanwhile. A concurrent commit that removes the same files makes Spark's commit fail, not the
    other.
    """
    columns = zorder_columns(table, schema, fields)

    def with_stats(properties: Mapping[str, str]) -> dict[str, str]:
        stats = [each for each in properties.get(STATS, "").split(",") if each]
        lacking = [name for name in columns if name not in stats]
        return {STATS: ",".join([*stats, *lacking])} if lacking else {}

    set_properties(table, with_stats)
    if not spark_writes(table.store):
        table.zorder(columns)
        return
    with table.store.lease():  # Spark does not know the lease, so hold it for Spark
        spark_zorder(spark, table.store, columns)
