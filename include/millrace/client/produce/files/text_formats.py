"""Rows of text formats: JSON lines, a JSON array, CSV."""

from __future__ import annotations

import csv
import io
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import from_python
from millrace.client.produce.files.formats import CsvOptions
from millrace.client.produce.files.json_parser import JsonObjectParser
from millrace.client.produce.files.row_conversion import BadRow, RawRows, display_value, from_text
from millrace.message.field_types import FieldType

MAX_CELL_CHARACTERS: Final = 64 << 20
_GROUPED: Final = re.compile(r"\s*[+-]?\d{1,3}(\.\d{3})+(,\d*)?([eE][+-]?\d+)?\s*", re.ASCII)
"""A number with points between thousands and a decimal comma."""


def _text(line: bytes, *, first: bool) -> str:
    """Decode a line of UTF-8; the first may start with a byte-order mark. Raises ValueError with a readable message."""
    try:
        return line.decode("utf-8-sig" if first else "utf-8").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is no UTF-8") from None


READ_ERRORS: Final = (EOFError, OSError, zlib.error)
"""Errors of a compressed file that is damaged or cut off."""


def read_error(line: int, error: Exception) -> InvalidArgument:
    """Return the error for a file of lines that cannot be read further."""
    return InvalidArgument(f"line {line}: the file does not read on, it is damaged or was cut off ({error})")


