"""The two Delta tables of a collection: its rows, and its deletes, appended to and never rewritten by the flusher.

``collections/<id>``: the fields of the collection's schema, then what places a row. ``deletes/<id>``: the key and what
places the delete. Both are partitioned by ``_date`` (of the visible tick) and kept to what delta-rs and delta-spark both
read and append to (reader 1, writer 2). Creation and alteration are idempotent: whoever comes second finds it done.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, Field, Schema
from deltalake.exceptions import CommitFailedError

from millrace.errors import ChannelParked
from millrace.message.ids import tick_physical_ms
from millrace.message.schema import CollectionSchema
from millrace.settings import Settings
from millrace.tables.delta_files import create_table
from millrace.tables.delta_log import commit_lease

DATE: Final = "_date"
PARTITION_BY: Final = (DATE,)

ROW_COLUMNS: Final = pa.schema(
    [
        pa.field("_partition", pa.utf8()),  # the partition's name
        pa.field("_partition_id", pa.int64()),
        pa.field("_vchannel", pa.utf8()),
        pa.field("_segment_id", pa.int64()),
        pa.field("_time_tick", pa.int64()),  # from which on the row is visible
        pa.field("_write_tick", pa.int64()),  # the message's own: the order inside a transaction
    ]
)
"""What stands beside a collection's fields in its rows table (and ``_date``)."""

DELETE_COLUMNS: Final = pa.schema(
    [
        pa.field("_partition_id", pa.int64()),  # 0: all partitions
        pa.field("_vchannel", pa.utf8()),
        pa.field("_time_tick", pa.int64()),
        pa.field("_write_tick", pa.int64()),
    ]
)
"""What stands beside the key in the deletes table (and ``_date``)."""

STATS_COLUMNS: Final = ("_time_tick", "_write_tick")
"""Columns with statistics in the Delta log, beside the primary key."""

BASE_TICK: Final = "millrace.baseTick"
"""Table property: deletes up to this tick are folded into the rows, so that no earlier tick can be read any more."""

REWRITES: Final = "millrace/rewrites"
"""App id that each commit moves by one which replaces or removes files of a table: of two rewriters, the second is fenced."""

FOLDED: Final = "millrace/folded"
"""App id of the rows table; its version is the tick up to which no row is left that a delete or a drop hides: deletes up to
it may be gone from the deletes table. Whoever adds rows at or below it again must leave out those that are dead there."""


def base_tick(rows: DeltaTable | None) -> int:
    """The least tick that the rows table, at the version of `rows`, can be read at (BASE_TICK); 0 without a table."""
    return 0 if rows is None else int(rows.metadata().configuration.get(BASE_TICK) or 0)


def rows_path(settings: Settings, collection_id: int) -> Path:
    """The table with a collection's rows."""
    return settings.collections_path(collection_id)


def deletes_path(settings: Settings, collection_id: int) -> Path:
    """The table with a collection's deletes."""
    return settings.deletes_path(collection_id)


def file_schema(schema: CollectionSchema) -> pa.Schema:
    """Columns of the rows table's files."""
    return pa.schema([*schema.arrow(), *ROW_COLUMNS])


def delete_file_schema(schema: CollectionSchema) -> pa.Schema:
    """Columns of the deletes table's files."""
    return pa.schema([*schema.key_arrow(), *DELETE_COLUMNS])


def tick_date(tick: int) -> date:
    """The UTC day of a time tick: the value of ``_date``."""
    return datetime.fromtimestamp(tick_physical_ms(tick) / 1000, UTC).date()


def ensure_rows_table(path: Path, schema: CollectionSchema) -> DeltaTable:
    """The rows table, with every field of `schema`: created, or given the fields it lacks."""
    wanted = pa.schema([*file_schema(schema), pa.field(DATE, pa.date32())])
    table = create_table(path, wanted, partition_by=PARTITION_BY, configuration=_configuration(schema))
    add_fields(table, wanted)
    return table


def ensure_deletes_table(path: Path, schema: CollectionSchema) -> DeltaTable:
    """The deletes table; a schema change never touches it, for the key stays what it is."""
    wanted = pa.schema([*delete_file_schema(schema), pa.field(DATE, pa.date32())])
    return create_table(path, wanted, partition_by=PARTITION_BY, configuration=_configuration(schema))


def add_fields(table: DeltaTable, wanted: pa.Schema) -> None:
    """Give the table the columns of `wanted` that it lacks (all of them nullable: a schema change adds no others). `table` is then at the version that has them.

    Raises ChannelParked where a column is there with another type: a collection of the same id was made before.
    """
    path = Path(table.table_uri.removeprefix("file://"))
    with commit_lease(path):
        table.update_incremental()
        _add_fields(table, wanted)


def fields_lacking(table: DeltaTable, wanted: pa.Schema) -> list[Field]:
    """The columns of `wanted` that `table`, at the version of the handle, does not have.

    Raises ChannelParked where a column is there with another type: a collection of the same id was made before.
    """
    lacking = []
    have = {field.name: field.type for field in table.schema().fields}
    for field in Schema.from_arrow(wanted).fields:
        if field.name not in have:
            lacking.append(field)
        elif have[field.name] != field.type:
            raise ChannelParked(
                f"{table.table_uri} has {field.name} as {have[field.name]}, the collection wants {field.type}: "
                "a dropped collection of the same id had another schema; create it under a new id"
            )
    return lacking


def _add_fields(table: DeltaTable, wanted: pa.Schema) -> None:
    while True:
        lacking = fields_lacking(table, wanted)
        if not lacking:
            return
        try:
            table.alter.add_columns(lacking)
        except CommitFailedError:
            table.update_incremental()  # another writer was in between: look again what is lacking
            continue
        table.update_incremental()


def _configuration(schema: CollectionSchema) -> dict[str, str]:
    return {"delta.dataSkippingStatsColumns": ",".join((schema.primary_key, *STATS_COLUMNS))}
