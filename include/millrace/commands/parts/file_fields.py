"""A file's columns as fields: Parquet and Arrow say their types; in texts they are what the values of the first rows
are.

CSV's cells are read as ``millrace produce`` reads them, with the same form, so that what is inferred is what fits.
Where a number would lose something (zeros in front, digits of a whole number beyond int64), the column is text.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import CONVERSION_ERRORS
from millrace.client.produce.files.csv_format import csv_reader, from_cells
from millrace.client.produce.files.formats import CsvOptions, InputFormat, decompressed, format_of
from millrace.client.produce.files.json_parser import JsonObjectParser, begins_array
from millrace.message.field_types import parse_type
from millrace.message.schema import FieldSpec

SAMPLE_ROWS: Final = 10_000
"""Rows of a text file, or of Avro, that its types are inferred from."""

_CELL_TYPES: Final = ("int64", "float64", "bool", "date", "timestamp")
"""What CSV's cells may be, the first that all of a column are; else text."""
_ZEROS: Final = re.compile(r"[+-]?0\d")
_WHOLE: Final = re.compile(r"[+-]?\d+")


def fields_of(
    path: Path, given: Mapping[str, FieldSpec], *, kind: InputFormat | None = None, form: CsvOptions | None = None
) -> list[FieldSpec]:
    """The columns of a file as fields, those of `given` as they are given.

    Raises InvalidArgument for a file that cannot be read.
    """
    try:
        with path.open("rb") as file, decompressed(file) as plain:
            schema = _columns(format_of(path, kind), plain, form or CsvOptions())
    except (OSError, EOFError, ValueError, pa.ArrowException, InvalidArgument) as error:
        raise InvalidArgument(f"the columns of {path} cannot be read: {error}") from None
    twice = [name for name, times in Counter(schema.names).items() if times > 1]
    if twice:
        raise InvalidArgument(f"{path} has two columns {twice[0]!r}")
    return [given.get(item.name) or _field(item) for item in schema]


def _columns(kind: InputFormat, file: BinaryIO, form: CsvOptions) -> pa.Schema:
    match kind:
        case InputFormat.PARQUET:
            from pyarrow import parquet

            return parquet.read_schema(file)
        case InputFormat.CSV:
            return _csv(file, form)
        case InputFormat.ARROW:
            try:
                return pa.ipc.open_file(file).schema
            except pa.ArrowInvalid:
                file.seek(0)
                return pa.ipc.open_stream(file).schema
        case InputFormat.AVRO:
            avro: Any = importlib.import_module("fastavro")
            rows = list(itertools.islice(avro.reader(file), SAMPLE_ROWS))
        case _:
            rows = list(
                itertools.islice(_json(file, array=kind is InputFormat.JSON and begins_array(file)), SAMPLE_ROWS)
            )
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.schema([(name, _type(name, [row.get(name) for row in rows])) for name in names])


def _type(name: str, values: Sequence[Any]) -> pa.DataType:
    try:
        return pa.array(values).type
    except CONVERSION_ERRORS as error:
        raise InvalidArgument(f"{name} has no one type ({error}); say it with --field {name}:TYPE") from None


def _json(file: BinaryIO, *, array: bool) -> Iterator[dict[str, Any]]:
    parser = JsonObjectParser()
    numbered: Iterator[tuple[int, Any]] = parser.parse_array(file) if array else enumerate(file, 1)
    for line, row in numbered:
        try:
            if array:
                if isinstance(row, ValueError):
                    raise row
                yield row
            elif row.strip():
                yield parser.parse_line(row.decode("utf-8-sig" if line == 1 else "utf-8"))
        except ValueError as error:
            raise InvalidArgument(f"line {line}: {error}") from None


def _csv(file: BinaryIO, form: CsvOptions) -> pa.Schema:
    if not form.header:
        raise InvalidArgument("without a header it does not say their names: make the collection first, with --field")
    rows: list[list[str]] = []
    reader = csv_reader(file, form)
    header = next(reader, None)
    if header is None:
        raise InvalidArgument("it is empty")
    while len(rows) < SAMPLE_ROWS:
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error:  # a row that the load tells of
            continue
        if len(row) == len(header):
            rows.append(row)
    cells = zip(*rows, strict=True) if rows else [()] * len(header)
    return pa.schema([(name, _of_cells(column, form)) for name, column in zip(header, cells, strict=True)])


def _of_cells(cells: Sequence[str], form: CsvOptions) -> pa.DataType:
    values = [cell for cell in cells if cell not in form.nulls]
    if not values:
        return pa.null()
    kinds = iter(_CELL_TYPES)
    if any(map(_ZEROS.match, values)):
        kinds = iter(("date", "timestamp"))
    for name in kinds:
        if name == "float64" and all(map(_WHOLE.fullmatch, values)):
            continue
        kind = parse_type(name)
        try:
            from_cells(values, kind, form)
        except CONVERSION_ERRORS:
            continue
        return kind.arrow
    return pa.utf8()


def _field(item: pa.Field) -> FieldSpec:
    kind = item.type
    if pa.types.is_timestamp(kind):
        return FieldSpec(item.name, "timestamp", item.nullable)  # a file's without a zone is UTC
    if pa.types.is_null(kind):
        return FieldSpec(item.name, "string", item.nullable)
    try:
        return FieldSpec.from_arrow(item)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; or say what it is to be with --field {item.name}:TYPE") from None
