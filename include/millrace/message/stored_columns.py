"""Map a schema's fields to the columns of its collection's Delta tables, and back; all readers use this mapping.

A field's values are in columns that keep their names and types permanently (:mod:`millrace.message.schema_changes`): in
one column or, after its type was widened, each in one of several. Rows between log and table have columns; readers get
fields. If a schema was never changed except by added fields, its columns are its fields, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.message.field_types import parse_type
from millrace.message.nested_names import convert_nested
from millrace.message.schema import CollectionSchema, FieldSpec, StoredColumn

ColumnChains: TypeAlias = tuple[tuple[str, ...], ...]
"""Columns that together hold a field's values, each value in one of them, newest last."""

_NUMBERS: Final = frozenset({"int16", "int32", "int64", "float64", "decimal"})

MAX_TIMESTAMP_DAYS: Final = (1 << 63) // 86_400_000_000
"""Days around 1970 that a timestamp of microseconds reaches; a date beyond is clamped."""


def written_columns(schema: CollectionSchema) -> list[pa.Field]:
    """Return the columns that rows of this schema are written to, in field order."""
    return [
        _column(field.stored_columns[-1].name, field.stored_columns[-1].type, field.nullable) for field in schema.fields
    ]


def needed_columns(schema: CollectionSchema, names: Iterable[str] | None = None) -> list[pa.Field]:
    """Return the columns that the fields (`names`; default: all) are read from."""
    wanted = None if names is None else set(names)
    fields = [field for field in schema.fields if wanted is None or field.name in wanted]
    return [column for field in fields for column in _columns(field)]


def all_columns(schema: CollectionSchema) -> list[pa.Field]:
    """Return all columns that rows of the collection had up to this schema."""
    return [*needed_columns(schema), *(_column(name, kind, True) for name, kind in schema.retired)]


def key_schema(schema: CollectionSchema) -> pa.Schema:
    """Return the columns of the primary key, in its order; each of its fields has a single column."""
    return pa.schema([column for field in schema.key_fields for column in _columns(field)])


def key_columns(schema: CollectionSchema) -> tuple[str, ...]:
    """Return their names."""
    return tuple(key_schema(schema).names)


def single_column(schema: CollectionSchema, name: str) -> str | None:
    """Return the column of a field; None if it has several, or does not exist."""
    found = next((field.stored_columns for field in schema.fields if field.name == name), ())
    return found[0].name if len(found) == 1 else None


def foldable_chains(schema: CollectionSchema) -> ColumnChains:
    """Return the chains whose values may all move to the newest column: numbers, which every engine widens alike."""
    chains = [
        field.stored_columns
        for field in schema.fields
        if field.parsed_type.kind in _NUMBERS and len(field.stored_columns) > 1
    ]
    return tuple(tuple(name for name, _ in chain) for chain in chains)


def fold_chains(rows: pa.Table, chains: ColumnChains) -> pa.Table:
    """Return `rows` with the values of each chain moved to its newest column."""
    for *older, newest in chains:
        place = rows.schema.get_field_index(newest)
        field = rows.schema.field(place)
        values = pc.coalesce(rows[newest], *(widen(rows[name], field.type) for name in reversed(older)))
        rows = rows.set_column(place, field, values)
        for name in older:
            at = rows.schema.get_field_index(name)
            rows = rows.set_column(at, rows.schema.field(at), pa.nulls(rows.num_rows, rows.schema.field(at).type))
    return rows


def sql_columns(names: Iterable[str], chains: ColumnChains) -> str:
    """Return SQL for the columns `names`, in a fixed order, equal whether or not a chain was folded."""
    left = set(names)
    found = []
    for chain in chains:
        there = [name for name in reversed(chain) if name in left]
        left -= set(there)
        found += [f"coalesce({', '.join(map(_quoted, there))})"] if there else []
    return ", ".join([*map(_quoted, sorted(left)), *found])


def to_fields(rows: pa.Table, schema: CollectionSchema, names: Sequence[str] | None = None) -> pa.Table:
    """Return `rows` with fields (`names`, or all) in place of their columns; other columns follow unchanged."""
    chosen = [field for field in schema.fields if names is None or field.name in names]
    if not any(field.columns for field in schema.fields) and not schema.retired:
        return rows
    columns = {each.name for each in all_columns(schema)}
    others = [name for name in rows.column_names if name not in columns]
    values = [*(_values(rows, field) for field in chosen), *(rows[name] for name in others)]
    return pa.table(
        values, pa.schema([*(field.arrow() for field in chosen), *(rows.schema.field(name) for name in others)])
    )


def convert_schema(rows: pa.Table, written: CollectionSchema, wanted: CollectionSchema) -> pa.Table:
    """Convert rows from one schema version to another; fields correspond by their columns.

    Raises as :func:`check_convertible`.
    """
    if written == wanted:
        return rows
    check_convertible(written, wanted)
    places = {field.name: field.stored_columns[-1].name for field in written.fields}
    there = dict(zip([places[name] for name in rows.column_names], rows.columns, strict=True))
    columns = needed_columns(wanted)
    values = [there[each.name] if each.name in there else pa.nulls(rows.num_rows, each.type) for each in columns]
    stored = pa.table(values, pa.schema([each.with_nullable(True) for each in columns]))
    found = to_fields(stored, wanted)
    return pa.table([found[field.name] for field in wanted.fields], wanted.arrow())


def check_convertible(written: CollectionSchema, wanted: CollectionSchema) -> None:
    """Check that rows of version `written` fit version `wanted`.

    Raises InvalidArgument if a field was widened in between.
    """
    if written == wanted:
        return
    known = {name: field.stored_columns for field in wanted.fields for name, _ in field.stored_columns}
    for field in written.fields:
        older = next((known[name] for name, _ in field.stored_columns if name in known), None)
        if older is not None and field.stored_columns[-1] not in older:
            raise InvalidArgument(
                f"field {field.name!r} is {field.type} in these rows, and was {older[-1].type} in the schema that was"
                " asked for: ask for"
                " the newest, or for each message as it was written"
            )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _values(rows: pa.Table, field: FieldSpec) -> pa.ChunkedArray:
    parts = [to_field_type(rows[column.name], column, field) for column in field.stored_columns]
    # Each value is in one column; the newest comes first because it has most values.
    return parts[0] if len(parts) == 1 else pc.coalesce(*reversed(parts))


def to_field_type(values: Any, column: StoredColumn, field: FieldSpec) -> Any:
    """Convert one of a field's columns to the field's type, with its parts under their current names."""
    if all(name != column.name for name, _ in field.part_names):
        return widen(values, field.parsed_type.arrow)
    return convert_nested(values, field.parsed_type_of(column), field.parsed_type, widen)


def widen(values: Any, wide: pa.DataType) -> Any:
    """Convert a column to a wider type; a date becomes its midnight."""
    if values.type == wide:
        return values
    if pa.types.is_date32(values.type):
        days = values.cast(pa.int32()).cast(pa.int64())
        days = pc.min_element_wise(
            pc.max_element_wise(days, -MAX_TIMESTAMP_DAYS, skip_nulls=False), MAX_TIMESTAMP_DAYS, skip_nulls=False
        )
        return pc.multiply(days, 86_400_000_000).cast(wide)
    return values.cast(wide)


def _columns(field: FieldSpec) -> list[pa.Field]:
    alone = len(field.stored_columns) == 1
    return [_column(name, kind, field.nullable or not alone) for name, kind in field.stored_columns]


def _column(name: str, kind: str, nullable: bool) -> pa.Field:
    return pa.field(name, parse_type(kind).arrow, nullable=nullable)
