"""The two Delta tables of a collection: its rows, and its deletes, appended to and never rewritten by the flusher.

``collections/<id>``: the fields of the collection's schema, then what places a row. ``deletes/<id>``: the key and what
places the delete. Both are partitioned by ``_date`` (of the visible tick) and kept to what delta-rs and delta-spark both
read and append to (reader 1, writer 2; with a timestamp_ntz reader 3, writer 7 and that one feature). Creation and alteration are idempotent: whoever comes second finds it done.
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
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, create_table
from millrace.wal.visible.columns import deletes_file_schema, rows_table_schema

DATE: Final = "_date"
PARTITION_BY: Final = (DATE,)

STATS_COLUMNS: Final = ("_time_tick", "_write_tick")
"""Columns with statistics in the Delta log, beside the primary key."""

BASE_TICK_PROPERTY: Final = "millrace.baseTick"
"""Table property: deletes up to this tick are folded into the rows, so that no earlier tick can be read any more."""

REWRITES_APP: Final = "millrace/rewrites"
"""App id that each commit moves by one which replaces or removes files of a table: of two rewriters, the second is fenced."""

FOLDED_APP: Final = "millrace/folded"
"""App id of the rows table; its version is the tick up to which no row is left that a delete or a drop hides: deletes up to
it may be gone from the deletes table. Whoever adds rows at or below it again must leave out those that are dead there."""


def earliest_readable_tick(rows: TableHandle | None) -> int:
    """The least tick that the rows table, at the version of `rows`, can be read at (BASE_TICK); 0 without a table."""
    return 0 if rows is None else int(rows.configuration.get(BASE_TICK_PROPERTY) or 0)


def rows_uri(settings: Settings, collection_id: int) -> str:
    """The table with a collection's rows."""
    return settings.collections_uri(collection_id)


def deletes_uri(settings: Settings, collection_id: int) -> str:
    """The table with a collection's deletes."""
    return settings.deletes_uri(collection_id)


def stats_columns(schema: CollectionSchema) -> tuple[str, ...]:
    """Columns with statistics in the Delta log: those of the primary key, then STATS_COLUMNS."""
    return (*key_columns(schema), *STATS_COLUMNS)


def stored_collection_ids(settings: Settings, kind: str) -> list[int]:
    """Ids of the collections that have a table with rows (`kind`: ``collections``), or one with ``deletes``."""
    return sorted(int(name) for name in store_at(settings.table_uri(kind)).folders() if name.isdecimal())


def ensure_rows_table(uri: object, schema: CollectionSchema) -> TableHandle:
    """The rows table, with every field of `schema`: created, or given the fields it lacks."""
    return _ensure(uri, rows_table_schema(schema), schema)


def ensure_deletes_table(uri: object, schema: CollectionSchema) -> TableHandle:
    """The deletes table; a schema change never touches it, for the key stays what it is."""
    return _ensure(uri, deletes_file_schema(schema), schema)


def _ensure(uri: object, columns: pa.Schema, schema: CollectionSchema) -> TableHandle:
    wanted = pa.schema([*columns, pa.field(DATE, pa.date32())])
    first = pa.schema([field for field in wanted if not has_timestamp_ntz(field.type)])
    table = create_table(uri, first, partition_by=PARTITION_BY, configuration=_configuration(schema))
    ensure_columns(table, wanted)
    return table


def ensure_columns(table: TableHandle, wanted: pa.Schema) -> None:
    """Give the table the columns of `wanted` that it lacks (all of them nullable: a schema change adds no others), and let those
    be null that may be. `table` is then at the version that has them.

    Raises ChannelParked where a column is there with another type: a collection of the same id was made before.
    """
    add_columns(table, wanted, refuse=lambda differing: _refuse(table, differing))


def check_column_types(table: TableHandle, wanted: pa.Schema) -> None:
    """Raises ChannelParked where the table, at the version of the handle, has a column of `wanted` with another type."""
    _, differing = table.missing_columns(wanted)
    if differing:
        _refuse(table, differing)


def _refuse(table: TableHandle, differing: Mapping[str, tuple[str, str]]) -> None:
    name, (have, want) = next(iter(differing.items()))
    raise ChannelParked(
        f"{table.uri} has {name} as {have}, the collection wants {want}: "
        "a dropped collection of the same id had another schema; create it under a new id"
    )


def _configuration(schema: CollectionSchema) -> dict[str, str]:
    return {"delta.dataSkippingStatsColumns": ",".join(stats_columns(schema))}
