"""Whether rows of some columns can fit a collection at all, asked before there are any."""

from __future__ import annotations

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import conform
from millrace.flows.sinks.collection.changes import KIND
from millrace.wal.visible.changes import CHANGE_COLUMNS


def require_fit(schema: pa.Schema, collection: CollectionInfo, *, changes: bool) -> None:
    """Raises InvalidArgument for a column that is missing, unknown, or of a type that does not become the field's."""
    if changes and KIND not in schema.names:
        raise InvalidArgument(f"the rows have no column {KIND!r}: it says insert, upsert, delete or retract of each")
    plain = [each.with_nullable(True) for each in schema if each.name not in CHANGE_COLUMNS.names]
    if not plain:
        raise InvalidArgument(f"the rows have none of the columns of {collection.name!r}")
    conform(pa.schema(plain).empty_table(), collection)
