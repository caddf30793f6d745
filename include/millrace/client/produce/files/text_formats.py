"""Rows of JSON lines and of a JSON array; the checks of headers and the errors of files that text formats share."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.files.json_parser import JsonObjectParser
from millrace.client.produce.files.row_conversion import BadRow, RawRows, display_value


def _text(line: bytes, *, first: bool) -> str:
    """Decode a line of UTF-8; the first may start with a byte-order mark. Raises ValueError with a readable message."""
    try:
        return line.decode("utf-8-sig" if first else "utf-8").rstrip()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None


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
