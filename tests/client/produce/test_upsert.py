"""Upserts: the old row or the new one at any tick, never none and never both; and deletes by predicate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.base.errors import AppendRejected, InvalidArgument
from millrace.base.predicate.arrow import filter_table, parse_predicate
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.scan import scan
from millrace.client.database import Database
from millrace.message.keys import vchannel_index
from millrace.node.ingest.definition import ingest_to_end
from tests.client.conftest import ITEMS, item_rows, streaming_node

Stored = Callable[..., dict[int, str]]


@pytest.mark.slow
def test_a_reader_sees_the_old_row_or_the_new_one_at_every_tick(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    producer = shop.new_producer()
    first = producer.insert(items, item_rows(1, 2, 3, name="v0")).last_tick
    last = [producer.upsert(items, item_rows(1, 2, 3, 4, name=f"v{turn}")) for turn in (1, 2, 3)][-1].last_tick
    stored(items, at=last)
    ticks = set()
    for name in items.vchannels:
        with scan(name, wal=Path(shop.settings.wal_uri), tail=shop.connection, until_tick=last) as units:
            for unit in units:
                ticks |= {unit.time_tick - 1, unit.time_tick, unit.last_confirmed and unit.time_tick + 1}
                ticks |= {body.time_tick for body in getattr(unit, "bodies", ())}
    seen = []
    for tick in sorted(tick for tick in ticks if first <= tick <= last):
        table = shop.collection(items.name).read(at=tick, deadline=10.0)
        found = dict(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))
        assert len(found) == table.num_rows, f"a row is there twice at {tick}"
        assert {1, 2, 3} <= found.keys(), f"a row is missing at {tick}"
        seen.append(found)
    assert seen[-1] == dict.fromkeys((1, 2, 3, 4), "v3")
    assert {each[1] for each in seen} == {"v0", "v1", "v2", "v3"}


def test_of_several_rows_of_one_key_the_last_counts(shop: Database, items: CollectionInfo, stored: Stored) -> None:
    rows = pa.concat_tables([item_rows(7, name="one"), item_rows(8, name="eight"), item_rows(7, name="two")])
    assert shop.new_producer().upsert(items, rows).rows == 2
    assert stored(items) == {7: "two", 8: "eight"}


def test_an_upsert_is_one_message_a_vchannel_and_a_transaction_where_it_needs_several(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    shop.catalog.create_partition(items.name, "other")
    both = shop.definition(items.name)
    producer = shop.new_producer()
    homes = vchannel_index(pa.array(range(40)), 2).tolist()
    here, there = ([key for key, home in enumerate(homes) if home == place][:2] for place in (0, 1))
    assert producer.upsert(both, item_rows(*here, *there, name="old"), partition="_default").messages == 2
    names = ["_default", "other", "other", "other"]
    written = producer.upsert(both, pa.table({"id": [*here, *there], "name": names}), partition_by="name")
    assert (written.messages, written.rows) == (4 + 1, 4)  # Begin, two partitions, Commit; the other VChannel's has one
    assert stored(items) == dict(zip([*here, *there], names, strict=True))


def test_upserts_of_one_key_at_once_leave_one_row(shop: Database, items: CollectionInfo, stored: Stored) -> None:
    def write(number: int) -> None:
        producer = shop.new_producer()
        for turn in range(4):
            producer.upsert(items, item_rows(1, 2, name=f"{number}/{turn}"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert stored(items).keys() == {1, 2}


def test_an_upsert_whose_insert_is_refused_deletes_nothing(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    producer = shop.new_producer()
    producer.insert(items, item_rows(1, 2, name="old"))
    shop.catalog.create_partition(items.name, "gone")
    there = shop.definition(items.name)
    shop.catalog.drop_partition(items.name, "gone")
    with pytest.raises(AppendRejected) as caught:
        producer.upsert(there, item_rows(1, 2, name="new"), partition="gone")
    assert caught.value.reason == "PARTITION_NOT_FOUND"
    assert stored(items) == {1: "old", 2: "old"}


def test_a_delete_by_predicate_hits_what_matched_at_its_tick(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    producer = shop.new_producer()
    cheap = producer.insert(items, item_rows(1, 2, 3, price=1.0))
    producer.insert(items, item_rows(4, 5, price=9.0))
    stored(items)
    at = cheap.last_tick
    producer.insert(items, item_rows(6, price=1.0))  # matches, but was not there at the tick
    stored(items)
    deleted = producer.delete_where(items, "price < 5 and id != 2", at=at)
    assert (deleted.keys, deleted.tick) == (2, at)
    assert stored(items).keys() == {2, 4, 5, 6}


TABLE = pa.table(
    {
        "id": [1, 2, 3, 4],
        "name": ["a", "b", "c", "d"],
        "price": [1.0, None, 3.0, 4.0],
        "sold": [True, False, None, True],
    },
    schema=ITEMS.arrow(),
)


@pytest.mark.parametrize(
    ("predicate", "hit"),
    [
        ("id == 1", [1]),
        ("1 < id <= 3", [2, 3]),
        ("price >= 3 or name == 'a'", [1, 3, 4]),
        ("not price > 1", [1]),
        ("price is None", [2]),
        ("price is not None and sold", [1, 4]),
        ("name in ('a', 'd') and id not in [4]", [1]),
        ("price not in (1.0,)", [3, 4]),
        ("True", [1, 2, 3, 4]),
        ("id = 1 OR name <> 'a' AND NOT (price IS NULL)", [1, 3, 4]),
        ("name LIKE '_' and name not like 'b%'", [1, 3, 4]),
        ("price BETWEEN 1 and 3 AND `id` NOT BETWEEN 2 AND 2", [1, 3]),
        ("not price not in (1)", [1]),
        ("not (price in (1))", [3, 4]),
        ("name in () or name = '''a' or name = \"d\"", [4]),
        ("not false and (id) = +1 or id = -1e0", [1]),
    ],
)
def test_a_predicate_hits(predicate: str, hit: list[int]) -> None:
    assert filter_table(TABLE, predicate).column("id").to_pylist() == hit


@pytest.mark.parametrize(
    "predicate",
    ["", "id", "id is 1", "id = 1 id", "name like id", "id like 'x'", "id = name.x", "not", "id between 1", "id ! 1",
        "'", "not " * 200 + "sold", "town == 'x'", "__import__('os')", "id == other()", "id == None", "id + 1 == 2",
        "name > 3", "id if sold else 1", "(lambda: 1)", "id in name", "'x' * 9 == name", "("],
)  # fmt: skip
def test_what_is_no_predicate_is_refused(predicate: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_predicate(predicate, TABLE.schema)


@pytest.mark.parametrize(
    ("predicate", "words"),
    [
        ("name = NULL", "character 8: nothing compares with NULL: write IS NULL"),
        ("name in 'Oslo'", "character 9: IN needs a list in parentheses"),
        ("id == 1 && sold", "character 9: '&' is not part of a predicate"),
        ("count(id) > 1", "character 6: '(' is unexpected"),
        ("(", "such as city = 'Oslo'"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(predicate: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_predicate(predicate, TABLE.schema)
    assert words in str(caught.value)


def test_a_read_at_a_tick_does_not_wait_for_what_comes_behind_it(shop: Database, items: CollectionInfo) -> None:
    producer = shop.new_producer()
    at = producer.insert(items, item_rows(*range(20), name="old")).last_tick
    ingest_to_end(shop.settings, shop.log)
    producer.insert(items, item_rows(*range(20, 40), name="new"))  # on both PChannels, and in no table
    assert sorted(shop.collection(items.name).read(at=at, deadline=0.0)["id"].to_pylist()) == list(range(20))
    with streaming_node(shop.settings):  # which is behind: the append host has the rest
        assert shop.collection(items.name).read(deadline=0.0).num_rows == 40