def _numbered(source: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers from 1. Raises InvalidArgument, which names the line that cannot be read."""
    number = 0
    try:
        for number, line in enumerate(source, 1):
            yield number, line
    except READ_ERRORS as error:
        raise read_error(number + 1, error) from None


def json_lines(
    source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool, absent: Mapping[str, Any]
) -> Iterator[RawRows]:
    """Yield the rows of a file with one object per line; `absent` has values for names that an object lacks."""
    names = frozenset(wanted.names)
    numbered, parser = _numbered(source), JsonObjectParser(quote=quote)
    while taken := list(itertools.islice(numbered, batch_rows)):
        found: list[tuple[int, dict[str, Any] | ValueError]] = []
        for number, line in taken:
            if line.strip():
                try:
                    found.append((number, parser.parse_line(_text(line, first=number == 1))))
                except ValueError as error:
                    found.append((number, error))
        yield _objects(found, wanted, names, keys_only, quote, absent)


def json_array(
    source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool, absent: Mapping[str, Any]
) -> Iterator[RawRows]:
    """Yield the objects of one array, each with the line on which it starts. Memory: a batch and one MiB of text.

    Raises InvalidArgument if the text is not JSON; nothing after that point can be read.
    """
    names = frozenset(wanted.names)
    numbered = JsonObjectParser(quote=quote).parse_array(source)
    while found := list(itertools.islice(numbered, batch_rows)):
        yield _objects(found, wanted, names, keys_only, quote, absent)


def _objects(
    found: list[tuple[int, dict[str, Any] | ValueError]],
    wanted: pa.Schema,
    names: frozenset[str],
    keys_only: bool,
    quote: bool,
    absent: Mapping[str, Any],
) -> RawRows:
    lines: list[int] = []
    rows: list[dict[str, Any]] = []
    bad: list[BadRow] = []
    for number, row in found:
        if isinstance(row, ValueError):
            bad.append(BadRow(number, str(row)))
        elif not keys_only and not row.keys() <= names:
            name = sorted(row.keys() - names)[0]
            bad.append(
                BadRow(number, f"the collection has no field {display_value(name, quote)}", name if quote else None)
            )
        else:
            lines.append(number)
            rows.append(row)
    return RawRows(
        np.array(lines, np.int64), {n: [row.get(n, absent.get(n)) for row in rows] for n in wanted.names}, bad
    )


def csv_rows(
    source: BinaryIO, wanted: pa.Schema, batch_rows: int, keys_only: bool, quote: bool, form: CsvOptions
) -> Iterator[RawRows]:
    """Yield the rows of a CSV file, with the columns of its header, or those of the schema if it has none."""
    nested = [field.name for field in wanted if pa.types.is_nested(field.type)]
    if nested:
        raise InvalidArgument(
            f"CSV cannot hold lists, maps or structs (field {nested[0]!r}): write JSON lines or Parquet"
        )
    with csv_reader(source, form) as reader:
        header = next(reader, None) if form.header else list(wanted.names)
        check_header(header or [], wanted, keys_only, quote)
        nulls, ended = frozenset(form.nulls), header is None
        while not ended:
            lines: list[int] = []
            rows: list[list[str]] = []
            bad: list[BadRow] = []
            while len(rows) + len(bad) < batch_rows:
                line = reader.line_num + 1  # the row's first line: a quoted cell may span lines
                try:
                    row = next(reader)
                except StopIteration:
                    ended = True
                    break
                except csv.Error as error:
                    bad.append(BadRow(line, str(error)))
                    continue
                except READ_ERRORS as error:
                    raise read_error(line, error) from None
                if row and len(row) != len(header or []):
                    bad.append(BadRow(line, f"it has {len(row)} cells, the header has {len(header or [])}"))
                elif row:
                    lines.append(line)
                    rows.append(row)
            cells = dict(zip(header or [], zip(*rows, strict=True), strict=True)) if rows else {}
            columns: dict[str, Any] = {}
            for field in wanted:
                if field.name not in cells:
                    columns[field.name] = pa.nulls(len(rows))
                elif field.nullable:
                    columns[field.name] = [None if cell in nulls else cell for cell in cells[field.name]]
                else:
                    columns[field.name] = list(cells[field.name])
            yield RawRows(np.array(lines, np.int64), columns, bad)


@contextmanager
def csv_reader(source: BinaryIO, form: CsvOptions) -> Iterator[Any]:
    """Return a csv reader over `source`, which stays open; it yields lists of cells, including the header's."""
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    # Invalid bytes become lone surrogates, which Arrow strings refuse: that row is bad, and the others are read.
    encoding = "utf-8-sig" if form.encoding.lower() in ("utf-8", "utf8") else form.encoding
    text = io.TextIOWrapper(source, encoding=encoding, errors="surrogateescape", newline="")
    quoting: Literal[0, 3] = 0 if form.quote else 3  # csv.QUOTE_MINIMAL, csv.QUOTE_NONE
    try:
        yield csv.reader(text, strict=True, delimiter=form.delimiter, quotechar=form.quote or None, quoting=quoting)
    finally:
        if not source.closed:
            text.detach()


def from_cells(values: Any, target: FieldType, form: CsvOptions) -> pa.Array:
    """Convert CSV cells to `target`."""
    if isinstance(values, pa.Array):  # the file has no such column
        return pa.nulls(len(values), target.arrow)
    if form.decimal == "," and target.kind in ("float32", "float64", "decimal"):
        values = [None if each is None else _with_point(each) for each in values]
    pattern = {"date": form.dates, "timestamp": form.timestamps, "timestamp_ntz": form.timestamps}.get(target.kind)
    if pattern is not None:
        moments = [None if each is None else datetime.strptime(each, pattern) for each in values]  # noqa: DTZ007
        if target.kind == "date":
            return from_python([None if each is None else each.date() for each in moments], target)
        return from_python(moments, target)  # without a zone: UTC
    return from_text(pa.array(values, pa.utf8()), target)


def _with_point(cell: str) -> str:
    """Replace a decimal comma by a point.

    A point that is not between thousands is refused: without this, 1.5 would become 15.
    """
    if "." in cell and _GROUPED.fullmatch(cell) is None:
        raise ValueError(f"{cell!r:.60} has a point that is not between thousands")
    return cell.replace(".", "").replace(",", ".")


def check_header(names: list[str], wanted: pa.Schema, keys_only: bool, quote: bool) -> None:
    """Raise InvalidArgument for columns that the collection lacks, and for required columns that are missing."""
    if len(set(names)) < len(names):
        raise InvalidArgument("the file has two columns of one name")
    unknown = [name for name in names if name not in wanted.names]
    if unknown and not keys_only:
        raise InvalidArgument(
            f"the collection has no field {display_value(unknown[0], quote)}; it has {', '.join(wanted.names)}"
        )
    missing = [field.name for field in wanted if not field.nullable and field.name not in names]
    if missing:
        raise InvalidArgument(f"the file has no column {missing[0]!r}, which must not be null")
