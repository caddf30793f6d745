"""Rows from a file or stdin, in batches, with the line that each came from: JSON lines, CSV, Parquet.

Every value is checked against the collection's schema before anything is sent; a row that does not fit becomes a
:class:`BadRow` with its line (Parquet: row) number and loses no other row. Conventions, the same as on the way out:
timestamps and dates are ISO 8601 text (a timestamp without a zone is UTC), binary is base64; in CSV an empty cell of a
field that may be null is null.

JSON goes through Python's parser, a row at a time: Arrow's (26.0) ends the process on a line that says just ``null``.
"""

from __future__ import annotations

import base64
import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.client.produce.values import REFUSALS, build, from_arrow, from_python
from millrace.message.field_types import FieldType
from millrace.message.schema import CollectionSchema, FieldSpec

MAX_CELL_CHARACTERS: Final = 64 << 20
STDIN: Final = "-"

_WORDS: Final = {
    "binary": "binary (base64)",
    "date": "date (ISO 8601)",
    "timestamp": "timestamp (ISO 8601)",
    "timestamp_ntz": "timestamp_ntz (ISO 8601 without a zone)",
}
_ZONE: Final = r"(Z|z|[+-]\d{2}:?\d{2}|[+-]\d{2})$"


class InputFormat(StrEnum):
    """How rows are written."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


_SUFFIXES: Final = {
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".json": InputFormat.JSONL,
    ".csv": InputFormat.CSV,
    ".parquet": InputFormat.PARQUET,
    ".pq": InputFormat.PARQUET,
}


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that does not fit the collection, and why."""

    line: int
    why: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that fit, as the columns they have to be sent with, and those that do not."""

    rows: pa.Table
    bad: list[BadRow]
    last_line: int


def format_of(path: Path, given: InputFormat | None = None) -> InputFormat:
    """The format of a file by its suffix (stdin: JSON lines), unless it is `given`. Raises InvalidArgument."""
    if given is not None:
        return given
    if str(path) == STDIN:
        return InputFormat.JSONL
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise InvalidArgument(
            f"{path.name}: the suffix {path.suffix!r} names no format; say --format jsonl, csv or parquet"
        )
    return found


def read_batches(
    source: BinaryIO,
    kind: InputFormat,
    schema: CollectionSchema,
    *,
    batch_rows: int,
    keys_only: bool = False,
    allowed: tuple[str, list[str]] | None = None,
    quote: bool = True,
) -> Iterator[Batch]:
    """The rows of `source` as `schema`'s columns, `batch_rows` at a time.

    `keys_only` takes the primary key's column and ignores the others. `allowed` is a column and the values that it may
    have. Without `quote` no error holds anything of the file's contents: for whoever may not read it. Raises InvalidArgument for what is no fault of one row: columns that are not there, a file that is not Parquet.
    """
    wanted = schema.key_arrow() if keys_only else schema.arrow()
    fields = {field.name: field for field in schema.fields}
    read, convert = _READERS[kind]
    for raw in read(source, wanted, batch_rows, keys_only, quote):
        yield _fit(raw, [fields[name] for name in wanted.names], wanted, convert, allowed, quote)


# --- the three formats: (line numbers, columns by name, rows that are none) --------------------------------------------------


class _Raw(NamedTuple):
    """Rows as the format has them."""

    lines: npt.NDArray[np.int64]
    columns: dict[str, Any]
    bad: list[BadRow]


Converter = Callable[[Any, FieldType], pa.Array]
"""Values as the format has them -> an array of that type, or an error where one of them does not fit."""


def json_object(line: str) -> dict[str, Any]:
    """One line's object. Raises ValueError in words."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON at character {error.pos + 1}: {error.msg}") from None
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is no object but {type(value).__name__}")
    return value


def _text(line: bytes, *, first: bool) -> str:
    """A line of UTF-8; the file's first may begin with a byte-order mark. Raises ValueError in words."""
    try:
        return line.decode("utf-8-sig" if first else "utf-8").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is no UTF-8") from None


def _json_lines(source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool) -> Iterator[_Raw]:
    names = frozenset(wanted.names)
    numbered = enumerate(source, 1)
    while taken := list(itertools.islice(numbered, batch_rows)):
        lines: list[int] = []
        rows: list[dict[str, Any]] = []
        bad: list[BadRow] = []
        for number, line in taken:
            if not line.strip():
                continue
            try:
                row = json_object(_text(line, first=number == 1))
                if not keys_only and not row.keys() <= names:
                    raise ValueError(f"the collection has no field {_shown(sorted(row.keys() - names)[0], quote)}")
            except ValueError as error:
                bad.append(BadRow(number, str(error)))
                continue
            lines.append(number)
            rows.append(row)
        columns = {name: [row.get(name) for row in rows] for name in wanted.names}
        yield _Raw(np.array(lines, np.int64), columns, bad)


