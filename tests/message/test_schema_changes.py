"""Changes of a schema: what each makes of it, what none may, and that columns of tables only become more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.bodies import MAX_BODY_BYTES, encode_body, parse_body
from millrace.message.field_types import parse_type
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import (
    MAX_CHANGES,
    Add,
    Change,
    Drop,
    Relax,
    Rename,
    Reorder,
    Widen,
    apply,
    apply_all,
    from_json,
    to_json,
    widens,
)
from millrace.message.stored_columns import every, needed, written
from millrace.message.types import MessageType

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
    assert names(apply(ORDERS, Add(FieldSpec("note", "string", True)))) == ["id", "day", "price", "count", "note"]
    assert names(apply(ORDERS, Drop("count"))) == ["id", "day", "price"]
    assert names(apply(ORDERS, Reorder(("count", "day")))) == ["count", "day", "id", "price"]
    assert apply(ORDERS, Relax("price")).fields[2] == FieldSpec("price", "decimal(10,2)", True)
    assert apply(ORDERS, Widen("count", "int64")).fields[3].type == "int64"
    renamed = apply_all(ORDERS, [Rename("id", "key"), Rename("day", "on")])
    assert (renamed.primary_key, renamed.event_time, names(renamed)) == ("key", "on", ["key", "on", "price", "count"])


def test_columns_keep_their_names_and_types_and_only_become_more() -> None:
    changed = apply_all(
        ORDERS,
        [
            Rename("count", "pieces"),
            Widen("pieces", "int64"),
            Add(FieldSpec("count", "string", True)),  # its name is taken by a column of another
            Drop("count"),
            Add(FieldSpec("COUNT", "bool", True)),  # Spark knows columns in any case
        ],
    )
    stored = {field.name: [tuple(each) for each in field.stored] for field in changed.fields}
    assert stored["pieces"] == [("count", "int32"), ("count__2", "int64")]
    assert stored["COUNT"] == [("COUNT__4", "bool")]
    assert [tuple(each) for each in changed.retired] == [("count__3", "string")]
    assert [each.name for each in written(changed)] == ["id", "day", "price", "count__2", "COUNT__4"]
    assert [each.name for each in every(changed)] == ["id", "day", "price", "count", "count__2", "COUNT__4", "count__3"]
    assert [each.nullable for each in needed(changed)] == [False, False, False, True, True, True]
    assert CollectionSchema.from_json(changed.to_json()) == changed


def test_what_never_changed_but_by_added_fields_says_nothing_of_columns() -> None:
    added = apply(ORDERS, Add(FieldSpec("note", "string", True)))
    assert "columns" not in str(added.to_json())
    assert "retired" not in added.to_json()
    back = apply_all(ORDERS, [Rename("count", "pieces"), Rename("pieces", "count")])
    assert back == ORDERS
    assert added.declared() is not added
    assert added.declared() == added
    assert apply(ORDERS, Drop("count")).declared().retired == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Drop("id"), "primary key"),
        (Relax("id"), "primary key"),
        (Widen("id", "decimal(20,0)"), "primary key"),
        (Drop("day"), "event time"),
        (Widen("day", "timestamp_ntz"), "event time"),
        (Drop("nothing"), "there is no field 'nothing'; there are id, day"),
        (Rename("price", "ID"), "stands twice"),
        (Rename("price", "_x"), "underscore"),
        (Add(FieldSpec("more", "int8", False)), "must be nullable"),
        (Add(FieldSpec("price", "int8", True)), "stands twice"),
        (Widen("count", "int16"), "cannot become int16"),
        (Widen("count", "string"), "cannot become string"),
        (Widen("count", "int32"), "cannot become"),
        (Widen("count", "whatever"), "unknown type"),
        (Widen("price", "decimal(10,3)"), "cannot become"),
        (Reorder(("count", "count")), "once"),
        (Reorder(("count", "other")), "no field 'other'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(change: Change, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        apply(ORDERS, change)


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
    more = [Add(FieldSpec("x", "bool", True)), Drop("x")]
    schema = apply_all(ORDERS, more * 1_996)
    assert len(every(schema)) == 2_000
    with pytest.raises(InvalidArgument, match="takes"):
        apply_all(schema, more)


EVERY_CHANGE: list[Change] = [
    Add(FieldSpec("note", "string", True)),
    Drop("a"),
    Rename("a", "b"),
    Reorder(("a", "b")),
    Widen("a", "int64"),
    Relax("a"),
]


def test_a_message_says_every_change() -> None:
    body = {"changes": [to_json(each) for each in EVERY_CHANGE]}
    assert parse_body(MessageType.SCHEMA_CHANGE, encode_body(body)) == {"changes": EVERY_CHANGE}


@pytest.mark.parametrize(
    "body",
    [
        {"changes": []},
        {"changes": {}},
        {"changes": [to_json(Drop("a"))] * (MAX_CHANGES + 1)},
        {"changes": [to_json(Drop("a"))], "add": FieldSpec("x", "bool", True).to_json()},
        {"changes": [{"op": "drop"}]},
        {"changes": [{"op": "drop", "name": 1}]},
        {"changes": [{"op": "drop", "name": "a", "to": "b"}]},
        {"changes": [{"op": ["drop"], "name": "a"}]},
        {"changes": [{"op": "reorder", "names": "a"}]},
        {"changes": [{"op": "add", "field": {**FieldSpec("x", "bool", True).to_json(), "columns": [["y", "bool"]]}}]},
        {"changes": ["drop"]},
        {"add": {**FieldSpec("x", "bool", True).to_json(), "columns": [["y", "bool"]]}},
    ],
)
def test_a_message_that_says_anything_else_is_malformed(body: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        parse_body(MessageType.SCHEMA_CHANGE, encode_body(body)[:MAX_BODY_BYTES])


FIELDS = st.sampled_from(["id", "day", "price", "count", "a", "b", "A"])
CHANGES = st.one_of(
    st.builds(
        lambda name, kind: Add(FieldSpec(name, kind, True)), FIELDS, st.sampled_from(["int8", "date", "float32"])
    ),
    st.builds(Drop, FIELDS),
    st.builds(Rename, FIELDS, FIELDS),
    st.builds(lambda found: Reorder(tuple(found)), st.lists(FIELDS, max_size=4)),
    st.builds(Widen, FIELDS, st.sampled_from(["int16", "int32", "int64", "float64", "timestamp", "decimal(20,4)"])),
    st.builds(Relax, FIELDS),
)


@given(st.lists(CHANGES, max_size=25))
def test_any_changes_leave_a_valid_schema_over_columns_that_stay(wanted: list[Change]) -> None:
    schema = ORDERS
    for change in wanted:
        assert from_json(to_json(change)) == change
        try:
            after = apply(schema, change)
        except InvalidArgument:
            continue
        before = {each.name: each.type for each in every(schema)}
        columns = {each.name: each.type for each in every(after)}
        assert before.items() <= columns.items()
        assert len({name.casefold() for name in columns}) == len(every(after))
        assert CollectionSchema.from_json(after.to_json()) == after
        assert [each.type for each in written(after)] == [each.type for each in after.arrow()]
        assert after.key_fields[0].stored == (("id", "int64"),)
        schema = after
