"""Rows to documents and documents to rows: the only module that changes a payload's form.

A row becomes a JSON document on one line; a value without a JSON form (a time, a decimal, bytes) becomes Python's text
of it. A document becomes a row of a collection: JSON's texts and numbers become the fields' types, with all digits.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from itertools import chain, count
from types import NoneType
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import CONVERSION_ERRORS
from millrace.flows.batch import Batch
from millrace.flows.documents import Digits, decoded
from millrace.flows.plain import PlainActions, bodies, removed_ids
from millrace.flows.records import BINARY, DIGITS, Action, Record, listed_columns
from millrace.message.field_types import FieldType
from millrace.message.schema import CollectionSchema, FieldSpec
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
    Its key is None if the key's column is null. Without `key`, the id is that position. With `changes`, the columns of
    changes are left out, and a row whose ``_change`` is a delete becomes an action without a body. `text` converts a
    value without a JSON form to text.

    Raises InvalidArgument if the rows lack a column of the key.
    """
    encode = json.JSONEncoder(default=text).encode
    lane, start = batch.lane, batch.start
    prefix = f"{lane}-{start}-"
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
            yield Action(record, prefix + str(number) if name is None else name, body, version)


def iso_text(value: Any) -> str:
    """Return a time in ISO 8601, and the text of anything else."""
    return value.isoformat() if isinstance(value, date) else str(value)


def _key_text(values: Sequence[Any]) -> str | None:
    """Return a key as text: a single value's text, or several values as a JSON list, so that texts are unique."""
    if len(values) > 1:
        return json.dumps(values, default=str)
    return None if values[0] is None else str(values[0])


DOCUMENT_ERRORS: Final = (*CONVERSION_ERRORS, ArithmeticError, msgspec.MsgspecError, RecursionError)
"""Exceptions of a document that is not a row of the collection."""


class KeyedRow(NamedTuple):
    """A document as a row of a collection."""

    key: Any
    """Its value, or a tuple if the key has several fields."""
    row: dict[str, Any] | None
    """The row; None to delete the row of this key."""


def row_of(action: Action, schema: CollectionSchema) -> KeyedRow:
    """Return a document as a row with its key; a tombstone's key is its record's.

    Raises ValueError, TypeError or ArithmeticError that says what does not fit.
    """
    types = {field.name: str(field.type) for field in schema.fields}
    names = schema.key_names
    if action.body is None:
        return KeyedRow(_removed_key(action.id, schema.key_fields), None)
    document = decoded(action.body)
    missing = [name for name in names if document.get(name) is None]
    if missing:
        raise ValueError(f"the document has no {', '.join(missing)}, which is the collection's key")
    for name in listed_columns(action.record, DIGITS):
        value = document.get(name)
        if types.get(name) == "string" and isinstance(value, int | float):
            document[name] = _text(value)
    row = {name: value_of(value, types.get(name, ""), name) for name, value in document.items()}
    for name in listed_columns(action.record, BINARY):
        if isinstance(row.get(name), str) and types.get(name, "").endswith("binary"):
            row[name] = base64.b64decode(row[name], validate=True)
    return KeyedRow(row[names[0]] if len(names) == 1 else tuple(row[name] for name in names), row)


def columns_of(documents: Sequence[Action], schema: CollectionSchema) -> dict[str, Any]:
    """Return the documents that have a body as columns, equal to the rows of `row_of`.

    Raises one of DOCUMENT_ERRORS if a document does not fit, or if they are not alike; use `row_of` for each then.
    """
    values = [each for each in bodies(documents) if each is not None]
    if not values:
        return {}
    if schema.has_fill_values:
        raise ValueError("a field that a document lacks may have a value")
    digits, binary = _listed_columns(documents)
    kinds = {field.name: field.parsed_type for field in schema.fields}
    exact = bool(digits) or any(each.kind == "decimal" for each in kinds.values())
    rows = decoded(b"[" + b",".join(values) + b"]", exact=exact)
    if len(rows) != len(values) or set(map(type, rows)) != {dict}:
        raise ValueError("a document is not an object")
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}
    if any(None in columns.get(name, [None]) for name in schema.key_names):
        raise ValueError("a document has no key")
    return {
        name: _column(column, kinds[name], name, digits=name in digits, binary=name in binary)
        if name in kinds
        else column
        for name, column in columns.items()
    }


