"""Conversion of a format's values to a collection's columns; a value that does not fit only affects its row."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.client.produce.column_conversion import CONVERSION_ERRORS, build_column, from_arrow, from_python
from millrace.client.produce.files.json_parser import LongNumber
from millrace.message.field_types import FieldType
from millrace.message.schema import FieldSpec

_WORDS: Final = {
    "binary": "binary (base64)",
    "date": "date (ISO 8601)",
    "timestamp": "timestamp (ISO 8601)",
    "timestamp_ntz": "timestamp_ntz (ISO 8601 without a zone)",
}
_ZONE: Final = r"(Z|z|[+-]\d{2}:?\d{2}|[+-]\d{2})$"
_SECONDS_ZONE: Final = r":.*[+-]\d{2}:\d{2}:\d{2}$"
_PLAIN_NUMBER: Final = r"^-?[0-9]+(\.[0-9]+)?$"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that does not fit the collection: its line (for formats without lines, its number from 1) and the reason.

    `column` and `value` are set if one value is to blame.
    """

    line: int
    why: str
    column: str | None = None
    value: str | None = None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows that fit, in the columns that are sent, and those that do not."""

    rows: pa.Table
    bad: list[BadRow]
    last_line: int


class RawRows(NamedTuple):
    """Rows as read from the format: their lines, columns by name, and rows that could not be read."""

    lines: npt.NDArray[np.int64]
    columns: dict[str, Any]
    bad: list[BadRow]


Converter = Callable[[Any, FieldType], pa.Array]
"""Values of the format -> an array of that type. Raises an error if one does not fit."""


def display_value(value: object, quote: bool) -> str:
    """Return a value of the file as it appears in an error."""
    text = repr(value)
    return "that is in the file" if not quote else text if len(text) <= 60 else text[:57] + "..."


RowRules = Callable[[pa.Table], tuple[pa.Table, dict[int, str]]]
"""Rows -> the rows with filled values, and by row number why a row violates its schema's rules."""


def convert_rows(
    raw: RawRows,
    fields: Sequence[FieldSpec],
    convert: Converter,
    allowed: tuple[str, list[str]] | None,
    quote: bool,
    rules: RowRules | None = None,
) -> RowBatch:
    """Convert rows to the columns of `fields`; rows that do not fit, or that violate `rules`, are bad."""
    wanted = pa.schema([field.arrow() for field in fields])
    lines, bad = raw.lines, raw.bad
    wrong: dict[int, BadRow] = {}

    def blame(place: int, column: str, why: str, value: str | None) -> None:
        wrong.setdefault(place, BadRow(int(lines[place]), f"{column}: {why}", column, value))

    fitted: list[Any] = []
    for field in fields:
        values, misfits = _column(raw.columns[field.name], field.parsed_type, convert)
        for place, value in misfits.items():
            text = display_value(value, quote) if quote else "the value"
            kind = _WORDS.get(field.parsed_type.kind, field.type)
            blame(place, field.name, f"{text} is not {kind}", str(value) if quote else None)
        if not field.nullable:
            for place in np.flatnonzero(pc.is_null(values).to_numpy(zero_copy_only=False)).tolist():
                if place not in wrong:
                    wrong[place] = BadRow(int(lines[place]), f"{field.name} is missing or null", field.name)
        fitted.append(values)
    table = pa.Table.from_arrays(fitted, names=wanted.names)
    if allowed is not None:
        name, known = allowed
        outside = pc.invert(pc.is_in(table[name], pa.array(known, pa.utf8())))
        for place in np.flatnonzero(outside.to_numpy()).tolist():
            value = table[name][place].as_py()
            blame(place, name, f"there is no partition {display_value(value, quote)}", str(value) if quote else None)
    if rules is not None:
        table, broken = rules(table)
        for place, why in broken.items():
            wrong.setdefault(place, BadRow(int(lines[place]), why))
    if wrong:
        bad = sorted([*bad, *wrong.values()], key=lambda each: each.line)
        keep = np.ones(len(lines), dtype=bool)
        keep[list(wrong)] = False
        table = table.filter(pa.array(keep))
    last = max([*(each.line for each in bad), *lines[-1:].tolist()], default=0)
    return RowBatch(table.cast(wanted), bad, last)


def join_batches(parts: Sequence[RowBatch]) -> RowBatch:
    """Return the rows of consecutive parts of a file as one batch."""
    if len(parts) == 1:
        return parts[0]
    rows = pa.concat_tables([each.rows for each in parts]).combine_chunks()
    return RowBatch(rows, [bad for each in parts for bad in each.bad], max(each.last_line for each in parts))


