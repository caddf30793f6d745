"""Columns beside a collection's fields, in its tables' files and in reads of the tail."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Final

import pyarrow as pa

from millrace.message.ids import tick_physical_ms
from millrace.message.schema import CollectionSchema
from millrace.message.stored_columns import all_columns, key_schema, needed_columns, written_columns

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
"""Columns beside the fields in the rows table (and ``_date``)."""

DELETE_COLUMNS: Final = pa.schema(
    [
        pa.field("_partition_id", pa.int64()),  # 0: all partitions
        pa.field("_vchannel", pa.utf8()),
        pa.field("_time_tick", pa.int64()),
        pa.field("_write_tick", pa.int64()),
    ]
)
"""Columns beside the key in the deletes table (and ``_date``)."""


def rows_file_schema(schema: CollectionSchema) -> pa.Schema:
    """Return the columns of rows-table files to which rows of this schema are written, in the order of its fields."""
    return pa.schema([*written_columns(schema), *ROW_COLUMNS])


def rows_read_schema(schema: CollectionSchema) -> pa.Schema:
    """Return the rows-table columns from which rows of this and earlier schemas are read."""
    return pa.schema([*needed_columns(schema), *ROW_COLUMNS])


def rows_table_schema(schema: CollectionSchema) -> pa.Schema:
    """Return all columns of the rows table, including those that no field uses any more."""
    return pa.schema([*all_columns(schema), *ROW_COLUMNS])


def deletes_file_schema(schema: CollectionSchema) -> pa.Schema:
    """Return the columns of the deletes table's files."""
    return pa.schema([*key_schema(schema), *DELETE_COLUMNS])


def tick_date(tick: int) -> date:
    """Return the UTC day of a time tick: the value of ``_date``."""
    return datetime.fromtimestamp(tick_physical_ms(tick) / 1000, UTC).date()
