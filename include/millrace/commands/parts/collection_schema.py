"""A collection's schema from what a person writes (``name:type?``) or from a file's columns."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.files.json_objects import JsonObjects, begins_array
from millrace.client.produce.files.kinds import InputFormat, format_of, unpacked
from millrace.client.schemas import with_generated_key
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import OnDuplicate

if TYPE_CHECKING:
    from millrace.message.schema_changes import Change

SAMPLE_ROWS: Final = 10_000
"""Rows of a CSV or JSON lines file that its types are inferred from."""


def parse_field(text: str) -> FieldSpec:
    """``name:type`` or ``name:type?`` as a field. Raises InvalidArgument."""
    name, colon, kind = text.rpartition(":")
    if not colon or not name or not kind:
        raise InvalidArgument(f"{text!r} is no field: write name:type, or name:type? where it may be null")
    return FieldSpec(name, kind.removesuffix("?"), kind.endswith("?"))


def parse_pair(text: str) -> tuple[str, str]:
    """``name:what``, as its halves. Raises InvalidArgument."""
    name, colon, what = text.partition(":")
    if not colon or not name or not what:
        raise InvalidArgument(f"{text!r} is no pair: write NAME:TYPE, or OLD:NEW")
    return name, what


def parse_rules(texts: Sequence[str] | None) -> dict[str, str]:
    """``name=what`` each, as a dict. Raises InvalidArgument."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, what = text.partition("=")
        if not equals or not name.strip() or not what.strip() or name.strip() in found:
            raise InvalidArgument(f"{text!r} is no rule: write NAME=WHAT, each name once")
        found[name.strip()] = what.strip()
    return found


def file_changes(sources: Sequence[Path], schema: CollectionSchema) -> list[Change]:
    """What `schema` lacks for the columns of some files. Raises InvalidArgument for a file that cannot be read, and for stdin."""
    from millrace.client.produce.evolving import of_fields
    from millrace.message.schema_changes import apply_all

    made: list[Change] = []
    for each in sources:
        if str(each) == "-":
            raise InvalidArgument("--evolve looks into a file, and stdin is read once: alter the collection first")
        typed = format_of(each) in (InputFormat.PARQUET, InputFormat.ARROW)
        # What texts hold is guessed: there only fields that are not known are taken from the file.
        known = {} if typed else {field.name: field for field in schema.fields}
        found = of_fields(_file_fields(each, known), schema)
        schema = apply_all(schema, found)
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
) -> CollectionSchema:
    """The schema of `fields`, or of the columns of `source` with `fields` over them. Raises InvalidArgument."""
    given = {spec.name: spec for spec in map(parse_field, fields)}
    if len(given) < len(fields):
        raise InvalidArgument("a --field stands twice")
    specs = {spec.name: spec for spec in (_file_fields(source, given) if source is not None else [])} | given
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
            # A file says nothing of what must be there; a key must.
            narrow = spec.type in {"int8", "int16", "int32"}
            specs[name] = FieldSpec(name, "int64" if narrow else spec.type, False)
    return CollectionSchema(tuple(specs.values()), tuple(key), event_time, on_duplicate)


def _file_fields(path: Path, given: Mapping[str, FieldSpec]) -> list[FieldSpec]:
    """The columns of a file as fields, those of `given` as they are given. Raises InvalidArgument for a file that cannot be read."""
    kind = format_of(path)
    try:
        with path.open("rb") as file, unpacked(file) as plain:
            schema = _columns(kind, plain)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise InvalidArgument(f"the columns of {path} cannot be read: {error}") from None
    return [given.get(item.name) or _field(item) for item in schema]


def _columns(kind: InputFormat, file: BinaryIO) -> pa.Schema:
    match kind:
        case InputFormat.PARQUET:
            from pyarrow import parquet

            return parquet.read_schema(file)
        case InputFormat.CSV:
            from pyarrow import csv

            with csv.open_csv(file) as reader:
                return pa.schema([item.with_nullable(True) for item in reader.schema])
        case InputFormat.ARROW:
            try:
                return pa.ipc.open_file(file).schema
            except pa.ArrowInvalid:
                file.seek(0)
                return pa.ipc.open_stream(file).schema
        case InputFormat.AVRO:
            avro: Any = importlib.import_module("fastavro")
            rows = list(itertools.islice(avro.reader(file), SAMPLE_ROWS))
        case InputFormat.JSON if begins_array(file):
            rows = [_sound(line, row) for line, row in itertools.islice(JsonObjects().elements(file), SAMPLE_ROWS)]
        case _:
            lines = itertools.islice((line for line in file if line.strip()), SAMPLE_ROWS)
            parser = JsonObjects()
            rows = [parser.of_line(line.decode("utf-8-sig")) for line in lines]
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.schema([(name, pa.array([row.get(name) for row in rows]).type) for name in names])


def _sound(line: int, row: dict[str, Any] | ValueError) -> dict[str, Any]:
    if isinstance(row, ValueError):
        raise InvalidArgument(f"line {line}: {row}")
    return row


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
