"""A collection by another name, through a server: rows go in and come out, and a switch counts at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.base.errors import CollectionHasAliases, CollectionNotFound
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from tests.client.conftest import item_rows


def test_rows_are_written_read_and_consumed_by_an_alias(
    shop: Database, reader: Database, items: CollectionInfo, stored: Callable[..., dict[int, str]]
) -> None:
    alias = f"{items.name}-alias"
    other = shop.create_collection(f"{items.name}-2", items.schema)
    reader.create_alias(alias, items.name)
    assert alias in reader
    assert alias not in reader.collections()
    reader[alias].insert(item_rows(1, 2))
    shop.producer.insert(alias, item_rows(3))  # by name: from the cache of definitions
    assert stored(items) == {1: "new", 2: "new", 3: "new"}
    assert reader[alias].count() == 3
    assert sorted(reader[alias].read()["id"].to_pylist()) == [1, 2, 3]
    with reader.consumer(alias, until=reader.current_tick(items.pchannels)) as consumer:
        assert sum(each.rows.num_rows for delivery in consumer for each in delivery.changes()) == 3
    with pytest.raises(CollectionHasAliases):
        reader.drop_collection(items.name)
    kept = reader[alias]
    shop.alter_alias(alias, other.name)
    assert reader.aliases(other.name) == {alias: other.name}
    reader[alias].insert(item_rows(9))
    shop.producer.insert(alias, item_rows(10))
    kept.insert(item_rows(4))
    assert sorted(stored(items)) == [1, 2, 3, 4], "a handle stays with its collection"
    assert sorted(stored(shop.definition(alias))) == [9, 10]
    reader.drop_alias(alias)
    with pytest.raises(CollectionNotFound):
        reader.collection(alias)
