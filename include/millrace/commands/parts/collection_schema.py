"""A collection's schema, from typed fields (``name:type?``) or from a file's columns.

Parquet and Arrow files state their types. For text files they are inferred from the first rows: CSV cells are read as
``millrace produce`` reads them. A column whose numbers would lose something (leading zeros, digits beyond int64) is
text.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import CONVERSION_ERRORS
from millrace.client.produce.files.csv_format import csv_reader, from_cells
from millrace.client.produce.files.formats import CsvOptions, InputFormat, decompressed, format_of
from millrace.client.produce.files.json_parser import JsonObjectParser, begins_array
from millrace.client.schemas import with_generated_key
from millrace.message.field_types import parse_type
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import OnDuplicate

if TYPE_CHECKING:
    from millrace.message.schema_changes import SchemaChange

SAMPLE_ROWS: Final = 10_000
"""Rows of a text or Avro file from which its types are inferred."""

_CELL_TYPES: Final = ("int64", "float64", "bool", "date", "timestamp")
"""Types of CSV cells. A column has the first that fits all its cells, else it is text."""
_ZEROS: Final = re.compile(r"[+-]?0\d")
_WHOLE: Final = re.compile(r"[+-]?\d+")


def parse_field(text: str) -> FieldSpec:
    """Parse ``name:type`` or ``name:type?`` (nullable) into a field. Raises InvalidArgument."""
    name, colon, kind = text.rpartition(":")
    if not colon or not name or not kind:
        raise InvalidArgument(f"{text!r} is not a field: write name:type, or name:type? where it may be null")
    return FieldSpec(name, kind.removesuffix("?"), kind.endswith("?"))


def parse_pair(text: str) -> tuple[str, str]:
    """Split ``name:what`` into its two parts. Raises InvalidArgument."""
    name, colon, what = text.partition(":")
    if not colon or not name or not what:
        raise InvalidArgument(f"{text!r} is not a pair: write NAME:TYPE, or OLD:NEW")
    return name, what


def parse_rules(texts: Sequence[str] | None) -> dict[str, str]:
    """Parse ``name=what`` texts into a dict. Raises InvalidArgument, also if a name repeats."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, what = text.partition("=")
        if not equals or not name.strip() or not what.strip() or name.strip() in found:
            raise InvalidArgument(f"{text!r} is not a rule: write NAME=WHAT, each name once")
        found[name.strip()] = what.strip()
    return found


def file_changes(
    sources: Sequence[Path],
    schema: CollectionSchema,
    *,
    kind: InputFormat | None = None,
    form: CsvOptions | None = None,
) -> list[SchemaChange]:
    """Return the changes that `schema` needs to take the columns of the files.

    Raises InvalidArgument if a file cannot be read, or is stdin.
    """
    from millrace.client.produce.schema_evolution import required_field_changes
    from millrace.message.schema_changes import apply_changes

    made: list[SchemaChange] = []
    for each in sources:
        if str(each) == "-":
            raise InvalidArgument("--evolve looks into a file, and stdin is read once: alter the collection first")
        typed = format_of(each, kind) in (InputFormat.PARQUET, InputFormat.ARROW)
        # The types of a text file are guesses: take only unknown fields from it.
        known = {} if typed else {field.name: field for field in schema.fields}
        found = required_field_changes(fields_of(each, known, kind=kind, form=form), schema)
        schema = apply_changes(schema, found)
        made += found
    return made


def make_schema(
    *,
    fields: Sequence[str],
    source: Path | None,
    key: Sequence[str],
    event_time: str | None,
    on_duplicate: OnDuplicate = "keep",
    generated_key: str | None = None,
    kind: InputFormat | None = None,
    form: CsvOptions | None = None,
) -> CollectionSchema:
    """Return the schema of `fields`, or of the columns of `source` overridden by `fields`. Raises InvalidArgument."""
    given = {spec.name: spec for spec in map(parse_field, fields)}
    if len(given) < len(fields):
        raise InvalidArgument("a --field is given twice")
    read = [] if source is None else fields_of(source, given, kind=kind, form=form)
    specs = {spec.name: spec for spec in read} | given
    if not specs:
        raise InvalidArgument("name the fields: --field id:int64 --field 'name:string?', or --from a file")
    if generated_key is not None:
        if key:
            raise InvalidArgument("--key and --generated-key: give one of them")
        found = list(specs.values())
        return with_generated_key(found, generated_key, event_time=event_time, on_duplicate=on_duplicate)
    if not key:
        words = f"name the primary key with --key, one of {', '.join(specs)}, or have one made with --generated-key"
        raise InvalidArgument(words)
    for name in key:
        spec = specs.get(name)
        if source is not None and spec is not None and name not in given:
            # Columns of a file are nullable, a key is not.
            narrow = spec.type in {"int8", "int16", "int32"}
            specs[name] = FieldSpec(name, "int64" if narrow else spec.type, False)
    return CollectionSchema(tuple(specs.values()), tuple(key), event_time, on_duplicate)


def fields_of(
    path: Path, given: Mapping[str, FieldSpec], *, kind: InputFormat | None = None, form: CsvOptions | None = None
) -> list[FieldSpec]:
    """Return a file's columns as fields. Columns in `given` are taken from there.

    Raises InvalidArgument if the file cannot be read.
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
        raise InvalidArgument(f"{name} has more than one type ({error}); choose one with --field {name}:TYPE") from None


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
        raise InvalidArgument(
            "without a header the file does not name its columns: create the collection first, with --field"
        )
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
        except csv.Error:  # the load reports this row
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
        raise InvalidArgument(f"{error}; or choose its type with --field {item.name}:TYPE") from None