def _csv(source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool) -> Iterator[_Raw]:
    nested = [field.name for field in wanted if pa.types.is_nested(field.type)]
    if nested:
        raise InvalidArgument(f"CSV holds no lists, maps or structs (field {nested[0]!r}): write JSON lines or Parquet")
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    # Bytes that are not UTF-8 become lone surrogates, which no Arrow string takes: the row is bad, the others are read.
    text = io.TextIOWrapper(source, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, strict=True)
    header = next(reader, None)
    _check_header(header or [], wanted, keys_only, quote)
    ended = header is None
    while not ended:
        lines: list[int] = []
        rows: list[list[str]] = []
        bad: list[BadRow] = []
        while len(rows) + len(bad) < batch_rows:
            line = reader.line_num + 1  # where the row begins: a quoted cell may span lines
            try:
                row = next(reader)
            except StopIteration:
                ended = True
                break
            except csv.Error as error:
                bad.append(BadRow(line, str(error)))
                continue
            if row and len(row) != len(header or []):
                bad.append(BadRow(line, f"it has {len(row)} cells, the header has {len(header or [])}"))
            elif row:
                lines.append(line)
                rows.append(row)
        cells = dict(zip(header or [], zip(*rows, strict=True), strict=True)) if rows else {}
        columns: dict[str, Any] = {}
        for field in wanted:
            if field.name not in cells:
                columns[field.name] = pa.nulls(len(rows), pa.utf8())
            elif field.nullable:
                columns[field.name] = [cell or None for cell in cells[field.name]]
            else:
                columns[field.name] = list(cells[field.name])
        yield _Raw(np.array(lines, np.int64), columns, bad)
    text.detach()


def _parquet(source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool) -> Iterator[_Raw]:
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(source if source.seekable() else io.BytesIO(source.read()))
        _check_header(file.schema_arrow.names, wanted, keys_only, quote)
        first = 1
        for batch in file.iter_batches(batch_rows, columns=[n for n in wanted.names if n in file.schema_arrow.names]):
            columns = {
                name: batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows)
                for name in wanted.names
            }
            yield _Raw(np.arange(first, first + batch.num_rows), columns, [])
            first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise InvalidArgument(f"the Parquet file cannot be read{f': {error}' if quote else ''}") from None


def _shown(value: object, quote: bool) -> str:
    """A value of the file as an error has it."""
    text = repr(value)
    return "that is in the file" if not quote else text if len(text) <= 60 else text[:57] + "..."


def _check_header(names: list[str], wanted: pa.Schema, keys_only: bool, quote: bool) -> None:
    if len(set(names)) < len(names):
        raise InvalidArgument("the file has two columns of one name")
    unknown = [name for name in names if name not in wanted.names]
    if unknown and not keys_only:
        raise InvalidArgument(
            f"the collection has no field {_shown(unknown[0], quote)}; it has {', '.join(wanted.names)}"
        )
    missing = [field.name for field in wanted if not field.nullable and field.name not in names]
    if missing:
        raise InvalidArgument(f"the file has no column {missing[0]!r}, which must not be null")


# --- fitting ------------------------------------------------------------------------------------------------------------------


def _fit(
    raw: _Raw,
    fields: list[FieldSpec],
    wanted: pa.Schema,
    convert: Converter,
    allowed: tuple[str, list[str]] | None,
    quote: bool,
) -> Batch:
    """The columns with `wanted`'s types; rows with a value that does not fit are bad ones."""
    lines, bad = raw.lines, raw.bad
    why: dict[int, str] = {}
    fitted: list[Any] = []
    for field in fields:
        values, wrong = _column(raw.columns[field.name], field.tree, convert, quote)
        for place, error in wrong.items():
            why.setdefault(place, f"{field.name}: {error}")
        if not field.nullable:
            for place in np.flatnonzero(pc.is_null(values).to_numpy(zero_copy_only=False)).tolist():
                why.setdefault(place, f"{field.name} is missing or null")
        fitted.append(values)
    table = pa.Table.from_arrays(fitted, names=wanted.names)
    if allowed is not None:
        name, known = allowed
        outside = pc.invert(pc.is_in(table[name], pa.array(known, pa.utf8())))
        for place in np.flatnonzero(outside.to_numpy()).tolist():
            why.setdefault(place, f"{name}: there is no partition {_shown(table[name][place].as_py(), quote)}")
    if why:
        bad = sorted(
            [*bad, *(BadRow(int(lines[place]), text) for place, text in why.items())], key=lambda each: each.line
        )
        keep = np.ones(len(lines), dtype=bool)
        keep[list(why)] = False
        table = table.filter(pa.array(keep))
    last = max([*(each.line for each in bad), *lines[-1:].tolist()], default=0)
    return Batch(table.cast(wanted), bad, last)


