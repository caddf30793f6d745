"""A wrong argument of a producer or a read is InvalidArgument that says what is taken, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import CollectionNotFound, InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.producer import Producer
from millrace.message.schema import CollectionSchema, FieldSpec
from tests.client.conftest import item_rows, own_name

Call = Callable[[Producer, Any], Any]

CALLS: dict[str, Call] = {
    "insert": lambda producer, it: producer.insert(it, item_rows(1)),
    "upsert": lambda producer, it: producer.upsert(it, item_rows(1)),
    "delete": lambda producer, it: producer.delete(it, [1], partition="_default"),
    "delete_where": lambda producer, it: producer.delete_where(it, "id == 1"),
    "transaction": lambda producer, it: producer.transaction(it),
    "batch.insert": lambda producer, it: producer.batch().insert(item_rows(1), collection=it),
    "batch.delete": lambda producer, it: producer.batch().delete([1], collection=it, partition="_default"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_names_no_collection_is_refused(shop: Database, name: str) -> None:
    with pytest.raises(CollectionNotFound):
        CALLS[name](shop.new_producer(), "nobody")
    with pytest.raises(InvalidArgument, match=r"client\.collection\(name\)"):
        CALLS[name](shop.new_producer(), 7)


@pytest.mark.parametrize("rows", [None, pa.array([1]), [1], "id"], ids=["none", "array", "numbers", "text"])
def test_rows_that_are_none_are_told_what_rows_are(shop: Database, items: CollectionInfo, rows: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"DataFrame|record batches"):
        shop.new_producer().insert(items, rows)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "'tags' is not list"),
        (pa.array([{"a": 1}]), "'tags' is not list"),
        (pa.array([7]), "'tags' is not list"),
        (pa.array([[b"\xff"]]), "'tags' is not list"),
    ],
    ids=["map", "struct", "number", "not UTF-8"],
)
def test_a_column_that_does_not_fit_is_named(
    shop: Database, request: pytest.FixtureRequest, column: pa.Array, words: str
) -> None:
    schema = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("tags", "list<string>", True)), "id")
    made = shop.catalog.create_collection(own_name(request), schema)
    with pytest.raises(InvalidArgument, match=words):
        shop.new_producer().insert(made, pa.table({"id": [1], "tags": column}))


def test_a_column_that_comes_twice_is_named(shop: Database, items: CollectionInfo) -> None:
    twice = pa.table([pa.array([1]), pa.array(["a"]), pa.array(["b"])], names=["id", "name", "name"])
    with pytest.raises(InvalidArgument, match="two columns 'name'"):
        shop.new_producer().insert(items, twice)


@pytest.mark.parametrize("keys", ["abc", b"abc", [None], ["a"], [1.5], [1 << 70], object()], ids=range(7))
def test_keys_that_are_none_are_refused(shop: Database, items: CollectionInfo, keys: Any) -> None:
    with pytest.raises(InvalidArgument, match="key"):
        shop.new_producer().delete(items, keys)


def test_a_lone_surrogate_is_no_key(shop: Database, request: pytest.FixtureRequest) -> None:
    schema = CollectionSchema((FieldSpec("id", "string", False),), "id")
    made = shop.catalog.create_collection(own_name(request), schema)
    with pytest.raises(InvalidArgument, match="not keys"):
        shop.new_producer().delete(made, ["\ud800"])


@pytest.mark.parametrize("vchannel", [2, -1])
def test_a_transaction_names_a_vchannel_that_there_is(shop: Database, items: CollectionInfo, vchannel: int) -> None:
    with pytest.raises(InvalidArgument, match="has 2 VChannels"):
        shop.new_producer().transaction(items, vchannel=vchannel)


@pytest.mark.parametrize("at", ["yesterday", 1.5, "2026-13-01"])
def test_a_read_at_no_moment_says_what_one_is(shop: Database, items: CollectionInfo, at: Any) -> None:
    with pytest.raises(InvalidArgument, match="time tick"):
        shop.collection(items.name).read(at=at)
