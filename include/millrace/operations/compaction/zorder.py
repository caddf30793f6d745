"""Z-order by columns of the users' choice, with delta-spark's own OPTIMIZE.

For tables that are read by other columns than the key. The columns are added to those the Delta log keeps bounds of, so
that readers skip files by them; files that the flusher writes later have no such bounds until they were ordered, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import SparkSession

from millrace.base.errors import InvalidArgument
from millrace.message.schema import CollectionSchema
from millrace.storage.commit import set_properties
from millrace.storage.spark import spark_zorder
from millrace.storage.table import TableHandle

STATS: Final = "delta.dataSkippingStatsColumns"


def zorder_columns(table: TableHandle, schema: CollectionSchema, names: Sequence[str]) -> list[str]:
    """The columns that fields stand in, the newest of each. Raises InvalidArgument for what is no field of the table's rows."""
    have = set(table.columns)
    found = {
        field.name: field.stored_columns[-1].name for field in schema.fields if field.stored_columns[-1].name in have
    }
    wrong = [name for name in names if name not in found]
    if wrong:
        raise InvalidArgument(
            f"zorder_by: {', '.join(wrong)} is no field of the collection; its fields are {', '.join(found)}"
        )
    return [found[name] for name in names]


def zorder(spark: SparkSession, table: TableHandle, schema: CollectionSchema, fields: Sequence[str]) -> None:
    """Order the whole table. Appends go on meanwhile; a commit that removes the same files makes Spark's fail, not theirs."""
    columns = zorder_columns(table, schema, fields)

    def kept(properties: Mapping[str, str]) -> dict[str, str]:
        stats = [each for each in properties.get(STATS, "").split(",") if each]
        lacking = [name for name in columns if name not in stats]
        return {STATS: ",".join([*stats, *lacking])} if lacking else {}

    set_properties(table, kept)
    with table.store.lease():  # Spark knows nothing of the lease: it is held for it
        spark_zorder(spark, table.store, columns)
