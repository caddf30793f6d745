"""Strategies and small makers that the tests of the message model share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from millrace.message.field_types import SCALAR_TYPES, FieldType
from millrace.message.log_entries import ENTRY_SCHEMA
from millrace.message.model import MutableMessage
from millrace.message.schema import ON_DUPLICATE, CollectionSchema, FieldSpec

INT63 = (1 << 63) - 1
INT31 = (1 << 31) - 1

HEADER = (
    "type",
    "vchannel",
    "term",
    "collection_id",
    "partition_id",
    "schema_version",
    "rows",
    "txn_id",
    "producer_id",
    "epoch",
    "sequence",
    "barrier_tick",
    "payload",
)
"""Fields of a MutableMessage."""


def entries(values: Sequence[bytes]) -> pa.RecordBatch:
    """A run of log entries 0:0, 0:1, ... with append stamps 1000, 1001, ..."""
    count = len(values)
    columns = [[0] * count, list(range(count)), list(range(1000, 1000 + count)), list(values)]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, ENTRY_SCHEMA, strict=True)], schema=ENTRY_SCHEMA
    )


def header_values(greatest: int) -> st.SearchStrategy[int]:
    """Values of a header column: mostly 0, sometimes anything up to its greatest."""
    return st.one_of(st.just(0), st.integers(0, 3), st.integers(0, greatest))


def vchannel_names() -> st.SearchStrategy[str]:
    return st.one_of(
        st.sampled_from(["", "pc0_7v0", "pc0_7v1"]), st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
    )


def messages() -> st.SearchStrategy[MutableMessage]:
    """Any message that the wire form can carry."""
    return st.builds(
        MutableMessage,
        type=st.one_of(st.sampled_from([400, 401, 1200]), st.integers(1, 65535)),
        vchannel=vchannel_names(),
        term=header_values(INT63),
        collection_id=header_values(INT63),
        partition_id=header_values(INT63),
        schema_version=header_values(INT31),
        rows=header_values(INT63),
        txn_id=header_values(INT63),
        producer_id=header_values(INT63),
        epoch=header_values(INT31),
        sequence=header_values(INT63),
        barrier_tick=header_values(INT63),
        payload=st.binary(max_size=40),
    )


def runs() -> st.SearchStrategy[list[MutableMessage]]:
    """Messages of one entry: unrelated ones, and a producer's run with consecutive sequences."""

    def producer_run(base: MutableMessage, count: int) -> list[MutableMessage]:
        first = min(base.sequence, INT63 - count)
        return [replace(base, sequence=first + place) for place in range(count)]

    return st.one_of(
        st.lists(messages(), min_size=1, max_size=12), st.builds(producer_run, messages(), st.integers(1, 40))
    )


EXACT = Context(prec=38)

_VALUES: dict[str, st.SearchStrategy[object]] = {
    "bool": st.booleans(),
    "int8": st.integers(-128, 127),
    "int16": st.integers(-(1 << 15), (1 << 15) - 1),
    "int32": st.integers(-(1 << 31), INT31),
    "int64": st.integers(-(1 << 63), INT63),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "binary": st.binary(max_size=8),
    "date": st.integers(-100_000, 100_000),
    "timestamp": st.integers(-(1 << 55), 1 << 55),
    "timestamp_ntz": st.integers(-(1 << 55), 1 << 55),
    "uuid": st.uuids().map(str),
    "json": st.sampled_from(["null", "{}", '{"a": [1, 2.5, "x"]}']),
}


def types() -> st.SearchStrategy[FieldType]:
    """A field's type, of three levels at most."""
    decimals = st.integers(1, 38).flatmap(
        lambda digits: st.builds(FieldType, st.just("decimal"), precision=st.just(digits), scale=st.integers(0, digits))
    )
    scalars = st.one_of(st.sampled_from([FieldType(name) for name in SCALAR_TYPES]), decimals)

    def wider(inner: st.SearchStrategy[FieldType]) -> st.SearchStrategy[FieldType]:
        return st.one_of(
            inner.map(lambda item: FieldType("list", (item,))),
            st.tuples(scalars, inner).map(lambda pair: FieldType("map", pair)),
            st.lists(inner, min_size=1, max_size=3).map(
                lambda parts: FieldType("struct", tuple(parts), ("a", "B c", "d`>")[: len(parts)])
            ),
        )

    return st.one_of(scalars, wider(scalars), wider(wider(scalars)))


def values_of(kind: FieldType) -> st.SearchStrategy[Any]:
    """Python values of a field type (dates and timestamps as their integers)."""
    inner = [st.one_of(st.none(), values_of(each)) for each in kind.children]
    match kind.kind:
        case "list":
            return st.lists(inner[0], max_size=4)
        case "map":
            return st.lists(st.tuples(values_of(kind.children[0]), inner[1]), max_size=3)
        case "struct":
            return st.fixed_dictionaries(dict(zip(kind.names, inner, strict=True)))
        case "decimal":
            most = 10**kind.precision - 1
            return st.integers(-most, most).map(lambda digits: Decimal(digits).scaleb(-kind.scale, EXACT))
        case _:
            return _VALUES[kind.kind]


def column(kind: FieldType, values: Sequence[Any]) -> pa.Array:
    """An Arrow column of a field type from the values of :func:`values_of`."""
    return pa.array(values, _storage(kind)).cast(kind.arrow)


def _storage(kind: FieldType) -> pa.DataType:
    inner = [_storage(each) for each in kind.children]
    match kind.kind:
        case "list":
            return pa.list_(inner[0])
        case "map":
            return pa.map_(*inner)
        case "struct":
            return pa.struct(list(zip(kind.names, inner, strict=True)))
        case "date":
            return pa.int32()
        case "timestamp" | "timestamp_ntz":
            return pa.int64()
        case _:
            return kind.arrow


@st.composite
def schemas(draw: st.DrawFn) -> CollectionSchema:
    """A schema of one to five fields of any types, the key anywhere among them."""
    others = draw(st.lists(st.tuples(types(), st.booleans()), max_size=4))
    fields = [FieldSpec(f"f{place}", kind.text, nullable) for place, (kind, nullable) in enumerate(others)]
    fields.insert(
        draw(st.integers(0, len(fields))), FieldSpec("key", draw(st.sampled_from(["int64", "string"])), False)
    )
    return CollectionSchema(tuple(fields), "key", on_duplicate=draw(st.sampled_from(ON_DUPLICATE)))


@st.composite
def batches(draw: st.DrawFn, schema: CollectionSchema, max_rows: int = 6) -> pa.RecordBatch:
    """One to `max_rows` rows of a schema."""
    count = draw(st.integers(1, max_rows))
    columns = []
    for field in schema.fields:
        one = values_of(field.parsed_type)
        one = st.one_of(st.none(), one) if field.nullable else one
        columns.append(column(field.parsed_type, draw(st.lists(one, min_size=count, max_size=count))))
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow())
