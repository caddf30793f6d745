"""Rows in the body of an insert or a delete: names, schema, timestamps, row ids, and the Arrow payload.

Any bytes give fully validated rows or Malformed. Schemas are cached.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.payload.rows import decode_rows, encode_rows
from millrace.message.schema import MAX_FIELDS, FieldSpec
from millrace.msgstream.wire import ByteReader, text_to_bytes

_TIMESTAMPS: Final = 1
_ROW_IDS: Final = 2
_CACHED_BYTES: Final = 16 << 10
"""Schemas up to this size are cached; larger ones are parsed each time, so that the cache stays small."""


class RowsBody(NamedTuple):
    """``timestamps`` (uint64) and ``row_ids`` (int64): one per row, or None."""

    rows: pa.RecordBatch
    shard_name: str
    timestamps: pa.UInt64Array | None
    row_ids: pa.Int64Array | None


def write_rows(rows: RowsBody) -> bytes:
    """Return the bytes.

    Raises InvalidArgument for no rows, for unsupported types, and for the wrong number of timestamps or row ids.
    """
    batch, shard_name, timestamps, row_ids = rows
    block, target = _written_schema(batch.schema)
    if batch.schema != target:
        try:
            batch = batch.cast(target)
        except (pa.ArrowException, ValueError) as error:
            raise InvalidArgument(f"the rows do not fit their schema: {error}") from None
    parts = [text_to_bytes(shard_name), len(block).to_bytes(4, "little"), block]
    flags = (_TIMESTAMPS if timestamps is not None else 0) | (_ROW_IDS if row_ids is not None else 0)
    parts += [batch.num_rows.to_bytes(4, "little"), bytes([flags])]
    for column, kind, what in ((timestamps, pa.uint64(), "timestamps"), (row_ids, pa.int64(), "row_ids")):
        if column is not None:
            if column.type != kind or len(column) != batch.num_rows or column.null_count:
                raise InvalidArgument(f"{what} must be {kind}, one per row, without nulls")
            parts.append(column.to_numpy(zero_copy_only=False).tobytes())
    return b"".join((*parts, encode_rows(batch)))


def read_rows(body: ByteReader) -> RowsBody:
    """Inverse of :func:`write_rows`.

    Raises Malformed.
    """
    shard_name = body.text()
    block = bytes(body.raw(body.number(4)))
    schema = _read_schema(block) if len(block) <= _CACHED_BYTES else _read_schema.__wrapped__(block)
    count, flags = body.number(4), body.number(1)
    if flags & ~(_TIMESTAMPS | _ROW_IDS):
        raise Malformed(f"the rows have unknown flags {flags:#x}")
    timestamps = _column(body, count, pa.uint64()) if flags & _TIMESTAMPS else None
    row_ids = _column(body, count, pa.int64()) if flags & _ROW_IDS else None
    batch = decode_rows(body.rest(), schema)
    if batch.num_rows != count:
        raise Malformed(f"the message says {count} rows and has {batch.num_rows}")
    return RowsBody(batch, shard_name, timestamps, row_ids)


def _column(body: ByteReader, count: int, kind: pa.DataType) -> pa.Array:
    values = np.frombuffer(body.raw(8 * count), dtype="<u8" if kind == pa.uint64() else "<i8")
    # A copy, because the bytes may be unaligned and Arrow requires alignment.
    return pa.array(values.copy(), kind)


@lru_cache(maxsize=256)
def _written_schema(schema: pa.Schema) -> tuple[bytes, pa.Schema]:
    """Return the bytes of a schema, and the schema that is read from them."""
    fields = [FieldSpec.from_arrow(each) for each in schema]
    if not 1 <= len(fields) <= MAX_FIELDS or len({each.name for each in fields}) != len(fields):
        raise InvalidArgument(f"rows must have 1 to {MAX_FIELDS} columns with unique names")
    parts = [text_to_bytes(each.name) + text_to_bytes(each.type) + bytes([each.nullable]) for each in fields]
    return b"".join(parts), pa.schema([each.arrow() for each in fields])


@lru_cache(maxsize=256)
def _read_schema(block: bytes) -> pa.Schema:
    cursor = ByteReader(memoryview(block))
    fields: dict[str, pa.Field] = {}
    while cursor.left:
        name, kind, nullable = cursor.text(), cursor.text(), cursor.number(1)
        if nullable > 1 or name in fields or len(fields) == MAX_FIELDS:
            raise Malformed("the rows' schema is invalid")
        try:
            fields[name] = FieldSpec(name, kind, bool(nullable)).arrow()
        except InvalidArgument as error:
            raise Malformed(str(error)) from None
    if not fields:
        raise Malformed("the rows have no columns")
    return pa.schema(list(fields.values()))
