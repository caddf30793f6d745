"""``Collection.get``: a key or several, in user types, here and at a server."""

from __future__ import annotations

from datetime import date
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo as Definition
from millrace.client.append_client import AppendClient
from millrace.client.database import Database
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.remote_log import RemoteLogService
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.key_index.index import KeyIndex
from tests.client.conftest import item_rows, own_name

PRICES = CollectionSchema(
    (FieldSpec("symbol", "string", False), FieldSpec("day", "date", False), FieldSpec("price", "int64", True)),
    ("symbol", "day"),
)


def settle(shop: Database, definition: Definition) -> None:
    ingest_to_end(shop.settings, shop.log)
    flush_to_end(shop.settings)
    table = table_at(rows_uri(shop.settings, definition.id))
    KeyIndex.open(shop.settings.key_index_path(definition.id)).catch_up(table, definition.schema)


@pytest.mark.quick_cases(2)
def test_rows_of_a_key_or_of_several_are_found_in_the_tables_and_behind_them(
    shop: Database, reader: Database, items: Definition
) -> None:
    producer = shop.new_producer()
    producer.insert(items, item_rows(*range(10), name="old"))
    settle(shop, items)
    then = shop.current_tick(items.pchannels)
    producer.upsert(items, item_rows(4, name="new"))
    producer.delete(items, [5])
    producer.insert(items, item_rows(6, name="twice"))
    ingest_to_end(shop.settings, shop.log)
    target = reader.collection(items.name)
    assert target.get(4, columns="name").to_pylist() == [{"name": "new"}]
    assert target.get(4, at=then, columns=["name"]).to_pylist() == [{"name": "old"}]
    assert target.get(5).num_rows == 0
    assert sorted(target.get([6, 99])["name"].to_pylist()) == ["old", "twice"]
    for keys in (pa.array([1, 2]), pa.table({"id": [1, 2]}), {"id": [1, 2]}, [{"id": 1}, {"id": 2}], range(1, 3)):
        assert target.get(keys).sort_by("id").equals(target.read(where="id = 1 OR id = 2", order_by="id"))
    assert target.get([]).schema == target.read().schema


@pytest.mark.quick_cases(2)
def test_the_history_of_a_key_is_the_part_of_the_changes_that_duckdb_finds(
    shop: Database, reader: Database, items: Definition
) -> None:
    producer, ticks = shop.new_producer(), []
    for number in range(12):
        key = number % 4
        if number % 5 == 3:
            producer.delete(items, [key])
        elif number % 3 == 2:
            producer.upsert(items, item_rows(key, name=f"upsert {number}"))
        else:
            producer.insert(items, item_rows(key, 9, name=f"insert {number}"))
        ticks.append(shop.current_tick(items.pchannels))
        if number == 6:
            settle(shop, items)
    target = reader.collection(items.name)
    changes = shop.collection(items.name).changes_between().read_all()
    between = """
        with half as (select id, name, _time_tick as tick, _write_tick as written, _change as kind from changes
            where id = $key and _time_tick > $after and _time_tick <= $until)
        select tick, if(count(distinct kind) = 2, 'upsert', min(kind)), max(name) from half group by tick, written
        order by tick"""
    with duckdb.connect() as engine:
        engine.register("changes", changes)
        for key in (0, 1, 2, 3, 9, 77):
            for after in (0, ticks[3], ticks[7]):
                for until in (ticks[7], ticks[8], ticks[11]):
                    wanted = engine.execute(between, {"key": key, "after": after, "until": until}).fetchall()
                    found = target.history(key, after=after, until=until, columns="name")
                    rows = found.select(["_time_tick", "_change", "name"]).to_pylist()
                    assert [tuple(each.values()) for each in rows] == wanted
        as_of = """select arg_max(_change, (_time_tick, _change::varchar)) from changes
            where id = ? and _time_tick <= ?"""
        for tick in ticks:
            [(last,)] = engine.execute(as_of, [1, tick]).fetchall()
            assert (target.get(1, at=tick).num_rows > 0) == (last == "insert")
    assert target.history([0, 1])["_time_tick"].to_pylist() == sorted(target.history([0, 1])["_time_tick"].to_pylist())
    whole = target.history(1)
    assert whole.column_names[: len(items.schema.fields)] == [each.name for each in items.schema.fields]
    assert set(whole["id"].to_pylist()) == {1}


def test_history_without_keys_takes_no_columns(shop: Database, items: Definition) -> None:
    target = shop.collection(items.name)
    with pytest.raises(InvalidArgument, match="columns and deadline are for the history of keys"):
        target.history(columns="name")
    with pytest.raises(InvalidArgument, match="not keys of collection"):
        target.history(["a"])
    assert target.history()["operation"].to_pylist()[0] == "create"


@pytest.mark.quick_cases(1)
def test_a_key_of_several_fields_is_a_tuple(shop: Database, reader: Database, request: pytest.FixtureRequest) -> None:
    made = shop.create_collection(own_name(request), PRICES)
    first, second = date(2026, 11, 25), date(2026, 11, 26)
    made.insert([{"symbol": "A", "day": first, "price": 1}, {"symbol": "B", "day": second, "price": 2}])
    settle(shop, made.definition)
    made.insert([{"symbol": "B", "day": first, "price": 3}])
    ingest_to_end(shop.settings, shop.log)
    target = reader.collection(made.name)
    assert target.get(("A", first))["price"].to_pylist() == [1]
    assert target.get(("A", second)).num_rows == 0, "each field's value is there, in other rows"
    assert sorted(target.get([("B", second), ("B", first)])["price"].to_pylist()) == [2, 3]


@pytest.mark.parametrize("keys", ["x", 1.5, [None], [(1, 2)], {"name": ["x"]}])
def test_what_is_no_key_is_refused(shop: Database, items: Definition, keys: Any) -> None:
    with pytest.raises(InvalidArgument):
        shop.collection(items.name).get(keys)


def test_a_get_here_makes_one_request(shop: Database, items: Definition, monkeypatch: pytest.MonkeyPatch) -> None:
    target = shop.collection(items.name)
    target.insert(item_rows(1, 2))
    settle(shop, items)
    target.insert(item_rows(3))
    target.get(1)  # the definition of a name is cached for a short while
    asked: list[object] = []
    call = RemoteLogService.call_with_retry
    monkeypatch.setattr(
        RemoteLogService, "call_with_retry", lambda *args, **named: asked.append(args) or call(*args, **named)
    )
    assert sorted(target.get([1, 2, 3])["id"].to_pylist()) == [1, 2, 3]
    assert len(asked) == 1


def test_a_server_of_an_older_build_is_read_with_too(
    shop: Database, items: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*args: Any, **named: Any) -> None:
        raise InvalidArgument("the ticket names no read of the append host")

    target = shop.collection(items.name)
    target.insert(item_rows(1))
    settle(shop, items)
    target.insert(item_rows(2))
    monkeypatch.setattr(AppendClient, "decided", unknown)
    assert sorted(target.get([1, 2])["id"].to_pylist()) == [1, 2]
    assert target.read().num_rows == 2