def _listed_columns(documents: Sequence[Action]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that the records list as DIGITS and BINARY. Raises ValueError if the lists differ."""
    some = documents[:1] if isinstance(documents, PlainActions) else documents
    records = {id(each.record.headers): each.record for each in some}.values()
    found = {(tuple(listed_columns(each, DIGITS)), tuple(listed_columns(each, BINARY))) for each in records}
    if len(found) != 1:
        raise ValueError("documents list different columns")
    return found.pop()


def _column(values: list[Any], kind: FieldType, name: str, *, digits: bool, binary: bool) -> Any:
    """Return a field's JSON values as a column, with the values of `row_of`."""
    types = set(map(type, values)) - {NoneType}
    if kind.kind == "string" and digits:
        return [_text(each) if isinstance(each, int | float) else each for each in values]
    if binary and kind.kind == "binary":
        return [base64.b64decode(each, validate=True) if isinstance(each, str) else each for each in values]
    whole: list[Any] | None = None
    if kind.kind == "decimal" and types <= {int, float, Digits, str}:
        whole = [None if each is None else _text(each) for each in values]
    elif kind.kind in _MOMENTS and types == {str}:
        whole = values
    elif kind.kind != "decimal" and Digits not in types and (str not in types or kind.kind not in _PARSED):
        return values
    if whole is not None:
        with suppress(pa.ArrowException):
            return pa.array(whole, pa.utf8()).cast(kind.arrow)
    return [value_of(each, kind.text, name) for each in values]


def removed_keys(documents: Sequence[Action], schema: CollectionSchema) -> list[Any]:
    """Return the keys of the documents without a body, as `key_rows` takes them. Raises as :func:`columns_of`."""
    ids = removed_ids(documents)
    fields = schema.key_fields
    if len(fields) == 1 and fields[0].type.startswith(("string", "int")):
        return ids
    return [_removed_key(each, fields) for each in ids]


def _text(value: float) -> str:
    """Return the text of a number, with all digits."""
    return value.text if isinstance(value, Digits) else str(value)


_TEXTS: Final = ("string", "uuid", "json")
_MOMENTS: Final = frozenset({"timestamp", "timestamp_ntz", "date"})
_PARSED: Final = frozenset({"int8", "int16", "int32", "int64", "float32", "float64"}) | _MOMENTS
"""Field types whose JSON texts are parsed."""


def _plain(key: str, kind: str) -> str:
    """Return a key's text without JSON quotes, which dates and decimals may have."""
    if kind in _TEXTS or not key.startswith('"'):
        return key
    try:
        return str(decoded(key.encode()))
    except msgspec.DecodeError:
        return key


def _removed_key(text: str, fields: Sequence[FieldSpec]) -> Any:
    """Return the key of a tombstone from its text."""
    values = [_plain(text, fields[0].type)] if len(fields) == 1 else _listed(text, [each.name for each in fields])
    found = [_key_value(value, each.type, each.name) for value, each in zip(values, fields, strict=True)]
    return found[0] if len(fields) == 1 else tuple(found)


def _key_value(value: Any, kind: str, name: str) -> Any:
    """Return a value of a key as its type `kind`; bytes are base64. Raises ValueError, TypeError."""
    return base64.b64decode(value, validate=True) if kind == "binary" else value_of(value, kind, name)


def _listed(key: str, names: Sequence[str]) -> list[Any]:
    """Return the values of a key of several fields, which is a JSON list. Raises ValueError."""
    try:
        found = decoded(key.encode())
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, list) or len(found) != len(names):
        raise ValueError(f"a tombstone's key must be a JSON list of {', '.join(names)}, not {key[:80]!r}")
    return found


def value_of(value: Any, kind: str, name: str) -> Any:
    """Return the JSON value of the field `name` as its type `kind`. Raises ValueError, TypeError."""
    if not isinstance(value, str):
        if isinstance(value, int | float) and kind.startswith("decimal"):
            return Decimal(_text(value))
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
        raise ValueError(f"{name}: {value[:80]!r} is not a valid {kind}") from None
    return value
