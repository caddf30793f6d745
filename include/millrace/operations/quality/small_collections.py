"""Small collections, many in one check: their rows are read here, and one frame of all of them goes to Spark.

A check of one collection costs Spark seconds, whatever the number of its rows. Collections whose suites are the same
are therefore checked together. Each expectation of such a suite judges a row by itself, except the unique key, which is
unique for each collection here. So if all rows together pass, each collection passes. If not, each is checked alone,
and the result names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.settings import Settings
from millrace.message.stored_columns import key_columns
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.collection_frames import StoredCollection, collection_checks, safe_name
from millrace.operations.quality.frames import ValidationInput
from millrace.operations.quality.ranges import Ranges, TickRange
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.data_tables import TICK, deletes_uri, rows_uri
from millrace.tables.collections.dead_rows import dead_mask, hidden_ranges_at
from millrace.tables.wal.reader import MAX_TICK
from millrace.wal.visible.collection_rows import align_to_schema, deletes_file_schema, rows_table_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SMALL_ROWS: Final = 20_000
"""Rows in the files of a range, and deletes, up to which a collection is small."""
BATCH_ROWS: Final = 200_000
"""Rows of one batch: memory, and what a failure makes Spark check again."""
BATCH_COLLECTIONS: Final = 500
COLLECTION: Final = "_collection_id"
"""Column of a batch that tells its collections apart."""

_FLAT: Final = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "float32", "float64", "string", "binary", "date", "timestamp"}
)
"""Types that Arrow and Spark read alike, with one stored column."""


@dataclass(frozen=True, slots=True)
class SmallCollection:
    """A collection with its visible rows of the range."""

    stored: StoredCollection
    ranges: Ranges
    rows: pa.Table
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Collections with one suite."""

    number: int
    members: tuple[SmallCollection, ...]

    def frame(self, spark: SparkSession) -> ValidationInput:
        """Return the rows of all of them as one input."""
        rows = pa.concat_tables(
            each.rows.append_column(COLLECTION, pa.repeat(pa.scalar(each.stored.collection_id), each.rows.num_rows))
            for each in self.members
        )
        first = self.members[0]
        checks = tuple(_within_a_collection(each) for each in first.checks)
        row_id = (COLLECTION, *(safe_name(name) for name in first.stored.schema.key_names))
        return ValidationInput(f"collections/batch-{self.number}", spark.createDataFrame(rows), checks, {}, row_id)

    def passed(self, whole: TableCheckResult) -> Iterator[TableCheckResult]:
        """Yield the result of each collection, given that all of them passed together."""
        for each in self.members:
            results = tuple(CheckResult(check, success=True, elements=each.rows.num_rows) for check in each.checks)
            yield TableCheckResult(
                f"collections/{each.stored.collection_id}",
                each.ranges,
                results,
                each.stored.collection_id,
                whole.seconds / len(self.members),
                each.rows.num_rows,
            )


def read_small(settings: Settings, stored: StoredCollection, ranges: Ranges) -> SmallCollection | None:
    """Read the visible rows of the ranges at the pinned versions; None if there are too many, or types need Spark."""
    if not all(each.type in _FLAT and len(each.stored_columns) == 1 for each in stored.schema.fields):
        return None
    number = stored.collection_id
    table = open_table(rows_uri(settings, number), version=stored.rows_version)
    deletes = None
    if stored.deletes_version is not None:
        deletes = open_table(deletes_uri(settings, number), version=stored.deletes_version)
    if table is None:
        return None
    files, delete_files = (_files(each, ranges) for each in (table, deletes))
    if files is None or delete_files is None:
        return None
    where = _in_ranges(stored, ranges)
    rows = align_to_schema(
        table.read_rows(files, rows_table_schema(stored.schema), where=where), rows_table_schema(stored.schema)
    )
    gone = deletes_file_schema(stored.schema).empty_table()
    if deletes is not None and delete_files:
        gone = deletes.read_rows(delete_files, deletes_file_schema(stored.schema), where=where)
    hidden = hidden_ranges_at(stored.vchannels, MAX_TICK)
    dead = dead_mask(rows, gone, key=key_columns(stored.schema), hidden=hidden)
    rows = rows.filter(pa.array(~dead))
    columns = {safe_name(each.name): rows[each.stored_columns[0].name] for each in stored.schema.fields}
    columns["_partition_id"] = rows["_partition_id"]
    columns["write_lag_ticks"] = pc.subtract(rows["_time_tick"], rows["_write_tick"])
    return SmallCollection(stored, ranges, pa.table(columns), collection_checks(stored))


def batches(found: Iterable[SmallCollection]) -> list[Batch]:
    """Put collections with the same suite and columns together."""
    groups: dict[str, list[list[SmallCollection]]] = {}
    for each in found:
        key = repr((each.rows.schema, each.checks))
        group = groups.setdefault(key, [[]])
        size = sum(member.rows.num_rows for member in group[-1])
        if group[-1] and (size + each.rows.num_rows > BATCH_ROWS or len(group[-1]) >= BATCH_COLLECTIONS):
            group.append([])
        group[-1].append(each)
    parts = [tuple(part) for group in groups.values() for part in group]
    return [Batch(number, part) for number, part in enumerate(parts)]


def _within_a_collection(check: Check) -> Check:
    """Return a check of one collection as it reads for many: a key is unique in its collection."""
    if not check.type.endswith("_to_be_unique"):
        return check
    keys: Sequence[str] = check.kwargs.get("column_list") or [check.kwargs["column"]]
    kwargs = {"column_list": [COLLECTION, *keys]}
    return replace(check, type="expect_compound_columns_to_be_unique", kwargs=kwargs)


def _files(table: TableHandle | None, ranges: Ranges) -> list[str] | None:
    """Return the files that may hold rows of the ranges, or None if they hold too many rows for a small collection."""
    least = min((each.after for each in ranges.values()), default=0)
    most = max((each.up_to for each in ranges.values()), default=0)
    found = [
        each
        for each in (table.describe_files((TICK,)) if table is not None else ())
        if not (
            (each.high[TICK] is not None and each.high[TICK] <= least)
            or (each.low[TICK] is not None and each.low[TICK] > most)
        )
    ]
    return [each.path for each in found] if sum(each.rows for each in found) <= SMALL_ROWS else None


def _in_ranges(stored: StoredCollection, ranges: Mapping[str, TickRange]) -> pc.Expression:
    """Select rows by the tick range of their VChannel's PChannel."""
    tick, chosen = pc.field("_time_tick"), pc.scalar(False)
    for vchannel, pchannel in stored.pchannels.items():
        found = ranges.get(pchannel)
        if found is not None and not found.empty:
            chosen |= (pc.field("_vchannel") == vchannel) & (tick > found.after) & (tick <= found.up_to)
    return chosen