def _column(values: Any, target: FieldType, convert: Converter) -> tuple[pa.Array, dict[int, Any]]:
    """Convert `values` (a list or an array) to `target`.

    Values that do not fit are null, and are returned by row number.
    """
    wrong: dict[int, Any] = {}

    def part(start: int, stop: int) -> list[pa.Array]:
        try:
            return [convert(values[start:stop], target)]
        except CONVERSION_ERRORS:
            if stop - start == 1:
                wrong[start] = values[start].as_py() if isinstance(values, pa.Array) else values[start]
                return [pa.nulls(1, target.arrow)]
        middle = (start + stop) // 2
        return [*part(start, middle), *part(middle, stop)]

    parts = part(0, len(values)) if len(values) else [pa.nulls(0, target.arrow)]
    return (parts[0] if len(parts) == 1 else pa.concat_arrays(parts)), wrong


_JSON_TAKES: Final[dict[str, frozenset[type]]] = {
    "bool": frozenset({bool}),
    **dict.fromkeys(("int8", "int16", "int32", "int64"), frozenset({int})),
    **dict.fromkeys(("float32", "float64"), frozenset({int, float, LongNumber})),
    "decimal": frozenset({int, float, LongNumber, str}),
}
"""The Python types of JSON values for a type, unless that is text."""


def from_json(values: list[Any], target: FieldType) -> pa.Array:
    """Convert JSON values, which must be of the JSON type for `target`. Raises CONVERSION_ERRORS."""
    return build_column(values, target, _json_leaf, _json_key)


def json_value(value: Any) -> Any:
    """Return a Python value in the form that :func:`from_json` takes."""
    if isinstance(value, date):  # includes datetime
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else value


def _json_key(values: list[Any], target: FieldType) -> pa.Array:
    """Convert map keys, which are names in a JSON object."""
    return from_text(pa.array(values, pa.utf8()), target)


def _json_leaf(values: list[Any], target: FieldType) -> pa.Array:
    if target.kind == "json":
        return from_python(values, target)
    takes = _JSON_TAKES.get(target.kind, frozenset({str}))
    if not {type(value) for value in values} <= takes | {type(None)}:
        raise ValueError("a value of another type")
    if target.kind == "decimal":
        return from_python([each.text if isinstance(each, LongNumber) else each for each in values], target)
    if str in takes:
        return from_text(pa.array(values, pa.utf8()), target)
    if target.kind in ("float32", "float64"):
        return from_arrow(pa.array([None if value is None else float(value) for value in values], pa.float64()), target)
    return pa.array(values, target.arrow)


def from_text(texts: pa.Array, target: FieldType) -> pa.Array:
    """Convert text to `target`: timestamps and dates are ISO 8601, binary is base64."""
    if target.kind == "string":
        return texts
    if target.kind == "binary":
        decoded = [None if each is None else base64.b64decode(each, validate=True) for each in texts.to_pylist()]
        return pa.array(decoded, target.arrow)
    if target.kind == "decimal":
        return _decimals(texts, target)
    if target.kind == "timestamp":
        return _timestamps(texts, target)
    return from_arrow(texts, target)


def _decimals(texts: pa.Array, target: FieldType) -> pa.Array:
    """Convert text to decimals: by Arrow if it has nothing but digits, which all are kept."""
    try:
        if pc.all(pc.match_substring_regex(texts, _PLAIN_NUMBER)).as_py() is not False:
            return texts.cast(target.arrow)
    except pa.ArrowInvalid:
        pass
    return from_python(texts.to_pylist(), target)


def _timestamps(texts: pa.Array, target: FieldType) -> pa.Array:
    """Convert ISO 8601 text to timestamps, those without a zone as UTC."""
    # All with a zone, or all without one: no text is rewritten. The first text decides which cast is tried, because one
    # that fails takes Arrow a microsecond a row.
    first = next((each.as_py() for each in texts if each.is_valid), "")
    try:
        written = target.arrow if re.search(_ZONE, first) and len(first) > len("2026-11-21") else pa.timestamp("us")
        return from_arrow(texts.cast(written).cast(target.arrow), target)
    except pa.ArrowInvalid:
        pass
    day = pc.equal(pc.utf8_length(texts), len("2026-11-21"))
    texts = pc.if_else(day, pc.binary_join_element_wise(texts, "T00:00:00Z", ""), texts)
    if pc.any(pc.match_substring_regex(texts, _SECONDS_ZONE)).as_py():  # which Arrow cannot parse
        moments = [None if each is None else datetime.fromisoformat(each) for each in texts.to_pylist()]
        return from_python(moments, target)
    zoned = pc.match_substring_regex(texts, _ZONE)
    texts = pc.if_else(zoned, texts, pc.binary_join_element_wise(texts, "Z", ""))
    return from_arrow(texts.cast(target.arrow), target)
