"""A collection's visible rows in a range, as the flusher stored them: the input of the suite derived from its schema.

Deletes up to the end of the range are applied. A delete hits only earlier rows, so the rows of a range need only the
deletes of that range. The cost is that of the range, not of the collection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F

from millrace.base.settings import Settings
from millrace.message.ids import pchannel_of
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import key_columns
from millrace.operations.quality import suites
from millrace.operations.quality.checks import Check
from millrace.operations.quality.frames import ValidationInput, in_ranges
from millrace.operations.quality.ranges import Ranges
from millrace.storage.spark import spark_frame
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.data_tables import (
    DATE,
    FOLDED_APP,
    TICK,
    deletes_uri,
    earliest_readable_tick,
    rows_uri,
)
from millrace.tables.collections.flush_tables import Checkpoint
from millrace.tables.read.spark import field_columns, without_deleted
from millrace.tables.wal.reader import MAX_TICK
from millrace.wal.visible.catalog import VChannelInfo, newest_schema
from millrace.wal.visible.collection_rows import ROW_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

SYSTEM_COLUMNS: Final = (*ROW_COLUMNS.names, DATE)
"""Columns that a user's suite may name besides the collection's fields."""

_UNSAFE: Final = re.compile(r"[.`]")


@dataclass(frozen=True, slots=True)
class StoredCollection:
    """A collection according to the checkpoints, and the versions of its tables."""

    collection_id: int
    name: str
    schema: CollectionSchema
    vchannels: Mapping[str, VChannelInfo]
    rows_version: int
    deletes_version: int | None
    folded_tick: int
    """Deletes up to this tick are folded into the rows."""
    flushed_ticks: Mapping[str, int]
    """For each VChannel, the tick up to which the tables have rows and deletes. Briefly later than the checkpoint's."""

    @property
    def pchannels(self) -> dict[str, str]:
        """VChannel to PChannel."""
        return {name: pchannel_of(name) for name in self.vchannels}


def known_collections(checkpoints: Mapping[str, Checkpoint]) -> dict[int, dict[str, VChannelInfo]]:
    """Return the VChannels of each collection that the checkpoints know and that is not dropped."""
    known: dict[int, dict[str, VChannelInfo]] = {}
    for checkpoint in checkpoints.values():
        for name, info in checkpoint.catalog.vchannels.items():
            known.setdefault(info.collection_id, {})[name] = info
    return {
        number: infos
        for number, infos in sorted(known.items())
        if not any(info.dropped_tick for info in infos.values())
    }


def pin_collection(settings: Settings, number: int, infos: Mapping[str, VChannelInfo]) -> StoredCollection | None:
    """Pin the versions of a collection's tables now. None if it has no rows table.

    Pins the deletes table before the rows table: compaction removes a delete after the rows that it hit.
    """
    deletes = open_table(deletes_uri(settings, number))
    rows = open_table(rows_uri(settings, number))
    if rows is None:
        return None
    return StoredCollection(
        collection_id=number,
        name=next(iter(infos.values())).name,
        schema=newest_schema(infos.values()),
        vchannels=infos,
        rows_version=rows.version,
        deletes_version=None if deletes is None else deletes.version,
        folded_tick=max(earliest_readable_tick(rows), rows.app_version(FOLDED_APP) or 0),
        flushed_ticks={name: max(_tick(rows, name), _tick(deletes, name)) for name in infos},
    )


def _tick(table: TableHandle | None, vchannel: str) -> int:
    return 0 if table is None else table.app_version(vchannel) or 0


def safe_name(name: str) -> str:
    """Return a field's name as a column that Spark's column expressions accept without quotes."""
    return _UNSAFE.sub("_", name)


def collection_checks(stored: StoredCollection) -> tuple[Check, ...]:
    """Return the suite that follows from the collection's schema, with names that Spark's expressions accept."""
    fields = tuple(replace(field, name=safe_name(field.name), columns=()) for field in stored.schema.fields)
    partitions = sorted({number for info in stored.vchannels.values() for number in info.partitions})
    schema = CollectionSchema(fields, tuple(map(safe_name, stored.schema.key_names)))
    return suites.collection_suite(schema, partitions)


def visible_rows(
    spark: SparkSession, settings: Settings, stored: StoredCollection, ranges: Ranges, users: tuple[Check, ...] = ()
) -> ValidationInput:
    """Return the rows that became visible in the range and are visible at its end, with the checks to run on them."""
    chosen = _in_range(stored, ranges)
    rows = spark_frame(spark, store_at(rows_uri(settings, stored.collection_id)), stored.rows_version).where(chosen)
    for name, info in stored.vchannels.items():
        # Drop rows of an earlier collection with the same id, and rows replaced by an Import.
        rows = rows.where((F.col("_vchannel") != name) | (F.col("_time_tick") >= info.first_visible_tick(MAX_TICK)))
        for number, ticks in info.partition_drops.items():
            hidden = (F.col("_vchannel") == name) & (F.col("_partition_id") == number)
            rows = rows.where(~(hidden & (F.col("_time_tick") < max(ticks))))
    if stored.deletes_version is not None:
        deletes = spark_frame(spark, store_at(deletes_uri(settings, stored.collection_id)), stored.deletes_version)
        rows = without_deleted(rows, deletes.where(chosen), key_columns(stored.schema))
    rows = rows.select(*field_columns(stored.schema), *SYSTEM_COLUMNS)
    rows = rows.withColumn("write_lag_ticks", F.col("_time_tick") - F.col("_write_tick"))
    for field in stored.schema.fields:
        if safe_name(field.name) != field.name:
            rows = rows.withColumnRenamed(field.name, safe_name(field.name))
    checks = (*collection_checks(stored), *users)
    row_id = (*(safe_name(name) for name in stored.schema.key_names), "_vchannel", "_write_tick")
    return ValidationInput(f"collections/{stored.collection_id}", rows, checks, ranges, row_id, stored.collection_id)


def may_have_rows(settings: Settings, stored: StoredCollection, ranges: Ranges) -> bool:
    """Return whether a file may hold rows of the ranges. Reads the Delta log only."""
    table = open_table(rows_uri(settings, stored.collection_id), version=stored.rows_version)
    if table is None:
        return True
    least, most = _bounds(ranges)
    return any(
        each.low[TICK] is None or each.high[TICK] is None or (each.high[TICK] > least and each.low[TICK] <= most)
        for each in table.describe_files((TICK,))
    )


def _bounds(ranges: Ranges) -> tuple[int, int]:
    """Return the ticks (after, up to] that span all ranges."""
    return min((each.after for each in ranges.values()), default=0), max(
        (each.up_to for each in ranges.values()), default=0
    )


def _in_range(stored: StoredCollection, ranges: Ranges) -> Column:
    """Select rows by the tick range of their PChannel.

    The overall bounds are separate predicates, so that Spark can prune files by them.
    """
    key = F.coalesce(*(F.when(F.col("_vchannel") == name, F.lit(home)) for name, home in stored.pchannels.items()))
    least, most = _bounds(ranges)
    tick = F.col("_time_tick")
    return (tick > least) & (tick <= most) & in_ranges(ranges, key=key, tick="_time_tick")