def _column(values: Any, target: FieldType, convert: Converter, quote: bool) -> tuple[pa.Array, dict[int, str]]:
    """`values` (a list or an array) as `target`, null where that cannot be, and why it cannot, by place."""
    wrong: dict[int, str] = {}

    def part(start: int, stop: int) -> list[pa.Array]:
        try:
            return [convert(values[start:stop], target)]
        except REFUSALS:
            if stop - start == 1:
                value = values[start].as_py() if isinstance(values, pa.Array) else values[start]
                wrong[start] = (
                    f"{_shown(value, quote) if quote else 'the value'} is no {_WORDS.get(target.kind, target.text)}"
                )
                return [pa.nulls(1, target.arrow)]
        middle = (start + stop) // 2
        return [*part(start, middle), *part(middle, stop)]

    parts = part(0, len(values)) if len(values) else [pa.nulls(0, target.arrow)]
    return (parts[0] if len(parts) == 1 else pa.concat_arrays(parts)), wrong


_JSON_TAKES: Final[dict[str, frozenset[type]]] = {
    "bool": frozenset({bool}),
    **dict.fromkeys(("int8", "int16", "int32", "int64"), frozenset({int})),
    **dict.fromkeys(("float32", "float64"), frozenset({int, float})),
    "decimal": frozenset({int, float, str}),
}
"""What JSON has for a type, where that is not text."""


def _from_json(values: list[Any], target: FieldType) -> pa.Array:
    """JSON's values: strictly of the type that JSON has for `target`. Raises what values.REFUSALS names."""
    return build(values, target, _json_leaf, _json_key)


def _json_key(values: list[Any], target: FieldType) -> pa.Array:
    """Keys of a map, which are names of an object."""
    return _from_text(pa.array(values, pa.utf8()), target)


def _json_leaf(values: list[Any], target: FieldType) -> pa.Array:
    if target.kind == "json":
        return from_python(values, target)
    takes = _JSON_TAKES.get(target.kind, frozenset({str}))
    if not {type(value) for value in values} <= takes | {type(None)}:
        raise ValueError("a value of another type")
    if target.kind == "decimal":
        return from_python(values, target)
    if str in takes:
        return _from_text(pa.array(values, pa.utf8()), target)
    if target.kind in ("float32", "float64"):
        return pa.array([None if value is None else float(value) for value in values], target.arrow)
    return pa.array(values, target.arrow)


def _from_cells(values: Any, target: FieldType) -> pa.Array:
    """CSV's cells."""
    return _from_text(values if isinstance(values, pa.Array) else pa.array(values, pa.utf8()), target)


def _from_text(texts: pa.Array, target: FieldType) -> pa.Array:
    if target.kind == "string":
        return texts
    if target.kind == "binary":
        decoded = [None if each is None else base64.b64decode(each, validate=True) for each in texts.to_pylist()]
        return pa.array(decoded, target.arrow)
    if target.kind in ("decimal", "uuid", "json"):
        return from_python(texts.to_pylist(), target)
    if target.kind == "timestamp":
        day = pc.equal(pc.utf8_length(texts), len("2026-11-21"))
        texts = pc.if_else(day, pc.binary_join_element_wise(texts, "T00:00:00Z", ""), texts)
        zoned = pc.match_substring_regex(texts, _ZONE)
        return pc.if_else(zoned, texts, pc.binary_join_element_wise(texts, "Z", "")).cast(target.arrow)
    return texts.cast(target.arrow)


_READERS: Final = {
    InputFormat.JSONL: (_json_lines, _from_json),
    InputFormat.CSV: (_csv, _from_cells),
    InputFormat.PARQUET: (_parquet, from_arrow),
}
