"""A collection's schema from what a person writes (``name:type?``) or from a file's columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from millrace.base.errors import InvalidArgument
from millrace.client.produce.files.formats import CsvOptions, InputFormat, format_of
from millrace.client.schemas import with_generated_key
from millrace.commands.parts.file_fields import fields_of
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import OnDuplicate

if TYPE_CHECKING:
    from millrace.message.schema_changes import SchemaChange


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


def file_changes(
    sources: Sequence[Path],
    schema: CollectionSchema,
    *,
    kind: InputFormat | None = None,
    form: CsvOptions | None = None,
) -> list[SchemaChange]:
    """What `schema` lacks for the columns of some files.

    Raises InvalidArgument for a file that cannot be read, and for stdin.
    """
    from millrace.client.produce.schema_evolution import required_field_changes
    from millrace.message.schema_changes import apply_changes

    made: list[SchemaChange] = []
    for each in sources:
        if str(each) == "-":
            raise InvalidArgument("--evolve looks into a file, and stdin is read once: alter the collection first")
        typed = format_of(each, kind) in (InputFormat.PARQUET, InputFormat.ARROW)
        # What texts hold is guessed: there only fields that are not known are taken from the file.
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
    """The schema of `fields`, or of the columns of `source` with `fields` over them. Raises InvalidArgument."""
    given = {spec.name: spec for spec in map(parse_field, fields)}
    if len(given) < len(fields):
        raise InvalidArgument("a --field stands twice")
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
            # A file says nothing of what must be there; a key must.
            narrow = spec.type in {"int8", "int16", "int32"}
            specs[name] = FieldSpec(name, "int64" if narrow else spec.type, False)
    return CollectionSchema(tuple(specs.values()), tuple(key), event_time, on_duplicate)
