"""Keys of several fields: rows, upserts, deletes by every way, reads, scans and what is told of wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.delivery import Change
from millrace.client.database import Database
from millrace.client.schemas import schema
from millrace.message.schema_changes import RenameField, ReorderFields
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.verification import verify_collections
from millrace.wal.scanner import All
from tests.client.conftest import opened_shop, own_name

MONDAY, TUESDAY = date(2026, 11, 23), date(2026, 11, 24)
QUOTES = schema(
    {"price": "decimal(10,2)?", "symbol": "string", "day": "date", "note": "string?"}, key=("symbol", "day")
)
Found = dict[tuple[Any, ...], str]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A deployment of its own: a flush takes the few collections of these tests, not those of all clients' tests."""
    yield from opened_shop(tmp_path_factory.mktemp("keyed"))


@pytest.fixture
def quotes(shop: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    return shop.catalog.create_collection(own_name(request), QUOTES, vchannels=3, partitions=["a", "b"])


@pytest.fixture
def stored(shop: Database) -> Callable[..., list[Found]]:
    """Of each collection, notes by key; read once from the WAL alone and once from the flushed tables."""

    def read(*collections: CollectionInfo) -> list[Found]:
        found: list[list[Found]] = [[], []]
        for flushed in (False, True):
            ingest_to_end(shop.settings, shop.log)
            if flushed:
                flush_to_end(shop.settings)
            for collection in collections:
                rows = shop.collection(collection.name).read(deadline=10.0).to_pylist()
                by_key = {tuple(row[name] for name in collection.schema.key_names): row["note"] for row in rows}
                found[flushed].append(by_key)
                assert len(by_key) == len(rows)
        assert found[0] == found[1]
        return found[0]

    return read


def rows(note: str, *keys: tuple[str, date]) -> list[dict[str, Any]]:
    return [{"symbol": symbol, "day": day, "note": note, "price": Decimal("1.50")} for symbol, day in keys]


@pytest.mark.slow
def test_rows_of_one_symbol_and_several_days_are_upserted_and_deleted_by_both(
    shop: Database, quotes: CollectionInfo, stored: Callable[..., list[Found]]
) -> None:
    producer = shop.new_producer()
    every = [(symbol, day) for symbol in ("A", "B", "C", "A\0") for day in (MONDAY, TUESDAY)]
    producer.insert(quotes, rows("first", *every), partition="a")
    producer.upsert(quotes, rows("again", ("A", MONDAY), ("B", TUESDAY), ("A", MONDAY)), partition="b")
    wanted = dict.fromkeys(every, "first") | dict.fromkeys([("A", MONDAY), ("B", TUESDAY)], "again")
    assert stored(quotes) == [wanted]
    gone: list[tuple[Any, Any]] = [
        ([("A", MONDAY)], ("A", MONDAY)),
        ([{"day": TUESDAY, "symbol": "A"}], ("A", TUESDAY)),
        (pa.table({"day": [MONDAY], "symbol": ["B"], "price": [1]}), ("B", MONDAY)),
        (pa.array([{"symbol": "B", "day": TUESDAY}]), ("B", TUESDAY)),
        ({"symbol": ["A\0"], "day": [MONDAY]}, ("A\0", MONDAY)),
    ]
    for given, key in gone:
        producer.delete(quotes, given)
        del wanted[key]
    assert stored(quotes) == [wanted]
    with producer.batch() as batch:
        batch.delete([("C", MONDAY)], collection=quotes)
        batch.delete([("C", TUESDAY)], collection=quotes)
    assert stored(quotes) == [{("A\0", TUESDAY): "first"}]
    deleted = producer.delete_where(quotes, "symbol LIKE 'A%' and day > DATE '2026-11-23'")
    assert (deleted.keys, stored(quotes)) == (1, [{}])
    assert verify_collections(shop.settings)[quotes.id].ok


@pytest.mark.slow
def test_a_field_of_the_key_is_renamed_and_goes_on_being_one(
    shop: Database, quotes: CollectionInfo, stored: Callable[..., list[Found]]
) -> None:
    producer = shop.new_producer()
    producer.insert(quotes, rows("first", ("A", MONDAY), ("A", TUESDAY)), partition="a")
    assert len(stored(quotes)[0]) == 2
    shop.catalog.alter(quotes.name, [RenameField("day", "date"), ReorderFields(("date",))])
    renamed = shop.definition(quotes.name)
    assert renamed.schema.primary_key == ("symbol", "date")
    producer.upsert(renamed, [{"symbol": "A", "date": MONDAY, "note": "again"}], partition="b")
    producer.delete(renamed, [("A", TUESDAY)])
    assert stored(renamed) == [{("A", MONDAY): "again"}]


def test_a_scan_tells_the_names_of_the_key(shop: Database, quotes: CollectionInfo) -> None:
    producer = shop.new_producer()
    producer.insert(quotes, rows("one", ("A", MONDAY)), partition="a")
    last = producer.delete(quotes, [("A", MONDAY)]).last_tick
    with shop.consumer(quotes, start=All(), until=last) as consumer:
        found: list[Change] = [change for unit in consumer for change in unit.changes()]
    assert [(each.kind, each.key) for each in found] == [(kind, ("symbol", "day")) for kind in ("insert", "delete")]
    assert found[1].rows.to_pylist() == [{"symbol": "A", "day": MONDAY}]


@pytest.mark.slow
def test_a_key_of_one_field_is_of_any_of_the_types(shop: Database, stored: Callable[..., list[Found]]) -> None:
    made: list[tuple[CollectionInfo, list[Any]]] = []
    for number, (kind, keys) in enumerate(
        {
            "uuid": ["9f1c0ab2-5a04-4f4f-9e0e-0a1b2c3d4e5f", "00000000-0000-0000-0000-000000000000"],
            "decimal(20,3)": [Decimal("-1.500"), Decimal("12345678901234567.000")],
            "timestamp": [datetime(1969, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 1, 2, 3, 4, tzinfo=UTC)],
            "date": [MONDAY, TUESDAY],
            "int16": [-3, 7],
        }.items()
    ):
        plan = schema({"id": kind, "note": "string?"}, key="id", on_duplicate="replace")
        made.append((shop.catalog.create_collection(f"keyed_{number}", plan, vchannels=4), keys))
    producer = shop.new_producer()
    for note in ("old", "new"):
        for collection, keys in made:
            producer.insert(collection, [{"id": key, "note": note} for key in keys])
    assert stored(*(collection for collection, _ in made)) == [{(key,): "new" for key in keys} for _, keys in made]
    for collection, keys in made:
        producer.delete(collection, keys[:1])
    assert stored(*(collection for collection, _ in made)) == [{(keys[1],): "new"} for _, keys in made]


@pytest.mark.parametrize(
    "keys",
    [
        ["A"],
        [("A",)],
        [("A", "noon")],
        [("A", None)],
        [{"symbol": "A"}],
        {"day": [MONDAY]},
        "A",
        pa.array(["A"]),
        [1.5],
    ],
)
def test_what_is_no_key_of_the_collection_is_refused_with_what_one_is(
    shop: Database, quotes: CollectionInfo, keys: Any
) -> None:
    with pytest.raises(InvalidArgument, match=r"symbol|keys are a list"):
        shop.new_producer().delete(quotes, keys)


@pytest.mark.parametrize("key", [(), ("id", "id"), ("id", "none"), ("id", "price"), ("id", "maybe"), "price"])
def test_a_key_that_cannot_be_is_refused(key: Any) -> None:
    with pytest.raises(InvalidArgument):
        schema({"id": "int64", "price": "float64", "tags": "list<string>"}, key=key)
