"""Payloads of messages as plain data, truncated for a page. Rows and keys become objects."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, Final

import pyarrow as pa

from millrace.base.errors import MillraceError
from millrace.message.bodies import parse_body
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema
from millrace.message.types import DML, ROW_CARRYING_TYPES, MessageType

MAX_ROWS_SHOWN: Final = 50
MAX_CHARACTERS: Final = 2000
"""Bytes shown of one string or binary value."""
MAX_ITEMS: Final = 100
"""Items shown of one list or object."""
MAX_PAYLOAD_BYTES: Final = 64 << 20
"""Larger payloads are not decoded for a page."""


def payload_view(
    kind: str, schemas: Sequence[CollectionSchema], version: int, data: bytes, *, rows: int = MAX_ROWS_SHOWN
) -> tuple[Any, bool]:
    """Decode `data` of a message type. Returns the value, and whether it was truncated.

    A payload that cannot be decoded yields ``{"error": ...}``.
    """
    if not data:
        return None, False
    if len(data) > MAX_PAYLOAD_BYTES:
        return {"error": f"{len(data):,} bytes are too many to show here"}, True
    try:
        number = MessageType[kind]
        if number not in DML:
            return truncate_value(parse_body(number, data))
        if not 1 <= version <= len(schemas):
            return {"error": f"schema version {version} of this collection is not known here"}, False
        schema = schemas[version - 1]
        found = decode_rows(data, schema.arrow() if number in ROW_CARRYING_TYPES else schema.key_arrow())
        shown, cut = row_objects(found.slice(0, rows))
        return shown, cut or found.num_rows > rows
    except (MillraceError, KeyError, ValueError) as error:
        return {"error": str(error) or type(error).__name__, "hex": data[:256].hex()}, len(data) > 256


def row_objects(rows: pa.RecordBatch | pa.Table) -> tuple[list[dict[str, Any]], bool]:
    """Return rows as objects with truncated values, and whether any value was."""
    shown, cuts = [], False
    try:
        found = rows.to_pylist()
    except OverflowError:
        found = [{name: _with_texts(rows[name][place]) for name in rows.schema.names} for place in range(rows.num_rows)]
    for each in found:
        value, cut = truncate_value(each)
        shown.append(value)
        cuts |= cut
    return shown, cuts


def _with_texts(value: pa.Scalar) -> Any:
    """Return a value in which dates and times outside of Python's years are strings."""
    try:
        return value.as_py()
    except OverflowError:
        if isinstance(value, pa.StructScalar):
            return {name: _with_texts(value[name]) for name in value}
        if isinstance(value, pa.ListScalar | pa.MapScalar):
            return [_with_texts(each) for each in value.values]
        return value.cast(pa.utf8()).as_py()


def truncate_value(value: Any) -> tuple[Any, bool]:
    """Return `value` in JSON types with long strings and lists truncated, and whether any was."""
    if isinstance(value, CollectionSchema):
        value = value.to_json()
    if isinstance(value, bytes):
        text = base64.b64encode(value[:MAX_CHARACTERS]).decode()
        return text, len(value) > MAX_CHARACTERS
    if isinstance(value, str):
        return (value, False) if len(value) <= MAX_CHARACTERS else (value[:MAX_CHARACTERS] + "…", True)
    if isinstance(value, datetime | date):
        return value.isoformat(), False
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 53:
        return str(value), False  # JavaScript would round it
    if isinstance(value, float) and not math.isfinite(value):
        return str(value), False  # JSON has no such number
    if isinstance(value, Mapping):
        pairs = [(str(key), truncate_value(each)) for key, each in list(value.items())[:MAX_ITEMS]]
        return {key: each for key, (each, _) in pairs}, len(value) > MAX_ITEMS or any(cut for _, (_, cut) in pairs)
    if isinstance(value, list | tuple | set | frozenset):
        items = [truncate_value(each) for each in list(value)[:MAX_ITEMS]]
        return [each for each, _ in items], len(value) > MAX_ITEMS or any(cut for _, cut in items)
    if value is None or isinstance(value, bool | int | float):
        return value, False
    if hasattr(value, "to_json"):
        return truncate_value(value.to_json())
    return str(value), False
