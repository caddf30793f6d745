"""Rows to documents and documents to rows: the one place where a payload changes its form.

A row becomes a document of JSON, one line; what JSON has no form for (a time, a decimal, bytes) is the text that Python
has for it. A document becomes a row of a collection: JSON's texts and numbers take the fields' types, with all digits.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from itertools import count
from typing import Any, Final, NamedTuple

import msgspec

from millrace.base.errors import InvalidArgument
from millrace.flows.batch import Batch
from millrace.flows.documents import Digits, decoded
from millrace.flows.records import BINARY, DIGITS, Action, Record, listed_columns
from millrace.message.schema import CollectionSchema
from millrace.wal.visible.changes import CHANGE_COLUMNS

CHANGE: Final = "_change"
_DELETES: Final = "delete"


def documents_of(
    batch: Batch,
    *,
    key: Sequence[str] = (),
    changes: bool = False,
    version: int | None = None,
    text: Callable[[Any], str] = str,
) -> Iterator[Action]:
    """Yield each row of `batch` as a document, with the columns `key` as its id.

    A row's record has the lane as topic, the batch's `start` as partition, and the row's number in the batch as offset,
    or that of the batch's `numbers`.
    Its key is None if the column of the key is null. Without `key`, the id is that position. With `changes`, the
    columns of changes are left out, and a row whose ``_change`` is a delete gives an action without a body. `text`
    makes a text of a value that JSON has no form for.

    Raises InvalidArgument for rows without a column of the key.
    """
    encode = json.JSONEncoder(default=text).encode
    lane, start = batch.lane, batch.start
    numbers = count() if batch.numbers is None else iter(batch.numbers)
    for chunk in batch.rows or ():
        missing = [name for name in key if name not in chunk.schema.names]
        if missing:
            raise InvalidArgument(f"the rows have no column {missing[0]!r}, which is the messages' key")
        for row in chunk.to_pylist():
            name = _key_text([row[each] for each in key]) if key else None
            gone = False
            if changes:
                gone = row.get(CHANGE) == _DELETES
                row = {each: value for each, value in row.items() if each not in CHANGE_COLUMNS.names}
            body = None if gone else encode(row).encode()
            number = next(numbers)
            record = Record(lane, start, number, None if name is None else name.encode(), body, -1)
            yield Action(record, f"{lane}-{start}-{number}" if name is None else name, body, version)


def iso_text(value: Any) -> str:
    """Return a time in ISO 8601, and the text of anything else."""
    return value.isoformat() if isinstance(value, date) else str(value)


def _key_text(values: Sequence[Any]) -> str | None:
    """The text of a key: of one value its own, of several a JSON list, so that no two keys share a text."""
    if len(values) > 1:
        return json.dumps(values, default=str)
    return None if values[0] is None else str(values[0])


class KeyedRow(NamedTuple):
    """A document as a row of a collection."""

    key: Any
    """Its value, or of a key of several fields a tuple."""
    row: dict[str, Any] | None
    """None: delete the row of this key."""


def row_of(action: Action, schema: CollectionSchema) -> KeyedRow:
    """Return a document as a row with its key; a tombstone's key is its record's.

    Raises ValueError, TypeError or ArithmeticError that says what does not fit.
    """
    types = {field.name: str(field.type) for field in schema.fields}
    names = schema.key_names
    if action.body is None:
        values = [_plain(action.id, types[names[0]])] if len(names) == 1 else _listed(action.id, names)
        keys = [_key_value(value, types[name], name) for name, value in zip(names, values, strict=True)]
        return KeyedRow(keys[0] if len(names) == 1 else tuple(keys), None)
    document = decoded(action.body)
    missing = [name for name in names if document.get(name) is None]
    if missing:
        raise ValueError(f"the document has no {', '.join(missing)}, which is the collection's key")
    for name in listed_columns(action.record, DIGITS):
        value = document.get(name)
        if types.get(name) == "string" and isinstance(value, int | float):
            document[name] = value.text if isinstance(value, Digits) else str(value)
    row = {name: value_of(value, types.get(name, ""), name) for name, value in document.items()}
    for name in listed_columns(action.record, BINARY):
        if isinstance(row.get(name), str) and types.get(name, "").endswith("binary"):
            row[name] = base64.b64decode(row[name], validate=True)
    return KeyedRow(row[names[0]] if len(names) == 1 else tuple(row[name] for name in names), row)


_TEXTS: Final = ("string", "uuid", "json")


def _plain(key: str, kind: str) -> str:
    """The text of a key: a date's or a decimal's may be JSON's, in quotes."""
    if kind in _TEXTS or not key.startswith('"'):
        return key
    try:
        return str(decoded(key.encode()))
    except msgspec.DecodeError:
        return key


def _key_value(value: Any, kind: str, name: str) -> Any:
    """A value of a key, of which bytes are base64."""
    return base64.b64decode(value, validate=True) if kind == "binary" else value_of(value, kind, name)


def _listed(key: str, names: Sequence[str]) -> list[Any]:
    """The values of a key of several fields, which is a JSON list."""
    try:
        found = decoded(key.encode())
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, list) or len(found) != len(names):
        raise ValueError(f"a tombstone's key is a JSON list of {', '.join(names)}, not {key[:80]!r}")
    return found


def value_of(value: Any, kind: str, name: str) -> Any:
    """Return JSON's value of the field `name` as its type `kind` has it. Raises ValueError, TypeError."""
    if not isinstance(value, str):
        if isinstance(value, int | float) and kind.startswith("decimal"):
            return Decimal(value.text if isinstance(value, Digits) else str(value))
        return float(value) if isinstance(value, Digits) else value
    try:
        if kind.startswith("timestamp"):
            return datetime.fromisoformat(value)
        if kind == "date":
            return date.fromisoformat(value)
        if kind.startswith("decimal"):
            return Decimal(value)
        if kind.startswith(("int", "uint")):
            return int(value)
        if kind.startswith("float"):  # "NaN" and "Infinity", which have no other form in JSON
            return float(value)
    except (ValueError, InvalidOperation):
        raise ValueError(f"{name}: {value[:80]!r} is no {kind}") from None
    return value
