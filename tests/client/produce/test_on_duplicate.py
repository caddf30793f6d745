"""Collections whose inserts replace the row of their key: by every way in, and what has no place there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest

from millrace.base.errors import AppendRejected, CollectionExists, InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.async_producer import AsyncProducer
from millrace.client.produce.rows import insert_message
from millrace.client.schemas import schema
from millrace.message.keys import vchannel_index
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backfill.file_staging import check_partition
from tests.client.conftest import ITEMS, item_rows, own_name

Stored = Callable[..., dict[int, str]]


@pytest.fixture
def latest(shop: Database, request: pytest.FixtureRequest) -> CollectionInfo:
    """A collection that replaces, of two VChannels and two partitions."""
    schema = replace(ITEMS, on_duplicate="replace")
    return shop.catalog.create_collection(own_name(request), schema, vchannels=2, partitions=["old", "new"])


@pytest.mark.slow
def test_an_insert_replaces_the_row_of_its_key_in_every_partition(
    shop: Database, latest: CollectionInfo, stored: Stored
) -> None:
    producer = shop.new_producer()
    producer.insert(latest, item_rows(1, 2, 3, name="first"), partition="old")
    before = producer.insert(latest, item_rows(4, name="first"), partition="new").last_tick
    producer.insert(latest, item_rows(2, 4, name="second"), partition="new")
    assert stored(latest) == {1: "first", 2: "second", 3: "first", 4: "second"}
    assert stored(latest, at=before) == dict.fromkeys((1, 2, 3, 4), "first")
    producer.delete(latest, [2])
    assert stored(latest).keys() == {1, 3, 4}


def test_of_rows_of_one_key_in_a_call_the_last_counts(shop: Database, latest: CollectionInfo, stored: Stored) -> None:
    rows = pa.concat_tables([item_rows(7, name="one"), item_rows(8, name="eight"), item_rows(7, name="two")])
    assert shop.new_producer().insert(latest, rows, partition="old").rows == 2
    assert stored(latest) == {7: "two", 8: "eight"}


@pytest.mark.slow
def test_batches_that_share_a_message_and_async_callers_replace_too(
    shop: Database, latest: CollectionInfo, stored: Stored
) -> None:
    producer = shop.new_producer()
    with producer.batch() as batch:
        waiting = [
            batch.insert(item_rows(turn % 5, name=str(turn)), collection=latest, partition="old") for turn in range(50)
        ]
    assert not [each for done in waiting for each in done.result(timeout=10).rejections]
    assert stored(latest) == {key: str(45 + key) for key in range(5)}

    async def again() -> None:
        async with AsyncProducer(producer) as sender:
            for turn in range(3):
                await sender.insert(latest, item_rows(0, 1, name=f"async {turn}"), partition="new")

    asyncio.run(again())
    assert stored(latest) == {0: "async 2", 1: "async 2", 2: "47", 3: "48", 4: "49"}


def test_inserts_of_one_key_at_once_leave_one_row(shop: Database, latest: CollectionInfo, stored: Stored) -> None:
    def write(number: int) -> None:
        producer = shop.new_producer()
        for turn in range(4):
            producer.insert(latest, item_rows(1, 2, name=f"{number}/{turn}"), partition=("old", "new")[turn % 2])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert stored(latest).keys() == {1, 2}


def test_in_a_transaction_each_insert_replaces_what_stands_before_it(
    shop: Database, latest: CollectionInfo, stored: Stored
) -> None:
    here = [key for key, home in enumerate(vchannel_index(pa.array(range(40)), 2).tolist()) if home == 0][:3]
    producer = shop.new_producer()
    producer.insert(latest, item_rows(*here, name="before"), partition="old")
    with producer.transaction(latest, vchannel=0) as txn:
        txn.insert(item_rows(here[0], here[1], name="first"), partition="old")
        txn.insert(item_rows(here[1], name="second"), partition="new")
        txn.delete([here[0]])
    assert stored(latest) == {here[1]: "second", here[2]: "before"}


def test_a_message_with_a_key_twice_is_rejected_whole(shop: Database, latest: CollectionInfo, stored: Stored) -> None:
    (home,) = vchannel_index(pa.array([5]), 2).tolist()
    batch = pa.Table.from_pylist(item_rows(5, 5).to_pylist(), schema=ITEMS.arrow()).to_batches()[0]
    number = latest.partitions["old"]
    astray = insert_message(batch, latest, vchannel=latest.vchannels[home], partition_id=number)
    with pytest.raises(AppendRejected, match="key twice") as caught:
        shop.new_producer().send([astray])
    assert caught.value.reason == "DUPLICATE_KEY"
    assert stored(latest) == {}


def test_an_import_has_no_place_there_and_says_so_before_it_stages(shop: Database, latest: CollectionInfo) -> None:
    params = LoadParams.parse({"collection": latest.name, "files": ["/no/such.parquet"], "partition": "old"})
    with pytest.raises(InvalidArgument, match="insert the rows of the files"):
        check_partition(params, latest)


def test_it_is_part_of_what_a_collection_is(shop: Database, latest: CollectionInfo) -> None:
    assert shop.definition(latest.name).schema.on_duplicate == "replace"
    with pytest.raises(CollectionExists):
        shop.catalog.create_collection(latest.name, ITEMS, exist_ok=True)
    db = shop
    assert db.create_collection(latest.name, latest.schema, exist_ok=True).schema == latest.schema
    made = db.create_collection(f"{latest.name}_2", {"id": "int64"}, key="id", on_duplicate="replace")
    assert made.schema.replaces_duplicates
    with pytest.raises(InvalidArgument, match="keep, replace"):
        schema({"id": "int64"}, key="id", on_duplicate="last")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="already"):
        schema(ITEMS, on_duplicate="replace")
