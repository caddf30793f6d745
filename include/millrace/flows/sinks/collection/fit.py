"""A check whether rows with some columns can fit a collection, before there are any rows."""

from __future__ import annotations

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import conform
from millrace.flows.sinks.collection.changes import KIND
from millrace.wal.visible.changes import CHANGE_COLUMNS


def require_fit(schema: pa.Schema, collection: CollectionInfo, *, changes: bool) -> None:
    """Raise InvalidArgument if a column is missing, unknown, or of a type that cannot become the field's."""
    if changes and KIND not in schema.names:
        raise InvalidArgument(f"the rows have no column {KIND!r}: it must be insert, upsert, delete or retract")
    plain = [each.with_nullable(True) for each in schema if each.name not in CHANGE_COLUMNS.names]
    if not plain:
        raise InvalidArgument(f"the rows have none of the columns of {collection.name!r}")
    conform(pa.schema(plain).empty_table(), collection)
