"""Z-order by columns of the users' choice, with delta-spark's own OPTIMIZE.

For tables that are read by other columns than the key. The columns are added to those the Delta log keeps bounds of, so
that readers skip files by them; files that the flusher writes later have no such bounds until they were ordered, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from deltalake import CommitProperties, DeltaTable
from pyspark.sql import SparkSession

from millrace.errors import InvalidArgument
from millrace.tables.delta_log import commit_lease

STATS: Final = "delta.dataSkippingStatsColumns"


def check_columns(table: DeltaTable, columns: Sequence[str]) -> None:
    """Raises InvalidArgument for a column that the table does not have, or cannot be ordered by."""
    have = {field.name: str(field.type) for field in table.schema().fields}
    wrong = [name for name in columns if name not in have or name.startswith("_")]
    if wrong:
        fields = ", ".join(name for name in have if not name.startswith("_"))
        raise InvalidArgument(f"zorder_by: {', '.join(wrong)} is no field of the collection; its fields are {fields}")


def zorder(spark: SparkSession, table: DeltaTable, path: Path, columns: Sequence[str]) -> None:
    """Order the whole table. Appends go on meanwhile; a commit that removes the same files makes Spark's fail, not theirs."""
    check_columns(table, columns)
    names = ", ".join("`" + name.replace("`", "``") + "`" for name in columns)
    with commit_lease(path):  # Spark knows nothing of the lease: it is held for it
        table.update_incremental()
        stats = [each for each in table.metadata().configuration.get(STATS, "").split(",") if each]
        lacking = [name for name in columns if name not in stats]
        if lacking:
            table.alter.set_table_properties(
                {STATS: ",".join([*stats, *lacking])}, commit_properties=CommitProperties(max_commit_retries=0)
            )
        spark.sql(f"OPTIMIZE delta.`{path}` ZORDER BY ({names})").collect()
