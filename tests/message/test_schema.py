"""A collection's schema."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given

from millrace.base.errors import InvalidArgument, Malformed, MillraceError
from millrace.message.schema import MAX_FIELDS, SCALAR_TYPES, TYPES, CollectionSchema, FieldSpec
from tests.message.samples import schemas

KEY = FieldSpec("id", "int64", False)
FLIGHTS = CollectionSchema(
    (KEY, FieldSpec("departed", "timestamp", True), FieldSpec("Gate", "string", True)), "id", "departed"
)


@given(schemas())
def test_a_schema_survives_json_and_arrow(schema: CollectionSchema) -> None:
    assert CollectionSchema.from_json(schema.to_json()) == schema
    assert CollectionSchema.from_arrow(schema.arrow(), primary_key="key") == schema
    assert hash(CollectionSchema.from_json(schema.to_json())) == hash(schema)


def test_every_type_has_one_arrow_type_and_comes_back_from_it() -> None:
    for name, arrow in TYPES.items():
        assert FieldSpec.from_arrow(pa.field("x", arrow)).type == name
    assert len(TYPES) == 2 * len(SCALAR_TYPES)
    assert TYPES["timestamp"] == pa.timestamp("us", tz="UTC")


def test_arrow_types_of_the_same_meaning_become_the_one_type() -> None:
    meant = {
        "string": [pa.large_utf8(), pa.string_view(), pa.dictionary(pa.int32(), pa.utf8())],
        "binary": [pa.large_binary(), pa.binary_view()],
        "timestamp": [pa.timestamp("ns", tz="UTC"), pa.timestamp("ms", tz="Europe/Berlin")],
        "list<string>": [pa.large_list(pa.large_utf8()), pa.list_(pa.utf8())],
    }
    for name, arrows in meant.items():
        for arrow in arrows:
            assert FieldSpec.from_arrow(pa.field("x", arrow)).type == name


@pytest.mark.parametrize(
    "arrow",
    [
        pa.timestamp("us"),
        pa.uint64(),
        pa.decimal128(10, 2),
        pa.struct([("a", pa.int64())]),
        pa.list_(pa.list_(pa.int8())),
        pa.null(),
    ],
)
def test_an_arrow_type_without_a_field_type_is_refused(arrow: pa.DataType) -> None:
    with pytest.raises(InvalidArgument):
        FieldSpec.from_arrow(pa.field("x", arrow))


def test_the_primary_key_of_an_arrow_schema_becomes_not_nullable() -> None:
    schema = CollectionSchema.from_arrow(pa.schema([("id", pa.int64()), ("v", pa.utf8())]), primary_key="id")
    assert schema.key_field == KEY
    assert not schema.arrow().field("id").nullable


def test_the_arrow_forms_are_the_rows_and_the_key_alone() -> None:
    assert FLIGHTS.arrow().names == ["id", "departed", "Gate"]
    assert FLIGHTS.key_arrow() == pa.schema([pa.field("id", pa.int64(), nullable=False)])
    assert FLIGHTS.arrow() is FLIGHTS.arrow()


def test_a_field_is_added_behind_the_others() -> None:
    wider = FLIGHTS.with_field(FieldSpec("note", "list<string>", True))
    assert wider.arrow().names == ["id", "departed", "Gate", "note"]
    assert wider.event_time == "departed"
    assert FLIGHTS.arrow().names == ["id", "departed", "Gate"]
    with pytest.raises(InvalidArgument, match="twice"):
        FLIGHTS.with_field(FieldSpec("gate", "string", True))


@pytest.mark.parametrize("name", ["", "_id", "x" * 129, "a\nb", "\ud800"])
def test_a_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        FieldSpec(name, "int64", True)


@pytest.mark.parametrize(
    ("fields", "key", "event"),
    [
        ((), "id", None),
        ((KEY,), "nope", None),
        ((FieldSpec("id", "int64", True),), "id", None),
        ((FieldSpec("id", "int32", False),), "id", None),
        ((KEY, FieldSpec("ID", "string", True)), "id", None),
        ((KEY,), "id", "id"),
        ((KEY,), "id", "nope"),
        ((KEY, *(FieldSpec(f"f{place}", "int8", True) for place in range(MAX_FIELDS))), "id", None),
    ],
    ids=["no fields", "no key", "nullable key", "key type", "name twice", "event type", "no event field", "too many"],
)
def test_a_schema_that_cannot_be_is_refused(fields: tuple[FieldSpec, ...], key: str, event: str | None) -> None:
    with pytest.raises(InvalidArgument):
        CollectionSchema(fields, key, event)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"fields": [], "primary_key": "id"},
        {"fields": {}, "primary_key": "id"},
        {"fields": [KEY.to_json()], "primary_key": 1},
        {"fields": [KEY.to_json()], "primary_key": "id", "event_time": 1},
        {"fields": [KEY.to_json()], "primary_key": "id", "more": 1},
        {"fields": [None], "primary_key": "id"},
        {"fields": [{"name": "id", "type": "int64"}], "primary_key": "id"},
        {"fields": [{"name": "id", "type": "int64", "nullable": 0}], "primary_key": "id"},
        {"fields": [{"name": "id", "type": ["int64"], "nullable": False}], "primary_key": "id"},
        {"fields": [{"name": "id", "type": "uint64", "nullable": False}], "primary_key": "id"},
    ],
)
def test_json_of_another_shape_is_a_typed_error(value: object) -> None:
    with pytest.raises((InvalidArgument, Malformed)) as caught:
        CollectionSchema.from_json(value)
    assert isinstance(caught.value, MillraceError)
