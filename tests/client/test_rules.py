"""Checks, defaults and computed fields as users have them.

Filled, refused and judged, whoever sends and whatever reads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import millrace.testing
from millrace.base.errors import AppendRejected, CheckViolated, InvalidArgument
from millrace.client.collection import Collection
from millrace.client.database import Database
from millrace.client.nested_changes import resolve_paths
from millrace.client.produce.rows import insert_message, split_rows
from millrace.client.schemas import alter_changes, schema
from millrace.message.schema import CollectionSchema

FIELDS = {
    "id": "int64",
    "qty": "int32",
    "price": "decimal(10,2)",
    "total": "decimal(14,2)",
    "note": "string?",
}


@pytest.fixture(scope="module")
def db() -> Iterator[millrace.testing.Deployment]:
    with millrace.testing.deployment() as found:
        yield found


@pytest.fixture
def orders(db: Database) -> Iterator[Collection]:
    made = db.create_collection(
        "orders",
        FIELDS,
        key="id",
        defaults={"qty": 1},
        computed={"total": "qty * price"},
        checks={"some": "qty > 0", "noted": "note <> ''"},
    )
    yield made
    db.drop_collection("orders")


def rows_of(collection: Collection, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in collection.read(columns=list(columns), order_by="id").to_pylist()]


@pytest.mark.slow
def test_what_rows_do_not_say_is_filled_and_what_they_say_is_kept(orders: Collection) -> None:
    orders.insert([{"id": 1, "price": 2}, {"id": 2, "qty": 3, "price": 2, "note": None}])
    orders.upsert(pa.table({"id": [3], "price": [Decimal("0.50")]}))
    orders.insert({"id": [4], "qty": [2], "price": [1], "total": [2]})
    assert rows_of(orders, "id", "qty", "total") == [
        (1, 1, Decimal("2.00")),
        (2, 3, Decimal("6.00")),
        (3, 1, Decimal("0.50")),
        (4, 2, Decimal("2.00")),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": 1, "qty": 0, "price": 1}, "check 'some'"),
        ({"id": 1, "price": 1, "note": ""}, "check 'noted'"),
        ({"id": 1, "price": 1, "total": 7}, "field 'total' is not what it is computed to be"),
        ({"id": 1, "qty": 2_000_000_000, "price": Decimal("99999999.99")}, "field 'total' cannot be computed"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_before_any_of_its_call_is_sent(
    orders: Collection, row: dict[str, Any], words: str
) -> None:
    good = {"id": 9, "price": 1}
    with orders.batch() as batch:
        for call in (orders.insert, orders.upsert, batch.insert, batch.upsert):
            with pytest.raises(CheckViolated, match=f"row 1: {words}"):
                call([good, row])
    with pytest.raises(CheckViolated), orders.transaction() as txn:
        txn.insert([row])
    assert rows_of(orders, "id") == []


def forged(collection: Collection, schema_of: CollectionSchema, rows: list[dict[str, Any]], version: int = 0) -> Any:
    """Send rows that no producer of ours looked at."""
    producer = collection.database.new_producer()
    definition = collection.definition
    table = pa.Table.from_pylist(rows, schema_of.arrow())
    found = replace(definition, schema_version=version) if version else definition
    messages = [
        insert_message(part, found, vchannel=vchannel, partition_id=number)
        for vchannel, number, part in split_rows(table, definition, None, None)
    ]
    return producer.send(messages, raise_rejected=False)


def test_the_chain_judges_what_a_producer_did_not(orders: Collection) -> None:
    row = {"id": 1, "qty": 1, "price": Decimal(1), "total": Decimal(1), "note": None}
    for wrong, words in (
        ({"qty": 0, "total": Decimal(0)}, "check 'some' does not hold in 1 of its rows, the first is row 1"),
        ({"total": Decimal(2)}, "field 'total' is not what it is computed to be in 1 of its rows, the first is row 1"),
    ):
        [rejected] = forged(orders, orders.schema, [row, row | {"id": 2} | wrong]).rejections
        assert rejected.reason == "CHECK_VIOLATED"
        assert words in str(rejected)
    assert not forged(orders, orders.schema, [row]).rejections
    assert rows_of(orders, "id") == [(1,)]


@pytest.mark.slow
def test_an_older_producer_goes_on_and_is_judged_as_the_newest_schema_has_its_rows(orders: Collection) -> None:
    older, producer = orders.definition, orders.database.new_producer()
    orders.insert([{"id": 1, "price": 1}])
    orders.alter(
        rename={"qty": "pieces"},
        widen={"pieces": "int64"},
        add={"region": "string?", "tax": "decimal(14,2)?", "when": "timestamp?"},
        computed={"tax": "round(pieces * price * 0.25, 2)"},
        set_default={"region": "north", "when": "now()"},
        add_check={"few": "pieces < 100", "near": "region <> 'south'"},
    )
    producer.insert(older, [{"id": 2, "qty": 6, "price": Decimal("1.10")}])
    with pytest.raises(AppendRejected, match=r"CHECK_VIOLATED.*'few'"):
        producer.insert(older, [{"id": 3, "qty": 100, "price": 1}])
    orders.insert([{"id": 4, "pieces": 2, "price": 1, "region": None}])
    wanted = [
        (1, 1, None, None, True),
        (2, 6, "north", Decimal("1.65"), False),
        (4, 2, None, Decimal("0.50"), False),
    ]

    def found(rows: pa.Table) -> list[tuple[Any, ...]]:
        return sorted(
            (each["id"], each["pieces"], each["region"], each["tax"], each["when"] is None) for each in rows.to_pylist()
        )

    assert found(orders.read()) == wanted
    assert found(orders.changes_between().read_all()) == wanted
    orders.flush()
    assert found(orders.read()) == wanted
    assert found(orders.changes_between().read_all()) == wanted


def test_rules_can_be_dropped_and_what_they_stand_on_cannot(orders: Collection) -> None:
    for kept in ("qty", "price"):
        with pytest.raises(InvalidArgument, match="drop"):
            orders.alter(drop=kept)
    with pytest.raises(InvalidArgument, match="no check 'any'"):
        orders.alter(drop_check="any")
    orders.alter(drop_check=["some", "noted"], drop_default="qty", drop=["total", "qty"])
    orders.insert([{"id": 1, "price": 1, "note": ""}])
    assert rows_of(orders, "id", "note") == [(1, "")]


def test_rows_of_classes_and_frames_keep_to_the_rules(orders: Collection) -> None:
    @dataclass
    class Order:
        id: int
        qty: int
        price: Decimal

    orders.insert([Order(1, 2, Decimal("1.50"))])
    import pandas

    orders.insert(pandas.DataFrame({"id": [2], "price": [Decimal("4.00")]}))
    schema = pa.schema([("id", pa.int64()), ("price", pa.decimal128(10, 2))])
    batch = pa.record_batch([[3], [Decimal(1)]], schema=schema)
    orders.insert(pa.RecordBatchReader.from_batches(schema, [batch]))
    assert rows_of(orders, "id", "total") == [(1, Decimal("3.00")), (2, Decimal("4.00")), (3, Decimal("1.00"))]


def test_callers_that_share_a_message_do_not_harm_each_other(orders: Collection) -> None:
    refused: list[int] = []

    def call(number: int) -> None:
        try:
            batch.insert([{"id": number, "qty": number % 4, "price": 1}]).result(30)
        except CheckViolated:
            refused.append(number)

    with orders.batch() as batch:
        threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
    assert sorted(refused) == [0, 4, 8, 12]
    assert len(rows_of(orders, "id")) == 12


def test_replacing_collections_and_generated_keys_have_rules_too(db: Database) -> None:
    made = db.create_collection(
        "things",
        {"n": "int64", "twice": "int64"},
        generated_key="key",
        computed={"twice": "n + n"},
        checks={"small": "twice < 10"},
        on_duplicate="replace",
    )
    made.insert([{"n": 1}])
    with pytest.raises(CheckViolated):
        made.insert([{"n": 5}])
    assert [row["twice"] for row in made.read().to_pylist()] == [2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"defaults": {"nothing": 1}},
        {"defaults": {"qty": "many"}},
        {"defaults": {"qty": 1 << 40}},
        {"defaults": {"qty": True}},
        {"defaults": {"note": 5}},
        {"computed": {"total": "qty * nothing"}},
        {"computed": {"total": "note"}},
        {"computed": {"total": "total + 1"}},
        {"computed": {"total": 5}},
        {"computed": {"total": "qty * price"}, "defaults": {"total": 1}},
        {"checks": {"": "qty > 0"}},
        {"checks": {"c": "qty"}},
        {"checks": {"c": "qty > 'a'"}},
        {"checks": {"c": "now() > '2020-01-01'"}},
        {"checks": {f"c{n}": "qty > 0" for n in range(101)}},
        {"checks": {f"c{n}": " AND ".join(["qty > 0"] * 100) for n in range(10)}},
    ],
)
def test_what_is_no_rule_says_so(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        schema(FIELDS, key="id", **wrong)


def test_a_schema_with_rules_is_the_same_behind_its_json() -> None:
    found = schema(
        FIELDS | {"at": "timestamp", "on": "date", "local": "timestamp_ntz", "far": "float32", "yes": "bool"},
        key="id",
        defaults={
            "at": "now()",
            "on": "now()",
            "local": "now()",
            "far": 0.5,
            "yes": False,
            "price": "1.5",
            "note": "it's",
        },
        computed={"total": "qty * price"},
        checks={"c": "note LIKE 'a%' OR on > '2020-01-01'"},
    )
    assert CollectionSchema.from_json(found.to_json()) == found
    assert found.to_json()["checks"] == [{"name": "c", "condition": [
        ["field", "note"], ["literal", "string", "a"], ["starts_with"],
        ["field", "on"], ["literal", "date", "2020-01-01"], [">"], ["or", 2],
    ]}]  # fmt: skip


def test_rows_from_before_a_change_are_not_filled_by_it_wherever_changes_begin(db: millrace.testing.Deployment) -> None:
    made = db.create_collection("early", {"id": "int64"}, key="id")
    begun = made.insert([{"id": 0}]).last_tick
    made.insert([{"id": 1}])
    older = made.definition
    made.alter(add={"level": "int32?"}, set_default={"level": 5})
    db.new_producer().insert(older, [{"id": 2}])
    made.flush()
    db.settle()
    found = made.changes_between(begun).read_all().to_pylist()
    assert [(row["id"], row["level"]) for row in found] == [(1, None), (2, 5)]


def test_rules_are_made_changed_and_kept_to_from_elsewhere(reader: Database) -> None:
    name = "rules_from_elsewhere"
    found = schema(FIELDS, key="id", defaults={"qty": 1}, computed={"total": "qty * price"}, checks={"some": "qty > 0"})
    reader.catalog.create_collection(name, found, vchannels=2)
    try:
        older = reader.definition(name)
        assert older.schema == found
        changed = alter_changes(
            add={"tax": "decimal(14,2)?"},
            computed={"tax": "round(qty * price * 0.25, 2)"},
            add_check={"few": "qty < 9"},
        )
        reader.catalog.alter(name, resolve_paths(changed, lambda: older.schema))
        producer = reader.new_producer()
        with pytest.raises(CheckViolated, match="'few'"):
            producer.insert(name, [{"id": 1, "qty": 9, "price": 1}])
        with pytest.raises(AppendRejected, match=r"CHECK_VIOLATED.*'few'"):
            producer.insert(older, [{"id": 1, "qty": 9, "price": 1}])
        producer.insert(older, [{"id": 2, "qty": 2, "price": 1}])
        with reader.collection(reader.definition(name)).changes(until=reader.current_tick(older.pchannels)) as stream:
            batches = [batch.rows for batch in stream]
        assert [row["tax"] for batch in batches for row in batch.to_pylist()] == [Decimal("0.50")]
    finally:
        reader.catalog.drop_collection(name)
