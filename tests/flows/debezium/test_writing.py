"""A collection's rows as events, and the same rows when the events are read back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.rows import conform
from millrace.flows.conversion import row_of
from millrace.flows.debezium.events import Events, Rules
from millrace.flows.debezium.model import DebeziumEvents
from millrace.flows.debezium.writing import EventWriter
from millrace.flows.documents import encoded
from millrace.flows.records import BINARY, OPERATION, Action, Record
from millrace.flows.sources.collection.documents import _record
from millrace.message.schema import CollectionSchema, FieldSpec

NAIVE: Final = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))  # noqa: DTZ001 - drawn
VALUES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "bool": st.booleans(),
    "int8": st.integers(-(1 << 7), (1 << 7) - 1),
    "int16": st.integers(-(1 << 15), (1 << 15) - 1),
    "int32": st.integers(-(1 << 31), (1 << 31) - 1),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1),
    "float32": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "float64": st.floats(allow_nan=False, allow_infinity=False),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.just("__op"),
    "binary": st.binary(max_size=8),
    "date": st.dates(),
    "timestamp": NAIVE.map(lambda each: each.replace(tzinfo=UTC)),
    "timestamp_ntz": NAIVE,
    "uuid": st.uuids().map(str),
    "json": st.sampled_from(['{"a":1}', "[1,null]", '"text"']),
    "decimal(38,4)": st.decimals(-(10**20), 10**20, places=4),
    "decimal(10,0)": st.integers(-(10**9), 10**9).map(Decimal),
    "list<date>": st.lists(st.dates() | st.none(), max_size=3),
    "struct<a: int64, `b c`: date>": st.fixed_dictionaries(
        {"a": st.integers(0, 9) | st.none(), "b c": st.dates() | st.none()}
    ),
    "map<string, int64>": st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2).map(
        lambda each: list(each.items())
    ),
}
KEYS: Final = ("int64", "string", "date", "timestamp", "timestamp_ntz", "uuid", "decimal(38,4)", "bool", "binary")


@st.composite
def _tables(draw: st.DrawFn) -> tuple[CollectionInfo, list[dict[str, Any]]]:
    keys = draw(st.lists(st.sampled_from([each for each in KEYS if _is_key(each)]), min_size=1, max_size=2))
    rest = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=6))
    fields = [FieldSpec(f"k{place}", kind, nullable=False) for place, kind in enumerate(keys)]
    fields += [FieldSpec(f"c{place}", kind, nullable=draw(st.booleans())) for place, kind in enumerate(rest)]
    names = tuple(field.name for field in fields[: len(keys)])
    schema = CollectionSchema(tuple(fields), primary_key=names if len(names) > 1 else names[0])
    collection = CollectionInfo(1, "orders", "active", ("dml_0_1v0",), (schema,), {"_default": 1}, 2)
    row = st.fixed_dictionaries(
        {
            field.name: VALUES[kind] | st.none() if field.nullable else VALUES[kind]
            for field, kind in zip(fields, [*keys, *rest], strict=True)
        }
    )
    return collection, draw(
        st.lists(row, min_size=1, max_size=4, unique_by=lambda each: tuple(str(each[name]) for name in names))
    )


def _is_key(kind: str) -> bool:
    try:
        CollectionSchema((FieldSpec("k", kind, nullable=False),), primary_key="k")
    except Exception:
        return False
    return True


def _records(collection: CollectionInfo, table: pa.Table, kind: str = "insert") -> list[Record]:
    """What the source of a collection makes of its rows."""
    schema = collection.schema
    names = [field.name for field in schema.fields]
    binary = ",".join(field.name for field in schema.fields if field.type == "binary").encode()
    headers: list[tuple[str, bytes | None]] = [(BINARY, binary)] if binary else []
    return [
        _record({**row, "_change": kind, "_time_tick": 7 << 18}, "orders", 0, schema.key_names, names, headers)
        for row in table.to_pylist()
    ]


def _actions(records: Sequence[Record]) -> list[Action]:
    return [Action(each, (each.key or b"").decode(), each.value, None) for each in records]


def _key(record: Record, collection: CollectionInfo) -> Any:
    """What a tombstone of the record deletes."""
    return row_of(Action(record, (record.key or b"").decode(), None, None), collection.schema).key


def _sent(messages: Sequence[Action]) -> list[Record]:
    """The records of the topic that the sink writes."""
    return [
        Record(
            "out", 0, place, each.id.encode(), each.body, 1, [one for one in each.record.headers if one[0] == BINARY]
        )
        for place, each in enumerate(messages)
    ]


def _writer(collection: CollectionInfo, **declared: Any) -> EventWriter:
    return EventWriter(DebeziumEvents(collection="orders", **declared), lambda: collection.schema, clock=lambda: 5.0)


@given(_tables(), st.booleans())
def test_rows_that_are_read_back_are_the_same(drawn: Any, schemas: bool) -> None:
    collection, rows = drawn
    table = conform(pa.Table.from_pylist(rows, schema=collection.schema.arrow()), collection)
    records = _records(collection, table)
    writer, events = _writer(collection, schemas=schemas), Events(Rules())
    messages, failures = writer.encoded(_actions(records))
    assert failures == []
    found = []
    for sent, wanted in zip(_sent(messages), records, strict=True):
        change = events.change(sent)
        assert change is not None
        assert change.document is not None
        assert _key(change.record, collection) == _key(wanted, collection)
        found.append(row_of(Action(change.record, "", encoded(change.document), None), collection.schema).row)
    assert conform(found, collection).equals(table)  # type: ignore[arg-type]
    gone, failures = writer.encoded(_actions(_records(collection, table, "delete")))
    assert failures == []
    keys = [each.id for each in messages]
    assert [each.id for each in gone] == [key for key in keys for _ in range(2)], "its tombstone follows each delete"
    deleted = [Events(Rules()).change(each) for each in _sent(gone) if each.value is not None]
    assert [_key(each.record, collection) for each in deleted if each is not None] == [
        _key(each, collection) for each in records
    ]


ORDERS = CollectionInfo(
    1,
    "orders",
    "active",
    ("dml_0_1v0",),
    (
        CollectionSchema(
            (
                FieldSpec("id", "int64", nullable=False),
                FieldSpec("day", "date", nullable=False),
                FieldSpec("total", "decimal(10,2)", nullable=True),
            ),
            primary_key="id",
        ),
    ),
    {"_default": 1},
    2,
)
ROW = {"id": 9, "day": date(2024, 2, 29), "total": Decimal("48.22")}


def _action(body: Any, name: str = "9", operation: bytes = b"c") -> Action:
    value = None if body is None else json.dumps(body, default=str).encode()
    return Action(Record("orders", 0, 77, name.encode(), value, 1_000, [(OPERATION, operation)]), name, value, None)


def test_an_event_has_what_readers_of_debezium_expect() -> None:
    (made,), _ = _writer(ORDERS).encoded([_action(ROW)])
    assert json.loads(made.id) == {"id": 9}
    assert json.loads(made.body or b"") == {
        "before": None,
        "after": {"id": 9, "day": "2024-02-29", "total": "48.22"},
        "source": {
            "version": json.loads(made.body or b"")["source"]["version"],
            "connector": "millrace",
            "name": "millrace",
            "db": "millrace",
            "table": "orders",
            "snapshot": "false",
            "ts_ms": 1_000,
            "tick": 77,
        },
        "op": "c",
        "ts_ms": 5_000,
        "transaction": None,
    }


def test_a_delete_has_its_key_and_a_tombstone() -> None:
    (event, tombstone), _ = _writer(ORDERS).encoded([_action(None)])
    told = json.loads(event.body or b"")
    assert (told["op"], told["before"], told["after"]) == ("d", {"id": 9}, None)
    assert (tombstone.id, tombstone.body) == (event.id, None)
    assert len(_writer(ORDERS, tombstones=False).encoded([_action(None)])[0]) == 1


@pytest.mark.parametrize(
    ("operation", "upserts", "wanted"),
    [(b"c", "u", "c"), (b"u", "u", "u"), (b"u", "c", "c"), (b"r", "u", "r"), (b"", "u", "u"), (b"\xff", "u", "u")],
)
def test_the_op_is_that_of_the_change(operation: bytes, upserts: str, wanted: str) -> None:
    (made,), _ = _writer(ORDERS, upserts=upserts).encoded([_action(ROW, operation=operation)])
    told = json.loads(made.body or b"")
    assert told["op"] == wanted
    assert told["source"]["snapshot"] == ("true" if wanted == "r" else "false")


def test_schemas_are_those_of_connects_converter() -> None:
    (made,), _ = _writer(ORDERS, schemas=True, name="shop").encoded([_action(ROW)])
    key, value = json.loads(made.id), json.loads(made.body or b"")
    id_field = {"type": "int64", "optional": False, "field": "id"}
    assert key == {
        "schema": {"type": "struct", "fields": [id_field], "optional": False, "name": "shop.orders.Key"},
        "payload": {"id": 9},
    }
    assert value["payload"]["after"] == {"id": 9, "day": 19_782, "total": "EtY="}
    after = next(each for each in value["schema"]["fields"] if each["field"] == "after")
    assert after["fields"] == [
        id_field,
        {"type": "int32", "name": "io.debezium.time.Date", "version": 1, "optional": False, "field": "day"},
        {
            "type": "bytes",
            "name": "org.apache.kafka.connect.data.Decimal",
            "version": 1,
            "parameters": {"scale": "2", "connect.decimal.precision": "10"},
            "optional": True,
            "field": "total",
        },
    ]
    parts = {each["field"] for each in value["schema"]["fields"]}
    assert parts == value["payload"].keys()
    source = next(each for each in value["schema"]["fields"] if each["field"] == "source")
    assert {each["field"] for each in source["fields"]} == value["payload"]["source"].keys()


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (_action({**ROW, "more": 1}), "no column 'more'"),
        (_action({"id": 9}), "no 'day'"),
        (_action({**ROW, "day": "soon"}), "day"),
        (_action({**ROW, "day": 3}), "day"),
        (_action({**ROW, "total": "1.234"}), "total"),
        (_action({**ROW, "total": "NaN"}), "total"),
        (_action({**ROW, "total": "1e999999"}), "total"),
        (_action(ROW, name="x"), ""),
    ],
)
def test_a_document_that_is_no_row_fails_alone(action: Action, words: str) -> None:
    made, failures = _writer(ORDERS, schemas=True).encoded([action, _action(ROW)])
    assert len(made) == 1
    (failure,) = failures
    assert failure[:4] == (action.record, "TASK_PUT", "debezium", "ROW")
    assert words in failure.reason


def test_columns_that_the_collection_gets_later_are_written() -> None:
    schemas = [ORDERS.schema]
    writer = EventWriter(DebeziumEvents(collection="orders", schemas=True), lambda: schemas[-1])
    assert writer.encoded([_action({**ROW, "note": "a"})])[0] == []
    more = CollectionSchema((*ORDERS.schema.fields, FieldSpec("note", "string", nullable=True)), primary_key="id")
    schemas.append(more)
    (made,), _ = writer.encoded([_action({**ROW, "note": "a"})])
    assert json.loads(made.body or b"")["payload"]["after"]["note"] == "a"


def test_a_number_that_json_has_no_form_for_is_null() -> None:
    assert math.isnan(float("nan"))
    (made,), _ = _writer(ORDERS).encoded([_action({**ROW, "total": None})])
    assert json.loads(made.body or b"")["after"]["total"] is None
