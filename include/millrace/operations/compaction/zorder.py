"""Z-order by columns of the users' choice, with delta-spark's own OPTIMIZE.

For tables that are read by other columns than the key. The columns are added to those the Delta log keeps bounds of, so
that readers skip files by them; files that the flusher writes later have no such bounds until they were ordered, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pyspark.sql import SparkSession

from millrace.base.errors import InvalidArgument
from millrace.storage.commit import set_properties
from millrace.storage.table import Table

STATS: Final = "delta.dataSkippingStatsColumns"


def check_columns(table: Table, columns: Sequence[str]) -> None:
    """Raises InvalidArgument for a column that the table does not have, or cannot be ordered by."""
    have = table.columns
    wrong = [name for name in columns if name not in have or name.startswith("_")]
    if wrong:
        fields = ", ".join(name for name in have if not name.startswith("_"))
        raise InvalidArgument(f"zorder_by: {', '.join(wrong)} is no field of the collection; its fields are {fields}")


def zorder(spark: SparkSession, table: Table, columns: Sequence[str]) -> None:
    """Order the whole table. Appends go on meanwhile; a commit that removes the same files makes Spark's fail, not theirs."""
    check_columns(table, columns)
    names = ", ".join("`" + name.replace("`", "``") + "`" for name in columns)

    def kept(properties: Mapping[str, str]) -> dict[str, str]:
        stats = [each for each in properties.get(STATS, "").split(",") if each]
        lacking = [name for name in columns if name not in stats]
        return {STATS: ",".join([*stats, *lacking])} if lacking else {}

    set_properties(table, kept)
    with table.store.lease():  # Spark knows nothing of the lease: it is held for it
        spark.sql(f"OPTIMIZE delta.`{table.store.spark_uri}` ZORDER BY ({names})").collect()
