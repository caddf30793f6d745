"""Changes of a schema: what each makes of it, what none may, and that columns of tables only become more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.bodies import MAX_BODY_BYTES, encode_body, parse_body
from millrace.message.field_types import FieldType, parse_type
from millrace.message.schema import CollectionSchema, FieldSpec, StoredColumn
from millrace.message.schema_changes import (
    MAX_CHANGES,
    AddField,
    DropField,
    DropNestedField,
    MakeNullable,
    RenameField,
    RenameNestedField,
    ReorderFields,
    SchemaChange,
    WidenField,
    apply_change,
    apply_changes,
    change_from_json,
    change_to_json,
    widens,
)
from millrace.message.stored_columns import all_columns, needed_columns, to_field_type, written_columns
from millrace.message.types import MessageType
from tests.laws.profile import examples

ORDERS = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("day", "date", False),
        FieldSpec("price", "decimal(10,2)", False),
        FieldSpec("count", "int32", True),
    ),
    "id",
    "day",
)


def names(schema: CollectionSchema) -> list[str]:
    return [each.name for each in schema.fields]


def test_each_change_does_what_it_says() -> None:
    assert names(apply_change(ORDERS, AddField(FieldSpec("note", "string", True)))) == [
        "id",
        "day",
        "price",
        "count",
        "note",
    ]
    assert names(apply_change(ORDERS, DropField("count"))) == ["id", "day", "price"]
    assert names(apply_change(ORDERS, ReorderFields(("count", "day")))) == ["count", "day", "id", "price"]
    assert apply_change(ORDERS, MakeNullable("price")).fields[2] == FieldSpec("price", "decimal(10,2)", True)
    assert apply_change(ORDERS, WidenField("count", "int64")).fields[3].type == "int64"
    renamed = apply_changes(ORDERS, [RenameField("id", "key"), RenameField("day", "on")])
    assert (renamed.primary_key, renamed.event_time, names(renamed)) == ("key", "on", ["key", "on", "price", "count"])


def test_columns_keep_their_names_and_types_and_only_become_more() -> None:
    changed = apply_changes(
        ORDERS,
        [
            RenameField("count", "pieces"),
            WidenField("pieces", "int64"),
            AddField(FieldSpec("count", "string", True)),  # its name is taken by a column of another
            DropField("count"),
            AddField(FieldSpec("COUNT", "bool", True)),  # Spark knows columns in any case
        ],
    )
    stored = {field.name: [tuple(each) for each in field.stored_columns] for field in changed.fields}
    assert stored["pieces"] == [("count", "int32"), ("count__2", "int64")]
    assert stored["COUNT"] == [("COUNT__4", "bool")]
    assert [tuple(each) for each in changed.retired] == [("count__3", "string")]
    assert [each.name for each in written_columns(changed)] == ["id", "day", "price", "count__2", "COUNT__4"]
    assert [each.name for each in all_columns(changed)] == [
        "id",
        "day",
        "price",
        "count",
        "count__2",
        "COUNT__4",
        "count__3",
    ]
    assert [each.nullable for each in needed_columns(changed)] == [False, False, False, True, True, True]
    assert CollectionSchema.from_json(changed.to_json()) == changed


def test_what_never_changed_but_by_added_fields_says_nothing_of_columns() -> None:
    added = apply_change(ORDERS, AddField(FieldSpec("note", "string", True)))
    assert "columns" not in str(added.to_json())
    assert "retired" not in added.to_json()
    back = apply_changes(ORDERS, [RenameField("count", "pieces"), RenameField("pieces", "count")])
    assert back == ORDERS
    assert added.as_declared() is not added
    assert added.as_declared() == added
    assert apply_change(ORDERS, DropField("count")).as_declared().retired == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (DropField("id"), "primary key"),
        (MakeNullable("id"), "primary key"),
        (WidenField("id", "decimal(20,0)"), "primary key"),
        (DropField("day"), "event time"),
        (WidenField("day", "timestamp_ntz"), "event time"),
        (DropField("nothing"), "there is no field 'nothing'; there are id, day"),
        (RenameField("price", "ID"), "appears twice"),
        (RenameField("price", "_x"), "underscore"),
        (AddField(FieldSpec("more", "int8", False)), "must be nullable"),
        (AddField(FieldSpec("price", "int8", True)), "appears twice"),
        (WidenField("count", "int16"), "cannot become int16"),
        (WidenField("count", "string"), "cannot become string"),
        (WidenField("count", "int32"), "cannot become"),
        (WidenField("count", "whatever"), "unknown type"),
        (WidenField("price", "decimal(10,3)"), "cannot become"),
        (ReorderFields(("count", "count")), "once"),
        (ReorderFields(("count", "other")), "no field 'other'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(change: SchemaChange, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        apply_change(ORDERS, change)


@pytest.mark.parametrize(
    ("narrow", "wide", "does"),
    [
        ("int8", "int64", True),
        ("int64", "int32", False),
        ("int32", "float64", False),
        ("float32", "float64", True),
        ("date", "timestamp", True),
        ("date", "timestamp_ntz", True),
        ("timestamp", "timestamp_ntz", False),
        ("decimal(10,2)", "decimal(12,4)", True),
        ("decimal(10,2)", "decimal(11,4)", False),
        ("decimal(10,2)", "decimal(10,2)", False),
        ("list<int8>", "list<int16>", True),
        ("list<date>", "list<timestamp>", False),
        ("map<string, float32>", "map<string, float64>", True),
        ("map<int32, float32>", "map<int64, float32>", False),
        ("struct<a: int8>", "struct<b: string, a: int16>", True),
        ("struct<a: int8, b: string>", "struct<a: int8>", False),
        ("struct<a: int8>", "struct<a: string>", False),
    ],
)
def test_a_type_becomes_one_that_holds_all_its_values(narrow: str, wide: str, does: bool) -> None:
    assert widens(parse_type(narrow), parse_type(wide)) is does


def test_a_table_has_room_for_so_many_columns() -> None:
    more = [AddField(FieldSpec("x", "bool", True)), DropField("x")]
    schema = apply_changes(ORDERS, more * 1_996)
    assert len(all_columns(schema)) == 2_000
    with pytest.raises(InvalidArgument, match="takes"):
        apply_changes(schema, more)


EVERY_CHANGE: list[SchemaChange] = [
    AddField(FieldSpec("note", "string", True)),
    DropField("a"),
    RenameField("a", "b"),
    ReorderFields(("a", "b")),
    WidenField("a", "int64"),
    MakeNullable("a"),
    RenameNestedField("a", ("b", "c"), "d"),
    DropNestedField("a", ("b",)),
]


def test_a_message_says_every_change() -> None:
    body = {"changes": [change_to_json(each) for each in EVERY_CHANGE]}
    assert parse_body(MessageType.SCHEMA_CHANGE, encode_body(body)) == {"changes": EVERY_CHANGE}


@pytest.mark.parametrize(
    "body",
    [
        {"changes": []},
        {"changes": {}},
        {"changes": [change_to_json(DropField("a"))] * (MAX_CHANGES + 1)},
        {"changes": [change_to_json(DropField("a"))], "add": FieldSpec("x", "bool", True).to_json()},
        {"changes": [{"op": "drop"}]},
        {"changes": [{"op": "drop", "name": 1}]},
        {"changes": [{"op": "drop", "name": "a", "to": "b"}]},
        {"changes": [{"op": ["drop"], "name": "a"}]},
        {"changes": [{"op": "reorder", "names": "a"}]},
        {"changes": [{"op": "add", "field": {**FieldSpec("x", "bool", True).to_json(), "columns": [["y", "bool"]]}}]},
        {"changes": ["drop"]},
        {"changes": [{"op": "drop_part", "name": "a", "path": []}]},
        {"changes": [{"op": "drop_part", "name": "a", "path": ["b"] * 8}]},
        {"changes": [{"op": "drop_part", "name": "a", "path": "b"}]},
        {"changes": [{"op": "rename_part", "name": "a", "path": ["b"], "to": None}]},
        {"add": {**FieldSpec("x", "bool", True).to_json(), "columns": [["y", "bool"]]}},
    ],
)
def test_a_message_that_says_anything_else_is_malformed(body: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        parse_body(MessageType.SCHEMA_CHANGE, encode_body(body)[:MAX_BODY_BYTES])


FIELDS = st.sampled_from(["id", "day", "price", "count", "a", "b", "A"])
CHANGES = st.one_of(
    st.builds(
        lambda name, kind: AddField(FieldSpec(name, kind, True)), FIELDS, st.sampled_from(["int8", "date", "float32"])
    ),
    st.builds(DropField, FIELDS),
    st.builds(RenameField, FIELDS, FIELDS),
    st.builds(lambda found: ReorderFields(tuple(found)), st.lists(FIELDS, max_size=4)),
    st.builds(
        WidenField, FIELDS, st.sampled_from(["int16", "int32", "int64", "float64", "timestamp", "decimal(20,4)"])
    ),
    st.builds(MakeNullable, FIELDS),
)


@given(st.lists(CHANGES, max_size=25))
def test_any_changes_leave_a_valid_schema_over_columns_that_stay(wanted: list[SchemaChange]) -> None:
    schema = ORDERS
    for change in wanted:
        assert change_from_json(change_to_json(change)) == change
        try:
            after = apply_change(schema, change)
        except InvalidArgument:
            continue
        before = {each.name: each.type for each in all_columns(schema)}
        columns = {each.name: each.type for each in all_columns(after)}
        assert before.items() <= columns.items()
        assert len({name.casefold() for name in columns}) == len(all_columns(after))
        assert CollectionSchema.from_json(after.to_json()) == after
        assert [each.type for each in written_columns(after)] == [each.type for each in after.arrow()]
        assert after.key_fields[0].stored_columns == (("id", "int64"),)
        schema = after


INSIDE = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("at", "struct<x: int8, deep: list<struct<day: date, zip: string>>>", True),
        FieldSpec("by", "map<string, struct<n: int8, m: int8>>", True),
    ),
    "id",
)


def test_a_part_that_is_renamed_or_dropped_leaves_older_columns_with_the_names_of_now() -> None:
    changed = apply_changes(
        INSIDE,
        [
            RenameNestedField("at", ("deep", "zip"), "code"),
            DropNestedField("at", ("x",)),
            WidenField("at", "struct<deep: list<struct<day: date, code: string, zip: int8>>, x: string>"),
            RenameNestedField("at", ("deep",), "far"),
            DropNestedField("by", ("m",)),
            RenameField("by", "of"),
        ],
    )
    at, of = changed.fields[1:]
    assert at.type == "struct<far: list<struct<day: date, code: string, zip: int8>>, x: string>"
    assert [each.name for each in at.stored_columns] == ["at", "at__2", "at__3", "at__4", "at__5"]
    assert dict(at.part_names) == {
        "at": (None, "far", "day", "code"),
        "at__2": (None, "far", "day", "code"),
        "at__3": ("far", "day", "code"),
        "at__4": ("far", "day", "code", "zip", "x"),
    }
    assert (of.type, dict(of.part_names)) == ("map<string, struct<n: int8>>", {"by": ("n", None)})
    assert CollectionSchema.from_json(changed.to_json()) == changed
    assert changed.as_declared().fields[1] == FieldSpec("at", at.type, True)
    assert apply_change(changed, DropField("at")).retired == at.stored_columns
    back = apply_changes(INSIDE, [RenameNestedField("by", ("n",), "q"), RenameNestedField("by", ("q",), "n")])
    assert dict(back.fields[2].part_names) == {"by__2": ("n", "m")}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"other": ["a"]}, "by column"),
        ({"at": ["a"]}, "by column"),
        ([], "by column"),
        ({"at": [1, "b"]}, "non-empty name"),
    ],
)
def test_names_of_parts_that_cannot_be_are_malformed(parts: Any, words: str) -> None:
    field = FieldSpec("at", "struct<x: int8, y: int8>", True).to_json() | {
        "columns": [["at", "struct<x: int8, z: int8>"], ["at__2", "struct<x: int8, y: int8>"]]
    }
    assert FieldSpec.from_json(field | {"parts": {"at": ["x", "y"]}}).parsed_type_of(
        StoredColumn("at", "struct<x: int8, z: int8>")
    )
    with pytest.raises((Malformed, InvalidArgument), match=words):
        FieldSpec.from_json(field | {"parts": parts})


TREES = st.recursive(
    st.sampled_from(["int8", "int16", "string"]),
    lambda inner: st.one_of(
        st.builds("list<{}>".format, inner),
        st.builds("map<string, {}>".format, inner),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: f"struct<{', '.join(f'{name}: {kind}' for name, kind in zip('abc', kinds, strict=False))}>"
        ),
    ),
    max_leaves=6,
)


def value_of(kind: FieldType, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """A value of a type in plain Python, each part under a number that it keeps through every rename."""
    if draw(st.integers(0, 4)) == 0:
        return None
    match kind.kind:
        case "struct":
            return {name: value_of(each, draw) for name, each in zip(kind.names, kind.children, strict=True)}
        case "list":
            return [value_of(kind.children[0], draw) for _ in range(draw(st.integers(0, 2)))]
        case "map":
            return [(key, value_of(kind.children[1], draw)) for key in "xy"[: draw(st.integers(0, 2))]]
        case "string":
            return draw(st.text(max_size=2))
    return draw(st.integers(-128, 127))


def paths_in(kind: FieldType) -> list[tuple[str, ...]]:
    if kind.kind == "struct":
        parts = list(zip(kind.names, kind.children, strict=True))
        return [path for name, each in parts for path in [(name,), *((name, *rest) for rest in paths_in(each))]]
    return paths_in(kind.children[-1]) if kind.children else []


def by_hand(value: Any, kind: FieldType, path: tuple[str, ...], to: str | None) -> Any:
    """The value once a part of it has another name, or is gone."""
    if value is None:
        return None
    match kind.kind:
        case "list":
            return [by_hand(each, kind.children[0], path, to) for each in value]
        case "map":
            return [(key, by_hand(each, kind.children[1], path, to)) for key, each in value]
    found = {}
    for (name, held), inner in zip(value.items(), kind.children, strict=True):
        if name != path[0]:
            found[name] = held
        elif len(path) > 1:
            found[name] = by_hand(held, inner, path[1:], to)
        elif to is not None:
            found[to] = held
    return found


@examples(60)
@given(TREES, st.data())
def test_values_follow_any_renames_and_drops_inside_of_their_field(kind: str, data: st.DataObject) -> None:
    wanted: CollectionSchema = CollectionSchema(
        (FieldSpec("id", "int64", False), FieldSpec("at", f"struct<a: {kind}, q: int8>", True)), "id"
    )
    field = wanted.fields[1]
    values = [value_of(field.parsed_type, data.draw) for _ in range(data.draw(st.integers(0, 5)))]
    stored = pa.chunked_array([pa.array(values, field.parsed_type.arrow)])
    for number in range(data.draw(st.integers(1, 5))):
        path = data.draw(st.sampled_from(paths_in(wanted.fields[1].parsed_type)))
        change: SchemaChange = RenameNestedField("at", path, data.draw(st.sampled_from(["a", "b", f"n{number}"])))
        if data.draw(st.booleans()):
            change = DropNestedField("at", path)
        try:
            after = apply_change(wanted, change)
        except InvalidArgument:
            continue
        before, wanted = wanted.fields[1].parsed_type, after
        values = [
            by_hand(each, before, path, change.to if isinstance(change, RenameNestedField) else None) for each in values
        ]
    cut = data.draw(st.integers(0, len(values)))
    for piece, expected in ((stored, values), (stored.slice(cut), values[cut:])):
        found = to_field_type(piece, field.stored_columns[0], wanted.fields[1])
        assert found.type == wanted.fields[1].parsed_type.arrow
        found.validate(full=True)
        assert found.to_pylist() == expected
