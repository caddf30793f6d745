"""Schema evolution: the changes with which a schema fits given rows.

Changes only add fields and widen types. A field whose values fit stays unchanged. If no wider type fits, no change is
returned, and sending the rows raises the usual error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.client.produce.column_conversion import (
    CONVERSION_ERRORS,
    array_of,
    from_arrow,
    from_python,
    needs_declared_type,
)
from millrace.client.produce.frames import is_from_library
from millrace.client.produce.rows import Rows, rows_to_columns, table_of
from millrace.client.schemas import arrow_schema
from millrace.message.field_types import MAX_PRECISION, FieldType, type_of_arrow
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField, SchemaChange, WidenField, widens


def required_changes(rows: Rows, schema: CollectionSchema) -> list[SchemaChange]:
    """Return the changes with which `schema` fits `rows`.

    For a stream, a relation or a Spark DataFrame, only the types count. Raises InvalidArgument for a column without
    typed values.
    """
    if isinstance(rows, list | tuple) and not any(isinstance(each, pa.RecordBatch | pa.Table) for each in rows):
        rows = rows_to_columns(rows)
    elif is_from_library(rows, "pandas") or is_from_library(rows, "polars"):
        rows = table_of(rows)
    if isinstance(rows, pa.Table | pa.RecordBatch):
        return _of_columns(dict(zip(rows.schema.names, rows.columns, strict=True)), schema)
    if isinstance(rows, Mapping):
        return _of_columns(rows, schema)
    if isinstance(rows, Iterable) and not hasattr(rows, "__arrow_c_stream__") and not hasattr(rows, "columns"):
        raise InvalidArgument(
            "an iterator of batches has no types before it is read: give a reader, a table or a DataFrame"
        )
    return required_field_changes([FieldSpec.from_arrow(field) for field in arrow_schema(rows)], schema)


def required_field_changes(fields: Iterable[FieldSpec], schema: CollectionSchema) -> list[SchemaChange]:
    """Return the changes with which `schema` fits rows of `fields`, by their types."""
    known = {field.name: field for field in schema.fields}
    made: list[SchemaChange] = []
    for field in fields:
        if field.name not in known:
            made.append(AddField(FieldSpec(field.name, field.type, True)))
            continue
        here = known[field.name].parsed_type
        wide = _joined(here, field.parsed_type, widen=True)
        if widens(here, wide):
            made.append(WidenField(field.name, wide.text))
    return made


def _of_columns(columns: Mapping[str, Any], schema: CollectionSchema) -> list[SchemaChange]:
    known = {field.name: field for field in schema.fields}
    made: list[SchemaChange] = []
    for name, given in columns.items():
        if name in known and _fits(given, known[name].parsed_type):
            continue
        try:
            values = given if isinstance(given, pa.Array | pa.ChunkedArray) else array_of(given)
        except CONVERSION_ERRORS as error:
            raise InvalidArgument(f"the column {name!r} is not a list of values of one type: {error}") from None
        found = type_of_arrow(name, values.type)
        if name not in known:
            made.append(AddField(FieldSpec(name, found.text, True)))
            continue
        here = known[name].parsed_type
        for wide in (_joined(here, found, widen=False), _joined(here, found, widen=True)):
            if widens(here, wide) and _fits(given, wide):
                made.append(WidenField(name, wide.text))
                break
    return made


def _fits(values: Any, kind: FieldType) -> bool:
    try:
        if isinstance(values, pa.Array | pa.ChunkedArray):
            from_arrow(values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values]), kind)
        elif needs_declared_type(kind):
            from_python(values, kind)
        else:
            from_arrow(pa.chunked_array([array_of(values)]), kind)
    except CONVERSION_ERRORS:
        return False
    return True


def _joined(here: FieldType, found: FieldType, *, widen: bool) -> FieldType:
    """Merge types: add the struct fields that only `found` has and, with `widen`, widen the scalars."""
    if here.kind == found.kind == "decimal" and widen:
        scale = max(here.scale, found.scale)
        whole = max(here.precision - here.scale, found.precision - found.scale)
        return FieldType("decimal", precision=whole + scale, scale=scale) if whole + scale <= MAX_PRECISION else here
    if here.kind != found.kind or not here.is_nested:
        return found if widen and widens(here, found) else here
    if here.kind != "struct":
        key = here.children[:-1]
        return FieldType(here.kind, (*key, _joined(here.children[-1], found.children[-1], widen=widen)))
    theirs = dict(zip(found.names, found.children, strict=True))
    mine = [
        _joined(each, theirs.get(name, each), widen=widen) for name, each in zip(here.names, here.children, strict=True)
    ]
    more = {name: each for name, each in theirs.items() if name not in here.names}
    return FieldType("struct", (*mine, *more.values()), (*here.names, *more))
