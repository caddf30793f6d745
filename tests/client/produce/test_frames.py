"""Rows as programs have them, models of pydantic and relations among them, and schemas that evolve by every way in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel

from millrace.base.errors import InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.async_producer import AsyncProducer
from millrace.client.produce.rows import table_of
from millrace.client.schemas import schema
from millrace.message.schema import FieldSpec
from tests.client.conftest import item_rows, own_name


class Place(BaseModel):
    zip: int
    city: str | None = None


class Order(BaseModel):
    id: int
    day: date
    place: Place
    past: list[Place] = []
    note: str | None = None


def test_models_of_pydantic_are_rows_and_say_a_schema(shop: Database, request: pytest.FixtureRequest) -> None:
    made = schema(Order, key="id")
    assert [(each.name, each.type, each.nullable) for each in made.fields] == [
        ("id", "int64", False),
        ("day", "date", False),
        ("place", "struct<zip: int64, city: string>", False),
        ("past", "list<struct<zip: int64, city: string>>", False),
        ("note", "string", True),
    ]
    orders = shop.catalog.create_collection(own_name(request), made)
    rows = [
        Order(id=1, day=date(2026, 1, 2), place=Place(zip=7), past=[Place(zip=8, city="Oslo")]),
        Order(id=2, day=date(2026, 1, 3), place=Place(zip=9), note="x"),
    ]
    producer = shop.new_producer()
    assert producer.insert(orders, rows).rows == producer.upsert(orders, rows[:1]).rows + 1 == 2
    with producer.batch() as batch:
        future = batch.insert([rows[0].model_copy(update={"id": 3})], collection=orders)
    assert future.result().rejections == []
    with pytest.raises(InvalidArgument, match="row 0 is ModelMetaclass: rows are dicts"):
        producer.insert(orders, [Order])


def test_an_index_of_pandas_with_a_name_is_a_column() -> None:
    frame = pd.DataFrame({"city": ["Oslo"]}, index=pd.Index([7], name="id"))
    assert [(each.name, each.type) for each in schema(frame, key="id").fields] == [("id", "int64"), ("city", "string")]
    assert table_of(frame).to_pylist() == [{"id": 7, "city": "Oslo"}]
    assert table_of(pd.DataFrame({"id": [1]}, index=pd.Index([7], name="id"))).to_pylist() == [{"id": 1}]
    assert table_of(pd.DataFrame({"id": [1, 2]}).iloc[1:]).to_pylist() == [{"id": 2}]


@pytest.mark.parametrize(
    "frame", [pl.DataFrame({"id": [], "v": []}), pd.DataFrame({"id": [], "v": []}), pa.table({"id": [], "v": []})]
)
def test_a_frame_without_rows_says_its_columns(frame: Any) -> None:
    assert (table_of(frame).num_rows, table_of(frame).column_names) == (0, ["id", "v"])


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (pd.DataFrame([[1, 2]], columns=["id", "id"]), "Duplicate column names"),
        (pd.DataFrame({"id": [1], "v": pd.arrays.SparseArray([0.0])}), "Sparse"),
        (pd.DataFrame({"id": [1, 2], "v": ["a", 1]}), "column v"),
        (pd.Series([1], name="id"), "holds record batches, not int"),
        (pl.DataFrame({"id": [1], "v": pl.Series([object()], dtype=pl.Object)}), "'v' holds Python objects"),
        (pl.DataFrame({"id": [1], "v": pl.Series([1], dtype=pl.Int128)}), "a type that Arrow does not know"),
        ([{"id": pd.Timestamp("2026-01-02T00:00:00.000000001")}], "nanoseconds"),
        (({"id": each} for each in range(2)), "or a list of dicts"),
    ],
)
def test_frames_that_are_no_table_are_refused_in_words(frame: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        table_of(frame, schema({"id": "int64", "v": "string?"}, key="id"))


def test_relations_and_streams_are_upserted_batch_by_batch(
    shop: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    producer = shop.new_producer()
    with duckdb.connect() as connection:
        relation = connection.sql("select i as id, 'a' as name, 1.5::double as price from range(5) t(i)")
        assert producer.insert(items, relation).rows == 5
        again = connection.sql("select i as id, 'b' as name from range(3) t(i)")
        assert producer.upsert(items, again).rows == 3

    def stream() -> Iterator[pa.RecordBatch]:
        for name in ("c", "d"):  # of two rows of a key the last counts, in another batch too
            yield from item_rows(2, 3, name=name).to_batches()

    assert producer.upsert(items, stream()).rows == 4
    assert stored(items) == {0: "b", 1: "b", 2: "d", 3: "d", 4: "a"}


def test_upserts_batches_and_awaited_writes_evolve_the_schema(
    shop: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    producer = shop.new_producer()
    row = {"id": 1, "name": "a"}
    producer.upsert(items, [row | {"one": 1}], evolve=True)
    with producer.batch() as batch:
        futures = [
            batch.insert([row | {"id": 2, "two": "x"}], collection=items, evolve=True),
            batch.insert([row | {"id": 3, "one": 1, "two": "x"}], collection=items, evolve=True),
            batch.insert([row | {"id": 4}], collection=items),
            batch.upsert([row | {"three": 1.5}], collection=items, evolve=True),
        ]
    assert [future.result().rejections for future in futures] == [[], [], [], []]

    async def write() -> None:
        async with AsyncProducer(producer) as awaited:
            await awaited.insert(items, [row | {"id": 5, "four": [1]}], evolve=True)
            await awaited.upsert(items.name, [row | {"id": 2, "five": True}], evolve=True)

    asyncio.run(write())
    assert shop.definition(items.name).schema.arrow().names[-5:] == ["one", "two", "three", "four", "five"]
    assert shop.definition(items.name).schema_version == 6
    assert set(stored(items)) == {1, 2, 3, 4, 5}


def test_the_catalog_is_asked_only_where_what_is_known_does_not_take_the_rows(
    shop: Database, items: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = shop.new_producer()
    asked: list[str] = []
    renew = producer._definitions.renew
    monkeypatch.setattr(producer._definitions, "renew", lambda name: asked.append(name) or renew(name))
    with producer.batch() as batch:
        for number in range(5):
            batch.insert([{"id": number, "name": "a", "more": 1}], collection=items, evolve=True)
    assert len(asked) == 2  # before the change, and behind it


def test_a_transaction_takes_no_rows_that_need_another_schema(shop: Database, items: CollectionInfo) -> None:
    lone = shop.catalog.create_collection(items.name + "_one", items.schema)
    with shop.new_producer().transaction(lone) as txn:
        txn.insert([{"id": 1, "name": "a"}], evolve=True)
        with pytest.raises(InvalidArgument, match=r"need other fields or types \(more\).*rolls open transactions back"):
            txn.insert([{"id": 2, "name": "a", "more": 1}], evolve=True)
    assert txn.commit_tick is not None
    assert FieldSpec("more", "int64", True) not in shop.definition(lone.name).schema.fields
