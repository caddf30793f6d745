"""A collection is made of a table's columns, and follows what can be followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from millrace.base.errors import SinkRefused
from millrace.client.database import Database
from millrace.client.schemas import schema
from millrace.flows.batch import Batch, TableColumns
from millrace.flows.records import Action, Record
from millrace.flows.sinks.collection.follow import Changes, changes_between
from millrace.flows.sinks.collection.model import History
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.testing import deployment

BASE = {"id": "int64", "name": "string?", "price": "decimal(10,2)?", "n": "int32"}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, Changes()),
        ({"note": "string"}, Changes(add={"note": "string?"})),
        ({"name": None}, Changes(drop=["name"])),
        ({"n": "int64"}, Changes(widen={"n": "int64"})),
        ({"n": "int16"}, Changes()),
        ({"n": "int32?"}, Changes(relax=["n"])),
        ({"price": "decimal(12,3)?"}, Changes(widen={"price": "decimal(12,3)"})),
        ({"price": "decimal(10,4)?"}, Changes(other={"price": ("decimal(10,2)", "decimal(10,4)")})),
        ({"price": "int64?"}, Changes()),
        ({"n": "string"}, Changes(other={"n": ("int32", "string")})),
        ({"name": "int64?"}, Changes(other={"name": ("string", "int64")})),
        ({"id": "decimal(20,0)"}, Changes()),
    ],
)
def test_changes_make_the_collection_hold_the_table(change: dict[str, str | None], wanted: Changes) -> None:
    types = {name: kind for name, kind in {**BASE, **change}.items() if kind is not None}
    assert changes_between(schema(BASE, key="id"), TableColumns(types, ("id",))) == wanted


@pytest.fixture(scope="module")
def db() -> Iterator[Database]:
    with deployment() as found:
        yield found


def _batch(start: int, columns: dict[str, str] | None, *documents: str, key: tuple[str, ...] = ("id",)) -> Batch:
    actions = []
    for place, each in enumerate(documents):
        record = Record("shop.orders", 0, start + place, b"1", each.encode(), 1_000 + start + place)
        actions.append(Action(record, "1", each.encode(), None))
    shape = None if columns is None else TableColumns(columns, key)
    return Batch("shop.orders-0", start, start + len(documents), documents=actions, columns=shape)


def _rows(db: Database, name: str) -> list[dict[str, Any]]:
    return db[name].read(order_by="id").to_pylist()


def test_a_collection_is_made_and_altered_between_batches(db: Database) -> None:
    with CollectionSink(db.settings, "made", flow="made", create=True, on_schema_change="alter") as sink:
        sink.write(_batch(0, {"id": "int64", "a": "int32?"}, '{"id": 1, "a": 7}'))
        sink.write(_batch(1, {"id": "int64", "a": "int64?", "b": "string?"}, '{"id": 2, "a": 5000000000, "b": "x"}'))
        sink.write(_batch(2, {"id": "int64", "b": "string?"}, '{"id": 3, "b": "y"}'))
    assert _rows(db, "made") == [{"id": 1, "b": None}, {"id": 2, "b": "x"}, {"id": 3, "b": "y"}]


def test_a_truncation_of_a_table_without_a_collection_makes_none(db: Database) -> None:
    gone = Record("shop.orders", 0, 0, None, None, 0, [("millrace.op", b"t")])
    batch = Batch("shop.orders-0", 0, 1, documents=[Action(gone, "", None, None)])
    with CollectionSink(db.settings, "absent", flow="absent", create=True) as sink:
        assert sink.write(batch).acknowledged == 1
    assert "absent" not in db


def test_a_sink_that_stops_says_which_command_to_run(db: Database) -> None:
    with CollectionSink(db.settings, "stops", flow="stops", create=True) as sink:
        sink.write(_batch(0, {"id": "int64"}, '{"id": 1}'))
        with pytest.raises(SinkRefused, match=r"millrace collections alter stops --add 'b:string\?'"):
            sink.write(_batch(1, {"id": "int64", "b": "string?"}, '{"id": 2, "b": "x"}'))
        db["stops"].alter(add={"b": "string?"})
        sink.write(_batch(1, {"id": "int64", "b": "string?"}, '{"id": 2, "b": "x"}'))
    assert _rows(db, "stops") == [{"id": 1, "b": None}, {"id": 2, "b": "x"}]


def test_what_cannot_be_followed_stops(db: Database) -> None:
    with CollectionSink(db.settings, "other", flow="other", create=True, on_schema_change="alter") as sink:
        sink.write(_batch(0, {"id": "int64", "a": "int64?"}, '{"id": 1, "a": 1}'))
        with pytest.raises(SinkRefused, match=r"a was int64 and is string.*alter other --drop 'a'"):
            sink.write(_batch(1, {"id": "int64", "a": "string?"}, '{"id": 1, "a": "x"}'))
        with pytest.raises(SinkRefused, match="a key cannot change"):
            sink.write(_batch(1, {"id": "int64", "a": "int64"}, '{"id": 1, "a": 1}', key=("id", "a")))
        with pytest.raises(SinkRefused, match="create it"):
            CollectionSink(db.settings, "none", flow="none", create=True).write(_batch(0, None, '{"id": 1}'))
        db["other"].alter(drop="a")
        sink.write(_batch(1, {"id": "int64", "a": "string?"}, '{"id": 1, "a": "x"}'))
    assert _rows(db, "other") == [{"id": 1, "a": "x"}]


def test_a_history_is_made_of_a_table_and_keeps_what_the_table_drops(db: Database) -> None:
    history = History(deleted="gone")
    with CollectionSink(
        db.settings, "past", flow="past", create=True, on_schema_change="alter", history=history
    ) as sink:
        sink.write(_batch(0, {"id": "int64", "a": "int32?"}, '{"id": 1, "a": 7}'))
        assert db["past"].schema.key_names == ("id", "version")
        sink.write(_batch(1, {"id": "int64", "a": "int64?", "b": "string?"}, '{"id": 1, "a": 5000000000, "b": "x"}'))
        sink.write(_batch(2, {"id": "int64", "b": "string?"}, '{"id": 1, "b": "y"}'))
        with pytest.raises(SinkRefused, match="key of 'past' is id, and the table's is now id, b"):
            sink.write(_batch(3, {"id": "int64", "b": "string?"}, '{"id": 1, "b": "y"}', key=("id", "b")))
    versions = db["past"].read(columns=["a", "b", "changed_at", "gone"]).to_pylist()
    assert [(each["a"], each["b"]) for each in sorted(versions, key=lambda row: row["changed_at"])] == [
        (7, None), (5_000_000_000, "x"), (None, "y")
    ]  # fmt: skip


def test_a_history_by_a_sequence_has_its_type_and_stops_at_other_columns_only(db: Database) -> None:
    history = History(sequence="at", deletes={"op": ("D",)})
    with CollectionSink(db.settings, "dated", flow="dated", create=True, history=history) as sink:
        with pytest.raises(SinkRefused, match="no column 'at'"):
            sink.write(_batch(0, {"id": "int64"}, '{"id": 1}'))
        sink.write(_batch(0, {"id": "int64", "at": "int64?", "op": "string?"}, '{"id": 1, "at": 5, "op": "I"}'))
    assert {each.name: each.type for each in db["dated"].schema.fields}["valid_from"] == "int64"
    db["dated"].alter(drop=["at", "op"])
    columns = {"id": "int64", "at": "int64?", "op": "string?"}
    with CollectionSink(db.settings, "dated", flow="dated", history=history) as sink:
        sink.write(_batch(1, columns, '{"id": 1, "at": 6, "op": "D"}'))
        with pytest.raises(SinkRefused, match=r"columns that 'dated' lacks.*--add 'b:"):
            sink.write(_batch(2, {**columns, "b": "string?"}, '{"id": 1, "at": 7, "op": "I", "b": "y"}'))
    (row,) = db["dated"].read(where="version = 0").to_pylist()
    assert row["deleted"]
    assert row["changed_at"] == 6
