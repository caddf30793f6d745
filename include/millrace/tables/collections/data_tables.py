"""The two Delta tables of a collection: its rows and its deletes. The flusher appends to them, and joins small files.

``tables/<id>/_rows``: the fields of the collection's schema, then the columns that locate a row. ``deletes/<id>``: the
key and the columns that locate the delete. Both are partitioned by ``_date`` (of the visible tick). They are limited to
what delta-rs and delta-spark both read and append to: reader 1, writer 2; with a timestamp_ntz reader 3, writer 7 and
that one feature. Creation and alteration are idempotent. Where the tables lie: millrace.tables.collections.layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from millrace.base.errors import ChannelParked
from millrace.base.settings import Settings
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import key_columns
from millrace.storage.commit import add_columns, has_timestamp_ntz
from millrace.storage.table import TableHandle, create_table, table_exists
from millrace.tables.collections.layout import published_name, rows_name
from millrace.wal.visible.collection_rows import deletes_file_schema, rows_table_schema

DATE: Final = "_date"
PARTITION_BY: Final = (DATE,)

TICK: Final = "_time_tick"
STATS_COLUMNS: Final = (TICK, "_write_tick")
"""Columns with statistics in the Delta log, in addition to the primary key.

The published table's log has those of the users' fields, too, from the files' footers
(millrace.storage.parquet_file.file_statistics).
"""

BASE_TICK_PROPERTY: Final = "millrace.baseTick"
"""Table property: deletes up to this tick are folded into the rows, so earlier ticks can no longer be read."""

REWRITES_APP: Final = "millrace/rewrites"
"""App id that every commit which changes rows by replacing or removing files increments: a second rewriter is fenced.
Folds of small files keep every row and do not increment it."""

FOLDED_APP: Final = "millrace/folded"
"""App id of the rows table. Its version is the tick up to which no row is left that a delete or a drop hides.

Deletes up to that tick may be gone from the deletes table. A writer that adds rows at or below it again must leave out
those that are dead there.
"""


def earliest_readable_tick(rows: TableHandle | None) -> int:
    """Return the earliest tick that can be read at the version of `rows` (BASE_TICK_PROPERTY); 0 without a table."""
    return 0 if rows is None else int(rows.configuration.get(BASE_TICK_PROPERTY) or 0)


def rows_uri(settings: Settings, collection_id: int) -> str:
    """Return the URI of the table with a collection's rows. Moves the tables of an earlier layout first."""
    return settings.table_uri(rows_name(settings, collection_id))


def deletes_uri(settings: Settings, collection_id: int) -> str:
    """Return the URI of the table with a collection's deletes."""
    return settings.deletes_uri(collection_id)


def find_published(settings: Settings, collection_id: int) -> str | None:
    """Return the URI of the published table of a collection, or None if there is none yet."""
    uri = published_uri(settings, collection_id)
    return uri if table_exists(uri) else None


def stats_columns(schema: CollectionSchema) -> tuple[str, ...]:
    """Return the columns with statistics in the Delta log: the primary key, then STATS_COLUMNS."""
    return (*key_columns(schema), *STATS_COLUMNS)


def published_uri(settings: Settings, collection_id: int) -> str:
    """Return the URI of the published table of a collection.

    Raises StoreCannotPublish if the rows tables of an earlier layout could not be moved.
    """
    return settings.table_uri(published_name(settings, collection_id))


def ensure_rows_table(uri: object, schema: CollectionSchema) -> TableHandle:
    """Open the rows table with every field of `schema`, creating it or adding columns if needed."""
    return _ensure(uri, rows_table_schema(schema), schema)


def ensure_deletes_table(uri: object, schema: CollectionSchema) -> TableHandle:
    """Open the deletes table, creating it if needed. A schema change never alters it, since the key does not change."""
    return _ensure(uri, deletes_file_schema(schema), schema)


def _ensure(uri: object, columns: pa.Schema, schema: CollectionSchema) -> TableHandle:
    wanted = pa.schema([*columns, pa.field(DATE, pa.date32())])
    first = pa.schema([field for field in wanted if not has_timestamp_ntz(field.type)])
    table = create_table(uri, first, partition_by=PARTITION_BY, configuration=_configuration(schema))
    ensure_columns(table, wanted)
    return table


def ensure_columns(table: TableHandle, wanted: pa.Schema) -> None:
    """Add the columns of `wanted` that the table lacks, all nullable, and make columns nullable where `wanted` does.

    `table` is then at the version that has them. Raises ChannelParked if a column exists with another type, because a
    collection of the same id existed before.
    """
    add_columns(table, wanted, refuse=lambda differing: _refuse(table, differing))


def check_column_types(table: TableHandle, wanted: pa.Schema) -> None:
    """Raise ChannelParked if the table, at the handle's version, has a column of `wanted` with another type."""
    _, differing = table.missing_columns(wanted)
    if differing:
        _refuse(table, differing)


def _refuse(table: TableHandle, differing: Mapping[str, tuple[str, str]]) -> None:
    name, (have, want) = next(iter(differing.items()))
    raise ChannelParked(
        f"{table.uri} has the column {name} as {have}, but the collection needs {want}: "
        "a dropped collection of the same id had another schema; create the collection under a new id"
    )


def _configuration(schema: CollectionSchema) -> dict[str, str]:
    return {"delta.dataSkippingStatsColumns": ",".join(stats_columns(schema))}
