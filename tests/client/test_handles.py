"""Handles of a dropped collection, a closed producer or consumer are refused, and act on nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from millrace.base.errors import Closed, CollectionNotFound, MillraceError
from millrace.catalog.collection import CollectionInfo
from millrace.client.collection import Collection as Handle
from millrace.client.consume.async_consumer import AsyncConsumer
from millrace.client.consume.parallel_consumer import ParallelConsumer
from millrace.client.database import Database
from millrace.client.produce.async_producer import AsyncProducer
from tests.client.conftest import item_rows

USES: dict[str, Callable[[Handle], object]] = {
    "read": lambda old: old.read(),
    "read at a tick": lambda old: old.read(at=1),
    "stream": lambda old: old.stream(),
    "count": lambda old: old.count(),
    "dataset": lambda old: old.dataset(),
    "changes_between": lambda old: old.changes_between(),
    "refresh": lambda old: old.refresh(),
    "alter": lambda old: old.alter(add={"more": "string?"}),
    "create_partition": lambda old: old.create_partition("more"),
    "drop_partition": lambda old: old.drop_partition("_default"),
    "flush": lambda old: old.flush(),
    "insert": lambda old: old.insert(item_rows(2)),
    "insert that evolves": lambda old: old.insert([{"id": 2, "name": "b", "more": 1}], evolve=True),
    "upsert": lambda old: old.upsert(item_rows(1, name="old")),
    "delete": lambda old: old.delete([1]),
    "delete_where": lambda old: old.delete_where("id = 1"),
}


@pytest.mark.slow
def test_a_handle_of_a_dropped_collection_never_reaches_another_that_has_its_name(
    shop: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    old = shop[items.name]
    old.insert(item_rows(1, name="old"))
    shop.catalog.drop_collection(items.name)
    made = shop.catalog.create_collection(items.name, items.schema, vchannels=2)
    shop[items.name].insert(item_rows(1, name="new"))
    stored(made)  # what the handles could read is in the tables
    for name, use in USES.items():
        with pytest.raises(MillraceError) as refused:
            use(old)
        assert isinstance(refused.value, CollectionNotFound) or refused.value.code == "APPEND_REJECTED", name
    assert shop.definition(items.name) == made
    assert stored(made) == {1: "new"}


@pytest.mark.slow
def test_a_closed_producer_takes_nothing_by_any_way(
    shop: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    producer = shop.new_producer()
    batch, asynchronous = producer.batch(), AsyncProducer(producer)
    producer.insert(items, item_rows(1))
    transaction = producer.transaction(items)
    producer.close()
    for use in (
        lambda: producer.insert(items, item_rows(2)),
        lambda: producer.insert(items.name, iter([item_rows(2)])),  # type: ignore[arg-type]
        lambda: producer.upsert(items, item_rows(1, name="changed")),
        lambda: producer.delete(items, [1]),
        lambda: producer.delete_where(items, "id = 1"),
        lambda: producer.transaction(items),
        lambda: transaction.__enter__(),
        lambda: producer.settle(),
        lambda: producer.batch(),
        lambda: batch.insert(item_rows(2), collection=items),
        lambda: asyncio.run(asynchronous.insert(items, item_rows(2))),
    ):
        with pytest.raises(Closed, match="closed"):
            use()
    assert stored(items) == {1: "new"}


def test_a_closed_consumer_delivers_nothing_although_it_has_read_ahead(shop: Database, items: CollectionInfo) -> None:
    producer = shop.new_producer()
    for key in range(5):
        producer.insert(items, item_rows(key))
    consumer, asynchronous = shop.consumer(items), AsyncConsumer(shop.consumer(items))
    assert consumer.poll(timeout=10.0) is not None
    consumer.close()
    asyncio.run(asynchronous.close())
    with pytest.raises(Closed, match="closed"):
        consumer.poll(timeout=10.0)
    with pytest.raises(Closed, match="closed"):
        asyncio.run(asynchronous.poll(timeout=10.0))
    assert list(consumer) == []
    ParallelConsumer(consumer, lambda work: pytest.fail("a closed consumer delivers")).run()
