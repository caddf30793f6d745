"""Gathered appends: order, one result a call, a bound on what is held, and nothing that waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed, wait
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import BufferFull, Closed, DeadlineExceeded, InvalidArgument, LogUnavailable
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.async_producer import AsyncProducer
from millrace.client.produce.batch_appender import BatchAppender, BatchLimits
from millrace.client.produce.channel_queue import CallSplitter
from millrace.client.produce.channel_sender import ChannelSender
from millrace.client.produce.sequencer import OutboundEntry
from millrace.client.produce.written import Written
from millrace.message.keys import vchannel_index
from millrace.wal.scanner import VChannelFilter
from tests.client.conftest import item_rows

Stored = Callable[..., dict[int, str]]


def test_each_call_has_the_result_of_the_message_that_carries_its_rows(shop: Database, items: CollectionInfo) -> None:
    with shop.new_producer().batch() as batch:
        futures = [batch.insert(item_rows(key), collection=items) for key in range(300)]
    found = [future.result(timeout=0) for future in futures]
    assert all(each.rows == 1 and len(each.results) == 1 for each in found)
    messages = {each.results[0].message_id for each in found}
    assert len(messages) < 150, "small calls share messages"


def test_the_calls_for_one_key_take_effect_in_their_order(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    with shop.new_producer().batch(limits=BatchLimits(delay=0.0)) as batch:
        for turn in range(40):
            for key in range(5):
                batch.delete([key], collection=items)
                batch.insert(item_rows(key, name=f"turn {turn}"), collection=items)
    assert stored(items) == dict.fromkeys(range(5), "turn 39")


def test_upserts_of_many_calls_share_messages_and_the_last_row_of_a_key_counts(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    producer = shop.new_producer()
    with producer.batch(limits=BatchLimits(delay=0.2)) as batch:
        batch.insert(item_rows(1, 2, 3, 4, name="old"), collection=items)
        upserts = [
            batch.upsert(item_rows(key, name=f"{turn}"), collection=items) for turn in range(5) for key in (1, 2, 3, 5)
        ]
        gone = batch.delete([2, 5], collection=items)
        again = batch.upsert(
            pa.concat_tables([item_rows(5, name="back"), item_rows(5, name="again")]), collection=items
        )
    ticks = {each.result().checked().last_tick for each in upserts}
    assert len(ticks) <= len(items.vchannels), "the calls do not share messages"
    assert gone.result().rows == 2
    assert again.result().rows == 1
    assert stored(items) == {1: "4", 3: "4", 4: "old", 5: "again"}


def test_a_call_beyond_the_buffer_is_refused_and_nothing_of_it_is_taken(shop: Database, items: CollectionInfo) -> None:
    batch = shop.new_producer().batch(limits=BatchLimits(bytes=1 << 30, delay=60.0, buffer_bytes=4096, deadline=0.05))
    taken = batch.insert(item_rows(*range(100)), collection=items)
    with pytest.raises(BufferFull, match="append them again later"):
        batch.insert(item_rows(*range(100, 200)), collection=items)
    batch.flush(deadline=10.0)
    assert taken.result(timeout=0).rows == 100
    assert batch.held_bytes == 0
    assert batch.insert(item_rows(1000), collection=items).done() is False
    batch.close(deadline=10.0)


def test_a_batch_goes_out_once_it_has_its_count_of_calls(shop: Database, items: CollectionInfo) -> None:
    key = next(each for each in range(100) if vchannel_index(pa.array([each]), 2)[0] == 0)
    batch = shop.new_producer().batch(limits=BatchLimits(bytes=1 << 30, delay=60.0, count=3))
    first = [batch.insert(item_rows(key), collection=items) for _ in range(2)]
    with pytest.raises(TimeoutError):
        first[0].result(timeout=0.3)
    first.append(batch.insert(item_rows(key), collection=items))
    assert {future.result(timeout=10.0).results[0].message_id for future in first}, "nobody waited for the minute"
    late = batch.insert(item_rows(key), collection=items)
    assert late.done() is False
    batch.close(deadline=10.0)
    assert late.result(timeout=0).rows == 1


def test_a_closed_appender_takes_nothing(shop: Database, items: CollectionInfo) -> None:
    batch = shop.new_producer().batch()
    batch.close()
    with pytest.raises(Closed, match="closed"):
        batch.insert(item_rows(1), collection=items)


def test_close_gives_up_at_its_deadline_and_says_so_of_each_call(shop: Database, items: CollectionInfo) -> None:
    producer = shop.new_producer()
    batch = producer.batch(limits=BatchLimits(delay=60.0))
    lanes = [producer.lane(name.rpartition("_")[0]) for name in items.vchannels]
    with lanes[0].lock.held(), lanes[1].lock.held():  # nothing can be sent
        future = batch.insert(item_rows(1), collection=items)
        with pytest.raises(DeadlineExceeded):
            batch.close(deadline=0.05)
    with pytest.raises(LogUnavailable, match="not in the log"):
        future.result(timeout=5)


def test_a_rejection_is_in_the_result_of_its_call_alone(shop: Database, items: CollectionInfo) -> None:
    shop.catalog.create_partition(items.name, "gone")
    there = shop.definition(items.name)
    shop.catalog.drop_partition(items.name, "gone")
    with shop.new_producer().batch() as batch:
        bad = batch.insert(item_rows(1, 2), collection=there, partition="gone")
        good = batch.insert(item_rows(3, 4), collection=there, partition="_default")
    assert set(bad.result().rejected_by_reason) == {"PARTITION_NOT_FOUND"}
    assert bad.result().rejected_rows == 2
    assert good.result().rejections == []


def test_frames_of_every_kind_go_in_with_one_call(shop: Database, items: CollectionInfo, stored: Stored) -> None:
    import pandas as pd

    producer = shop.new_producer()
    arrow = item_rows(*range(20))

    class Stream:
        def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
            return item_rows(*range(20, 40)).__arrow_c_stream__(requested_schema)

    class Spark:
        def mapInArrow(self, packed: Callable[..., Iterator[pa.RecordBatch]], _: str) -> Spark:
            self.rows = [
                (cell.as_py(),) for batch in packed(iter(item_rows(*range(40, 60)).to_batches())) for cell in batch[0]
            ]
            return self

        def toLocalIterator(self) -> Iterator[tuple[bytes]]:
            return iter(self.rows)

    frames = [arrow, Stream(), Spark(), pd.DataFrame(item_rows(*range(60, 80)).to_pydict())]
    frames += [item_rows(*range(80, 100)).to_reader(), iter(item_rows(*range(100, 120)).to_batches())]
    assert [producer.insert(items, frame).rows for frame in frames] == [20] * 6
    assert stored(items).keys() == set(range(120))
    with pytest.raises(InvalidArgument, match="not a DataFrame"):
        producer.insert(items, 7)


def test_awaited_appends_keep_their_order_and_wait_for_room_without_a_thread(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    async def run() -> list[Written]:
        limits = BatchLimits(delay=0.001, buffer_bytes=2048)
        async with AsyncProducer(shop.new_producer(), limits=limits) as producer:
            writes = [
                asyncio.create_task(producer.insert(items, item_rows(*range(key, key + 10))))
                for key in range(0, 500, 10)
            ]
            found = list(await asyncio.gather(*writes))
            await producer.delete(items, [0, 1])
            return found

    assert sum(each.rows for each in asyncio.run(run())) == 500
    assert stored(items).keys() == set(range(2, 500))


def test_a_future_is_of_the_standard_library(shop: Database, items: CollectionInfo) -> None:
    with shop.new_producer().batch() as batch:
        assert isinstance(batch.insert(item_rows(1), collection=items), Future)
        empty = batch.insert(item_rows(), collection=items)
    assert empty.result(timeout=0).rows == 0


def test_a_future_does_what_any_other_does(shop: Database, items: CollectionInfo) -> None:
    told: list[object] = []

    async def awaited(future: Future[Written]) -> Written:
        return await asyncio.wrap_future(future)

    with shop.new_producer().batch(limits=BatchLimits(delay=0.05)) as batch:
        futures = [batch.insert(item_rows(key), collection=items) for key in range(4)]
        futures[0].add_done_callback(lambda each: told.append(1 / 0))
        futures[0].add_done_callback(told.append)
        assert not any((futures[0].done(), futures[0].cancelled(), futures[0].cancel()))
        assert set(as_completed(futures, timeout=20)) == set(futures)
        assert asyncio.run(awaited(batch.insert(item_rows(9), collection=items))).rows == 1
    futures[1].add_done_callback(told.append)
    assert told == futures[:2]
    assert wait(futures).done == set(futures)
    assert [each.exception() for each in futures] == [None] * 4
    assert [each.result(timeout=0).rows for each in futures] == [1] * 4


def test_a_vchannels_messages_come_in_the_order_of_the_calls(shop: Database, items: CollectionInfo) -> None:
    from millrace.client.consume.scan import scan
    from millrace.message.payload.rows import decode_rows

    keys = [key for key in range(2000) if item_home(key, items) == 0][:200]
    with shop.new_producer().batch(limits=BatchLimits(delay=0.0)) as batch:
        ticks = [batch.insert(item_rows(key), collection=items) for key in keys]
    until = max(each.result().last_tick for each in ticks)
    name = items.vchannels[0]
    found: list[int] = []
    with scan(
        name, wal=Path(shop.settings.wal_uri), tail=shop.connection, filters=[VChannelFilter({name})], until_tick=until
    ) as units:
        for unit in units:
            payload = getattr(unit, "payload", b"")
            if getattr(unit, "rows", 0):
                found += decode_rows(payload, items.schema.arrow()).column("id").to_pylist()
    assert found == keys


def item_home(key: int, items: CollectionInfo) -> int:
    from millrace.message.keys import vchannel_index

    return int(vchannel_index(pa.array([key]), len(items.vchannels))[0])


class Broken:
    """A lane that fails before it takes anything, in a way that nothing is known of."""

    resumed = False

    def deliver(self, source: Callable[[], OutboundEntry | None], *, pipelined: bool) -> None:
        raise ZeroDivisionError("a bug")


def batch_on(lane: Any, items: CollectionInfo, limits: BatchLimits | None = None) -> BatchAppender:
    """A batch appender whose calls go to `lane`."""
    senders: dict[str, ChannelSender] = {}

    def sender(pchannel: str) -> ChannelSender:
        return senders.setdefault(pchannel, ChannelSender(pchannel, lambda: lane, settling=threading.Lock()))

    return BatchAppender(
        sender,
        CallSplitter(),
        known=lambda given: items,
        renewed=lambda given: None,
        evolved=lambda given, rows: items,
        collection=items,
        limits=limits,
    )


def test_what_is_given_up_gives_its_room_back_and_tells_who_waits_for_it(items: CollectionInfo) -> None:
    lane: Any = Broken()
    batch = batch_on(lane, items, limits=BatchLimits(buffer_bytes=30, deadline=10.0, delay=0.2))
    for _ in range(3):  # each fills the buffer
        future = batch.insert(item_rows(1), collection=items)
        told = threading.Event()
        batch.on_capacity(told.set)
        with pytest.raises(ZeroDivisionError):
            future.result(timeout=10)
        assert told.wait(10), "who waits for room without a thread waits for ever"
    assert batch.held_bytes == 0
    batch.close()


def test_a_closed_appender_tells_who_waits_for_room(items: CollectionInfo) -> None:
    lane: Any = Broken()
    lane.deliver = lambda source, pipelined: threading.Event().wait(0.05) and None
    batch = batch_on(lane, items)
    future = batch.insert(item_rows(1), collection=items)
    told = threading.Event()
    batch.on_capacity(told.set)
    with pytest.raises(DeadlineExceeded):
        batch.close(deadline=0.1)
    with pytest.raises(LogUnavailable):
        future.result(timeout=10)
    assert told.wait(10)
    assert batch.held_bytes == 0


def test_a_batch_is_a_collections_or_is_told_one_and_the_older_order_of_arguments_warns(items: CollectionInfo) -> None:
    lane: Any = Broken()
    lane.deliver = lambda source, pipelined: None
    batch, other = batch_on(lane, items), batch_on(lane, items)
    other._collection = None
    with pytest.raises(InvalidArgument, match="name the collection"):
        other.insert(item_rows(1))
    with pytest.warns(DeprecationWarning, match="collection=collection"):
        other.insert(items, item_rows(1))  # type: ignore[arg-type]
    with (
        pytest.warns(DeprecationWarning, match="rows, collection"),
        pytest.raises(InvalidArgument, match="given by name"),
    ):
        other.delete(items, [1], "_default")  # type: ignore[arg-type]
    other.upsert(item_rows(2), collection=items.name)
    batch.delete([1])
    assert batch.held_bytes == 8
    assert other.held_bytes > 2 * 8
    for each in (batch, other):
        with pytest.raises(DeadlineExceeded):
            each.close(deadline=0.0)
