"""A schema that changes: every reader finds the fields of its tick, whatever schema the rows were written with."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

import millrace
from millrace.base.errors import InvalidArgument
from millrace.client.collection import Collection
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.rpc.discovery import read_record
from millrace.storage import parquet_file
from millrace.tables.collections.data_tables import rows_uri
from millrace.testing import Deployment, deployment


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    with deployment(pchannels=2) as made:
        yield made


def by_id(rows: pa.Table, key: str = "id") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.sort_by(key).to_pylist()
    return found


def older(made: Collection) -> Collection:
    """The collection as a producer knows it that was started now, and asks for nothing later."""
    return Collection(made.database, made.definition)


FIRST = {
    "id": "int64",
    "price": "int32",
    "weight": "float32?",
    "day": "date?",
    "note": "string?",
    "at": "struct<x: int8>?",
}


def row(number: int) -> dict[str, Any]:
    return {"id": number, "price": number, "weight": 0.5, "day": date(2026, 11, 24), "note": "n", "at": {"x": 1}}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("settled", [True, False])
def test_a_read_has_the_fields_of_its_tick(db: Deployment, settled: bool) -> None:
    made = db.create_collection(f"orders{settled}", FIRST, key="id", vchannels=2)
    first = made.insert([row(1), row(2)]).last_tick
    before = older(made)
    if settled:
        db.settle()
    assert (
        made.alter(
            drop="note",
            rename={"price": "cents", "id": "key"},
            widen={"cents": "int64", "weight": "float64", "day": "timestamp", "at": "struct<y: string, x: int16>"},
            relax="cents",
            add={"note": "bool?", "price": "decimal(5,2)?"},
            order="cents, key",
        )
        == 2
    )
    assert made.schema.primary_key == "key"
    second = made.insert(
        [{"key": 3, "cents": 1 << 40, "day": datetime(2026, 1, 1, 1, tzinfo=UTC), "at": {"y": "a", "x": 300}}]
    )
    late = before.insert([row(4)])  # a producer that knows nothing of it
    assert late.rejected_rows == 0
    made.insert([{"key": 5, "price": Decimal("1.25"), "note": True}])
    made.delete([2])
    if settled:
        db.settle()
    assert by_id(made.read(at=first)) == [row(1), row(2)]
    at = second.last_tick
    old = {
        "weight": 0.5,
        "day": datetime(2026, 11, 24, tzinfo=UTC),
        "at": {"y": None, "x": 1},
        "note": None,
        "price": None,
    }
    new = {
        "weight": None,
        "day": datetime(2026, 1, 1, 1, tzinfo=UTC),
        "at": {"y": "a", "x": 300},
        "note": None,
        "price": None,
    }
    wide = {"cents": 1 << 40, "key": 3, **new}
    rows = made.read(at=at)
    assert rows.column_names == ["cents", "key", "weight", "day", "at", "note", "price"]
    assert rows.schema.equals(made.schema.arrow())
    assert by_id(rows, "key") == [{"cents": 1, "key": 1, **old}, {"cents": 2, "key": 2, **old}, wide]
    empty = dict.fromkeys(("weight", "day", "at"))
    assert by_id(made.read(), "key") == [
        {"cents": 1, "key": 1, **old},
        wide,
        {"cents": 4, "key": 4, **old},
        {"cents": None, "key": 5, **empty, "note": True, "price": Decimal("1.25")},
    ]
    assert by_id(made.read(where="cents < 5 AND key > 1", columns="key"), "key") == [{"key": 4}]
    assert by_id(made.read(where="weight = 0.5 OR price > 1", columns="key"), "key") == [
        {"key": 1},
        {"key": 4},
        {"key": 5},
    ]
    assert made.count() == 4
    assert made.count(where="key = 2") == 0
    assert made.read(order_by="cents desc", limit=1, columns="key, cents").to_pylist() == [{"key": 3, "cents": 1 << 40}]


@pytest.mark.slow
def test_a_filter_of_a_widened_field_reads_the_files_that_may_hold_it(
    db: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"price": "int32", "weight": "float32?", "sum": "decimal(4,1)?"}
    wide = {"price": "int64", "weight": "float64", "sum": "decimal(12,2)"}
    made = db.create_collection("pruned", {"id": "int64", **kinds}, key="id")

    def rows(first: int) -> list[dict[str, Any]]:
        return [
            {"id": each, "price": each, "weight": each + 0.25, "sum": Decimal(each) / 2}
            for each in range(first, first + 10)
        ]

    for number, first in enumerate(
        (0, 100, 200, 10_000_000_000, 300)
    ):  # of the last, the values would fit the older columns
        if number == 2:
            made.alter(widen=wide)
        made.insert([{**each, "sum": None} if first > 10_000 else each for each in rows(first)])
        db.settle()
    read: list[int] = []
    plain = parquet_file.dataset

    def counted(*args: Any, **options: Any) -> Any:
        found = plain(*args, **options)
        read.append(len(found.files))
        return found

    monkeypatch.setattr(parquet_file, "dataset", counted)
    everything = made.read()
    assert read.pop() == 5
    for where, files, ids in (
        ("price < 3", 1, {0, 1, 2}),
        ("104 = price", 1, {104}),
        ("price >= 309", 2, {309, *range(10_000_000_000, 10_000_000_010)}),
        ("price IN (5, 10000000001)", 2, {5, 10_000_000_001}),
        ("price > 5000000000", 1, set(range(10_000_000_000, 10_000_000_010))),
        ("price = 50", 0, set()),
        ("weight <= 1.25", 1, {0, 1}),
        ("weight > 108 AND weight < 201", 2, {108, 109, 200}),
        ("sum < 0.75", 1, {0, 1}),
        ("sum = 101.50", 1, {203}),
        ("price < 3 OR id = 104", 5, {0, 1, 2, 104}),
        ("price != 3 AND price > 2 AND price < 6", 1, {4, 5}),
    ):
        found = made.read(where=where)
        assert (set(found["id"].to_pylist()), read.pop()) == (ids, files), where
        with made.stream(where=where) as stream:
            assert (set(stream.read_all()["id"].to_pylist()), read.pop()) == (ids, files), where
    compact(
        db.settings, CompactionParams(min_files=2, fold="always", keep_history_hours=0, segments=False, vacuum=False)
    )
    assert by_id(made.read()) == by_id(everything)
    assert by_id(made.read(where="price > 5000000000 OR price < 3")) == by_id(
        everything.filter((pc.field("price") > 5_000_000_000) | (pc.field("price") < 3))
    )


@pytest.mark.slow
def test_any_reader_of_delta_reads_the_files_as_they_are(db: Deployment) -> None:
    made = db.create_collection("plain", FIRST, key="id")
    made.insert([row(1)])
    db.settle()
    made.alter(rename={"id": "key", "price": "cents"}, widen={"cents": "int64"}, drop="note", add={"note": "int64?"})
    made.insert([{"key": 2, "cents": 5, "note": 7}])
    db.settle()
    table = DeltaTable(rows_uri(db.settings, made.id))
    assert table.protocol().min_reader_version == 1
    nullable = {each.name: each.nullable for each in table.schema().fields}
    assert nullable["id"] is False
    assert nullable["price"], "rows of the wider type have none"
    found = pa.table(table.to_pyarrow_table(columns=["id", "price", "price__2", "note", "note__2"]))
    assert by_id(found) == [
        {"id": 1, "price": 1, "price__2": None, "note": "n", "note__2": None},
        {"id": 2, "price": None, "price__2": 5, "note": None, "note__2": 7},
    ]


def test_changes_scan_and_upserts_go_through_a_change(db: Deployment) -> None:
    made = db.create_collection("fed", {"id": "int64", "a": "int32?"}, key="id")
    made.insert([{"id": 1, "a": 1}])
    before = older(made)
    made.alter(rename={"a": "b", "id": "key"}, widen={"b": "int64"})
    before.upsert([{"id": 1, "a": 2}])
    end = made.upsert([{"key": 2, "b": 1 << 40}]).last_tick
    with made.changes(until=end) as stream:
        batches = list(stream)
    found = [
        (each["_change"], each.get("key", each.get("id")), each.get("b", each.get("a")))
        for batch in batches
        for each in batch.rows.to_pylist()
    ]
    assert found == [
        ("insert", 1, 1),
        ("delete", 1, None),
        ("insert", 1, 2),
        ("delete", 2, None),
        ("insert", 2, 1 << 40),
    ]
    assert batches[0].rows.schema.names[:2] == ["id", "a"]
    assert batches[-1].rows.schema.names[:2] == ["key", "b"]
    scanned = [(change.kind, change.key, change.rows.to_pylist()) for change in made.scan(until=end)]
    assert ("insert", "id", [{"id": 1, "a": 2}]) in scanned, "a scan gives a message as it was written"
    assert scanned[-1] == ("insert", "key", [{"key": 2, "b": 1 << 40}])
    scanned = [
        (change.kind, change.key, change.rows.to_pylist()) for change in before.scan(until=end, schema="current")
    ]
    assert scanned == [
        ("insert", "key", [{"key": 1, "b": 1}]),
        ("delete", "key", [{"key": 1}]),
        ("insert", "key", [{"key": 1, "b": 2}]),
        ("delete", "key", [{"key": 2}]),
        ("insert", "key", [{"key": 2, "b": 1 << 40}]),
    ], "columns are found by what they are, not by their names"


def test_a_consumer_in_the_current_schema_goes_on_to_a_newer_one_with_its_first_row(db: Deployment) -> None:
    made = db.create_collection("moving", {"id": "int64", "a": "int32?", "gone": "string?"}, key="id")
    made.insert([{"id": 1, "a": 1, "gone": "x"}])
    made.alter(drop="gone", add={"city": "string?"})
    made.insert([{"id": 2, "a": 2, "city": "Oslo"}])
    before = older(made)
    with made.consume(schema="current") as consumer:

        def following() -> pa.RecordBatch:
            while True:
                delivery = consumer.poll(timeout=10.0)
                assert delivery is not None
                for change in delivery.changes():
                    return change.rows

        assert following().to_pylist() == [{"id": 1, "a": 1, "city": None}]
        assert following().to_pylist() == [{"id": 2, "a": 2, "city": "Oslo"}]
        made.alter(rename={"a": "b"}, widen={"b": "int64"})
        made.insert([{"id": 3, "b": 1 << 40, "city": None}])
        assert following().to_pylist() == [{"id": 3, "b": 1 << 40, "city": None}]
        before.insert([{"id": 4, "a": 4, "city": None}])
        late = following()
        assert late.schema == made.schema.arrow(), "and never back"
        assert late.to_pylist() == [{"id": 4, "b": 4, "city": None}]
    with pytest.raises(InvalidArgument, match="'current'"):
        made.consume(schema="newest")  # type: ignore[arg-type]


@pytest.mark.slow
def test_elsewhere_a_schema_changes_and_is_read_as_on_the_spot(db: Deployment) -> None:
    made = db.create_collection("far", {"id": "int64", "n": "int32", "note": "string?"}, key="id")
    first = made.insert([{"id": 1, "n": 1, "note": "x"}]).last_tick
    record = read_record(db.settings.log_path)
    assert record is not None
    with millrace.connect(record.address, token=record.token) as far:
        there = far["far"]
        there.alter(rename={"id": "key", "n": "count"}, widen={"count": "int64"}, drop="note")
        end = there.insert([{"key": 2, "count": 1 << 40, "city": "Oslo"}], evolve=True).last_tick
        assert there.definition.schema_version == 3
        assert there.schema == made.refresh().schema
        db.settle()
        for one in (there, made):
            assert one.read(at=first).to_pylist() == [{"id": 1, "n": 1, "note": "x"}]
            assert by_id(one.read(where="count > 0"), "key") == [
                {"key": 1, "count": 1, "city": None},
                {"key": 2, "count": 1 << 40, "city": "Oslo"},
            ]
        with there.changes(until=end) as elsewhere, made.changes(until=end) as here:
            found, wanted = list(elsewhere), list(here)
        assert [each.rows.to_pylist() for each in found] == [each.rows.to_pylist() for each in wanted]
        assert found[-1].schema == made.schema
        given = [
            [change.rows for change in one.scan(until=end, schema="current") if change.kind == "insert"]
            for one in (there, made)
        ]
        assert given[0] == given[1]
        assert {each.schema for each in given[0]} == {made.schema.arrow()}
        assert by_id(pa.Table.from_batches(given[0]), "key") == by_id(made.read(), "key")
        with pytest.raises(InvalidArgument, match="primary key"):
            there.alter(drop="key")


@pytest.mark.slow
def test_rows_are_deleted_by_what_they_hold_before_and_behind_a_rename(db: Deployment) -> None:
    made = db.create_collection("culled", {"id": "int64", "n": "int64?"}, key="id")
    first = made.insert([{"id": number, "n": number % 3} for number in range(9)]).last_tick
    before = older(made)
    made.alter(rename={"id": "key", "n": "rest"})
    assert before.delete_where("rest = 0").keys == 3, "a read of now has the names of now"
    assert made.delete_where("n = 1", at=first).keys == 3, "one of then those of then"
    assert made.read(order_by="key")["key"].to_pylist() == [2, 5, 8]
    made.alter(rename={"key": "third", "rest": "key"}, widen={}, drop=())
    made.alter(rename={"third": "rest"})
    assert made.delete_where("rest = 2").keys == 1
    assert made.read(order_by="rest")["rest"].to_pylist() == [5, 8]


def test_what_a_key_may_not_become_is_refused_before_anything_is_kept(db: Deployment) -> None:
    made = db.create_collection("kept", {"id": "int64", "a": "int32?"}, key="id")
    for refused in (
        {"drop": "id"},
        {"relax": "id"},
        {"widen": {"id": "decimal(20,0)"}},
        {},
        {"drop": "a", "widen": {"a": "int64"}},
    ):
        with pytest.raises(InvalidArgument):
            made.alter(**refused)
    assert made.refresh().definition.schema_version == 1
