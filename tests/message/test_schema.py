"""A collection's schema."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from millrace.base.errors import InvalidArgument, Malformed, MillraceError
from millrace.message.field_types import TYPES_BEFORE_V4, FieldType, parse_type
from millrace.message.schema import MAX_FIELDS, CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField, apply_change
from tests.message.samples import schemas, types

KEY = FieldSpec("id", "int64", False)
FLIGHTS = CollectionSchema(
    (KEY, FieldSpec("departed", "timestamp", True), FieldSpec("Gate", "string", True)), "id", "departed"
)


@given(schemas())
def test_a_schema_survives_json_and_arrow(schema: CollectionSchema) -> None:
    assert CollectionSchema.from_json(schema.to_json()) == schema
    plain = {"uuid": "string", "json": "string"}  # annotations, which Arrow's own columns do not keep
    fields = [(field.name, plain.get(field.type, field.type)) for field in schema.fields]
    if not any(scalar.kind in plain for field in schema.fields for scalar in field.parsed_type.scalars()):
        assert (
            CollectionSchema.from_arrow(schema.arrow(), primary_key="key", on_duplicate=schema.on_duplicate) == schema
        )
    elif not any(field.parsed_type.is_nested for field in schema.fields):
        found = CollectionSchema.from_arrow(schema.arrow(), primary_key="key")
        assert [(field.name, field.type) for field in found.fields] == fields
    assert hash(CollectionSchema.from_json(schema.to_json())) == hash(schema)


def test_every_type_has_one_arrow_type_and_comes_back_from_it() -> None:
    for name in (*TYPES_BEFORE_V4, "timestamp_ntz", "decimal(38,38)", "map<date, list<struct<a: decimal(1,0)>>>"):
        assert FieldSpec.from_arrow(pa.field("x", parse_type(name).arrow)).type == name
    assert len(TYPES_BEFORE_V4) == 22
    assert parse_type("timestamp").arrow == pa.timestamp("us", tz="UTC")


@given(types())
def test_a_type_has_one_text_that_names_it(kind: FieldType) -> None:
    assert parse_type(kind.text) == kind
    assert parse_type(kind.text.replace(" ", "  ") if "`" not in kind.text else kind.text) == kind
    assert FieldSpec("x", f" {kind.text}", True).type == kind.text
    assert kind.depth <= 3


def test_what_stands_inside_may_be_null_whether_a_question_mark_says_so_or_not() -> None:
    asked = FieldSpec("x", "list<struct<a:int64?,b : map<string,decimal( 10 , 2)?>>?>", False)
    assert asked.type == "list<struct<a: int64, b: map<string, decimal(10,2)>>>"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "int65",
            "list",
            "list<",
            "list<int8",
            "list<int8>>",
            "list<int8> x",
            "int8?",
            "decimal",
            "decimal()",
        ),
        *("decimal(0,0)", "decimal(39,0)", "decimal(4,5)", "decimal(4,-1)", "decimal(100,1)", "map<int8>", "<int8>"),
        *("map<list<int8>, int8>", "map<struct<a: int8>, int8>", "struct<>", "struct<a>", "struct<a: int8,>"),
        *(
            "struct<a: int8, A: int8>",
            "struct<`_a`: int8>",
            "struct<``: int8>",
            "struct<`a: int8>",
            "null",
            "list<null>",
        ),
        *(
            "list<" * 8 + "int8" + ">" * 8,
            "list<" * 50_000,
            "struct<" + ", ".join(f"f{n}: int8" for n in range(1001)) + ">",
        ),
    ],
)
def test_a_text_that_names_no_type_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        FieldSpec("x", text, True)


def test_a_schema_on_disk_writes_its_types_in_the_one_form() -> None:
    for text in ("list< int8>", "decimal(10, 2)", "map<string,int8>"):
        with pytest.raises(InvalidArgument, match="is written"):
            FieldSpec.from_json({"name": "x", "type": text, "nullable": True})


def test_all_the_scalars_of_a_schema_are_bounded() -> None:
    wide = "struct<" + ", ".join(f"f{place}: int8" for place in range(500)) + ">"
    CollectionSchema((KEY, FieldSpec("a", wide, True)), "id")
    with pytest.raises(InvalidArgument, match="at most 1000 scalars"):
        CollectionSchema((KEY, FieldSpec("a", wide, True), FieldSpec("b", wide, True)), "id")


def test_arrow_types_of_the_same_meaning_become_the_one_type() -> None:
    meant = {
        "string": [pa.large_utf8(), pa.string_view(), pa.dictionary(pa.int32(), pa.utf8())],
        "binary": [pa.large_binary(), pa.binary_view(), pa.binary(4)],
        "timestamp": [pa.timestamp("ns", tz="UTC"), pa.timestamp("ms", tz="Europe/Berlin")],
        "list<string>": [
            *(pa.large_list(pa.large_utf8()), pa.list_(pa.utf8()), pa.list_(pa.utf8(), 3)),
            *(pa.list_view(pa.string_view()), pa.large_list_view(pa.dictionary(pa.int8(), pa.utf8()))),
        ],
        "int16": [pa.uint8(), pa.run_end_encoded(pa.int32(), pa.int16())],
        "int32": [pa.uint16()],
        "int64": [pa.uint32(), pa.time32("s"), pa.time64("ns"), pa.duration("ms")],
        "decimal(20,0)": [pa.uint64(), pa.decimal256(20, 0)],
        "decimal(5,2)": [pa.decimal32(5, 2), pa.decimal64(5, 2)],
        "float32": [pa.float16()],
        "date": [pa.date64()],
        "timestamp_ntz": [pa.timestamp("ns")],
        "uuid": [pa.uuid()],
        "json": [pa.json_()],
        "map<string, decimal(20,0)>": [pa.map_(pa.large_utf8(), pa.uint64())],
        "struct<a: list<int16>>": [pa.struct([("a", pa.list_view(pa.uint8()))])],
    }
    for name, arrows in meant.items():
        for arrow in arrows:
            assert FieldSpec.from_arrow(pa.field("x", arrow)).type == name


@pytest.mark.parametrize(
    "arrow",
    [
        pa.null(),
        pa.list_(pa.null()),
        pa.decimal256(39, 2),
        pa.decimal128(4, -1),
        pa.struct([]),
        pa.map_(pa.list_(pa.int8()), pa.int8()),
        pa.sparse_union([pa.field("a", pa.int8())]),
        pa.month_day_nano_interval(),
    ],
)
def test_an_arrow_type_without_a_field_type_is_refused(arrow: pa.DataType) -> None:
    with pytest.raises(InvalidArgument):
        FieldSpec.from_arrow(pa.field("x", arrow))


def test_the_primary_key_of_an_arrow_schema_becomes_not_nullable() -> None:
    schema = CollectionSchema.from_arrow(pa.schema([("id", pa.int64()), ("v", pa.utf8())]), primary_key="id")
    assert schema.key_fields == (KEY,)
    assert not schema.arrow().field("id").nullable


def test_the_arrow_forms_are_the_rows_and_the_key_alone() -> None:
    assert FLIGHTS.arrow().names == ["id", "departed", "Gate"]
    assert FLIGHTS.key_arrow() == pa.schema([pa.field("id", pa.int64(), nullable=False)])
    assert FLIGHTS.arrow() is FLIGHTS.arrow()


def test_a_field_is_added_behind_the_others() -> None:
    wider = apply_change(FLIGHTS, AddField(FieldSpec("note", "list<string>", True)))
    assert wider.arrow().names == ["id", "departed", "Gate", "note"]
    assert wider.event_time == "departed"
    assert FLIGHTS.arrow().names == ["id", "departed", "Gate"]
    with pytest.raises(InvalidArgument, match="twice"):
        apply_change(FLIGHTS, AddField(FieldSpec("gate", "string", True)))


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
        ((FieldSpec("id", "float64", False),), "id", None),
        ((KEY, FieldSpec("tags", "list<int64>", False)), ("id", "tags"), None),
        ((KEY,), ("id", "id"), None),
        ((KEY,), (), None),
        ((KEY, FieldSpec("ID", "string", True)), "id", None),
        ((KEY,), "id", "id"),
        ((KEY,), "id", "nope"),
        ((KEY, *(FieldSpec(f"f{place}", "int8", True) for place in range(MAX_FIELDS))), "id", None),
    ],
    ids=[
        "no fields",
        "no key",
        "nullable key",
        "key type",
        "nested key",
        "key twice",
        "no names",
        "name twice",
        "event type",
        "no event field",
        "too many",
    ],
)
def test_a_schema_that_cannot_be_is_refused(fields: tuple[FieldSpec, ...], key: Any, event: str | None) -> None:
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
        {"fields": [KEY.to_json()], "primary_key": ["id"]},
        {"fields": [KEY.to_json()], "primary_key": ["id", 1]},
        {"fields": [KEY.to_json()], "primary_key": []},
        {"fields": [KEY.to_json()], "primary_key": "id", "event_time": 1},
        {"fields": [KEY.to_json()], "primary_key": "id", "more": 1},
        {"fields": [KEY.to_json()], "primary_key": "id", "on_duplicate": "keep"},
        {"fields": [KEY.to_json()], "primary_key": "id", "on_duplicate": None},
        {"fields": [KEY.to_json()], "primary_key": "id", "generated_key": True},
        {"fields": [{"name": "id", "type": "uuid", "nullable": False}], "primary_key": "id", "generated_key": False},
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


def test_equal_definitions_are_one_schema_in_memory() -> None:
    said = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id").to_json()
    first = CollectionSchema.from_json(said)
    assert CollectionSchema.from_json(json.loads(json.dumps(said))) is first
    assert CollectionSchema.from_json(said, declared=True) == first
    assert CollectionSchema.from_json(said | {"event_time": None}) == first
