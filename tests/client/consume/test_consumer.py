"""Consumers: every unit in its order, positions that a group keeps, and no gap ever acknowledged."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import (
    GroupBusy,
    InvalidArgument,
    LogUnavailable,
    MillraceError,
    PermissionDenied,
    PositionsBusy,
)
from millrace.base.metrics import Metrics
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume import consumer as consumer_module
from millrace.client.consume.async_consumer import AsyncConsumer
from millrace.client.consume.consumer import Consumer
from millrace.client.consume.delivery import Delivery
from millrace.client.consume.lane_progress import LaneProgress
from millrace.client.consume.parallel_consumer import ParallelConsumer, Work
from millrace.client.consume.scan import Scan
from millrace.client.database import Database
from millrace.message.ids import MessageId
from millrace.message.model import ImmutableMessage
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.node.ingest.definition import ingest_to_end
from millrace.wal.scanner import Latest, TypeFilter
from millrace.wal.state import ChannelState
from tests.client.conftest import item_rows
from tests.node.append.samples import PCHANNEL, VCHANNELS, commit_wal, insert, open_log, opening
from tests.node.append.samples import keys_of as keys_of_vchannel
from tests.waiting import until

INSERTS = TypeFilter({MessageType.INSERT, MessageType.DELETE})


def keys_of(delivery: Delivery) -> list[int]:
    return [key for change in delivery.changes() for key in change.rows.column("id").to_pylist()]


def now(shop: Database, items: CollectionInfo) -> int:
    return max(shop.connection.tick(name) for name in ("dml_0", "dml_1"))


def taken(consumer: Consumer, count: int, *, acknowledge: bool = True) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        delivery = consumer.poll(timeout=10.0)
        assert delivery is not None, f"only {found} came"
        found += keys_of(delivery)
        if acknowledge:
            consumer.acknowledge(delivery)
    return found


def test_a_consumer_gets_every_row_of_the_table_and_the_tail_once(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    producer = shop.new_producer()
    producer.insert(items, item_rows(*range(50)))
    ingest_to_end(shop.settings, shop.log)
    producer.insert(items, item_rows(*range(50, 100)))
    with producer.transaction(items, vchannel=0) as txn:
        txn.keep_alive()
    producer.delete(items, [3, 4])
    with reader.consumer(items.name, filters=[INSERTS], until=now(shop, items)) as consumer:
        found = [key for delivery in consumer for key in keys_of(delivery)]
    assert sorted(found) == sorted([*range(100), 3, 4])
    assert consumer.ended


@pytest.mark.slow
def test_a_group_goes_on_exactly_behind_what_it_acknowledged(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    producer = shop.new_producer()
    for key in range(30):
        producer.insert(items, item_rows(key))
    with reader.consumer(items.name, group=f"mail {items.id}", filters=[INSERTS]) as first:
        done = taken(first, 11)
        taken(first, 5, acknowledge=False)
    with reader.consumer(items.name, group=f"mail {items.id}", filters=[INSERTS]) as second:
        rest = taken(second, 30 - len(done))
        assert second.poll(timeout=0.2) is None
    assert sorted(done + rest) == list(range(30)), "nothing is left out and nothing done comes again"
    with reader.consumer(items.name, group=f"mail {items.id}", filters=[INSERTS], until=now(shop, items)) as third:
        assert [keys_of(each) for each in third] == []


def test_a_group_that_reads_for_the_first_time_follows_its_policy(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    producer = shop.new_producer()
    producer.insert(items, item_rows(1))
    with reader.consumer(items.name, group=f"new {items.id}", start=Latest(), filters=[INSERTS]) as consumer:
        producer.insert(items, item_rows(2))
        assert taken(consumer, 1) == [2]


@pytest.mark.parametrize("interval", [-1.0, float("nan"), "1", True])
def test_a_wrong_commit_interval_is_refused(shop: Database, items: CollectionInfo, interval: Any) -> None:
    """With NaN nothing would be committed before the close."""
    with pytest.raises(InvalidArgument, match="commit_interval"):
        shop.consumer(items.name, group="intervals", commit_interval=interval)


def test_a_consumer_with_exclusive_use_has_all_channels_or_none(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    group = f"busy {items.id}"
    for first in (False, True):
        with (
            reader.consumer(items.name, group=group, exclusive=first),
            pytest.raises(GroupBusy, match="group of its own"),
        ):
            shop.consumer(items.name, group=group, exclusive=True)
    with reader.consumer(items.name, group=group, exclusive=True), shop.consumer(items.name, group=group) as second:
        assert second.poll(timeout=0.0) is None
        assert second.assignment == frozenset()
        assert "outside the division" in second.idle_reason
    reader.consumer(items.name, group=group, exclusive=True).close()


def test_a_position_that_cannot_be_written_now_is_written_later(
    shop: Database, items: CollectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = f"later {items.id}"
    shop.new_producer().insert(items, item_rows(*range(5)))
    faults: list[MillraceError] = [PositionsBusy("held by another")]
    send = shop._group_call

    def call(request: dict[str, Any]) -> dict[str, Any]:
        for fault in faults if "move" in request else ():
            raise fault
        return send(request)

    monkeypatch.setattr(shop, "_group_call", call)
    with shop.consumer(items.name, group=group, filters=[INSERTS], commit_interval=0.0) as consumer:
        assert sorted(taken(consumer, 5)) == [0, 1, 2, 3, 4]
        with pytest.raises(PositionsBusy):
            consumer.commit()
        faults.clear()
    with shop.consumer(items.name, group=group, filters=[INSERTS], commit_interval=0.0, exclusive=True) as consumer:
        shop.new_producer().insert(items, item_rows(5))
        faults.append(GroupBusy("another has it"))
        with pytest.raises(GroupBusy):  # that does not pass
            taken(consumer, 1)
        faults.clear()
        consumer.commit()
    with shop.consumer(items.name, group=group, filters=[INSERTS], until=now(shop, items)) as consumer:
        assert [keys_of(each) for each in consumer] == []


def test_a_dropped_group_begins_anew(shop: Database, reader: Database, items: CollectionInfo) -> None:
    group = f"dropped {items.id}"
    shop.new_producer().insert(items, item_rows(1, 2))
    with reader.consumer(items.name, group=group, filters=[INSERTS]) as consumer:
        assert sorted(taken(consumer, 2)) == [1, 2]
        for other in (shop, reader):
            with pytest.raises(GroupBusy):
                other.drop_group(group)
    reader.drop_group(group)
    reader.drop_group(group)
    with reader.consumer(items.name, group=group, filters=[INSERTS]) as consumer:
        assert sorted(taken(consumer, 2)) == [1, 2], "as the first time"
    shop.drop_group(group)


@pytest.mark.slow
def test_the_lag_is_measured_from_the_log_to_the_consumer(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    metrics = Metrics()
    with reader.consumer(items.name, group="lag", filters=[INSERTS], metrics=metrics) as consumer:
        shop.new_producer().insert(items, item_rows(1))
        delivery = consumer.poll(timeout=10.0)
        assert delivery is not None
        assert 0 <= delivery.lag < 10
        assert b'consumer_unacknowledged{group="lag"' in metrics.render()
        labels = {"group": "lag", "pchannel": delivery.pchannel}
        assert metrics.registry.get_sample_value("millrace_consumer_lag_seconds", labels) == delivery.lag
        assert metrics.registry.get_sample_value("millrace_consumer_delivery_delay_seconds_count", labels) == 1
        assert metrics.registry.get_sample_value("millrace_consumer_delivery_delay_seconds_sum", labels) == delivery.lag
        consumer.acknowledge(delivery)
        assert consumer.poll(timeout=1.5) is None
        assert consumer.lag == 0.0


def test_a_consumer_that_delivered_everything_up_to_its_end_has_no_lag(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    shop.new_producer().insert(items, item_rows(1, 2))
    with reader.consumer(items.name, until=now(shop, items), filters=[INSERTS]) as consumer:
        assert sorted(key for delivery in consumer for key in keys_of(delivery)) == [1, 2]
        assert consumer.lag == 0.0


@settings(max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_no_position_steps_over_a_unit_that_is_not_done(gaps: list[int], chance: object) -> None:
    place, tick = LaneProgress(0), 0
    deliveries = []
    for gap in gaps:
        tick += gap
        message = ImmutableMessage(
            id=MessageId(0, tick, 0, 0), time_tick=tick, last_confirmed=MessageId(0, 0, 0, 0), physical_ms=0, type=1
        )
        deliveries.append(Delivery("p", message))
    place.out.extend(each.ack for each in deliveries)
    place.seen = tick + 5
    order = list(deliveries)
    chance.shuffle(order)  # type: ignore[attr-defined]
    for delivery in order:
        delivery.ack.done = True
        place.settle()
        undone = [each.tick for each in deliveries if not each.done]
        assert place.tick < min(undone, default=tick + 6)
        if not undone:
            assert place.tick == tick + 5


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("by", ["vchannel", "key"])
def test_workers_keep_the_order_of_a_key_and_acknowledge_everything(
    shop: Database, reader: Database, items: CollectionInfo, by: str
) -> None:
    producer = shop.new_producer()
    for turn in range(20):
        producer.insert(items, item_rows(*range(10), price=float(turn)))
    seen: dict[int, list[float]] = {key: [] for key in range(10)}
    guard = threading.Lock()

    def handle(work: Work) -> None:
        for change in work.changes:
            for row in change.rows.to_pylist():
                with guard:
                    seen[row["id"]].append(row["price"])

    with reader.consumer(items.name, group=by, filters=[INSERTS], until=now(shop, items)) as consumer:
        ParallelConsumer(consumer, handle, workers=3, by=by, max_in_flight=5).run()  # type: ignore[arg-type]
        end = consumer.positions
    assert seen == {key: [float(turn) for turn in range(20)] for key in range(10)}
    with reader.consumer(items.name, group=by, filters=[INSERTS], until=max(end.values())) as again:
        assert list(again) == []


def test_work_that_fails_stops_the_pool_and_is_delivered_again(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    producer = shop.new_producer()
    for key in range(20):
        producer.insert(items, item_rows(key))
    done: set[int] = set()
    tries: list[int] = []

    def handle(work: Work) -> None:
        for change in work.changes:
            for key in change.rows.column("id").to_pylist():
                if key == 7:
                    tries.append(key)
                    raise ZeroDivisionError(key)
                done.add(key)

    with reader.consumer(items.name, group=f"fails {items.id}", filters=[INSERTS], until=now(shop, items)) as consumer:
        pool = ParallelConsumer(consumer, handle, workers=2, attempts=3, retry_delay=0.001)
        with pytest.raises(ZeroDivisionError):
            pool.run()
    assert len(tries) == 3
    again: set[int] = set()
    with reader.consumer(items.name, group=f"fails {items.id}", filters=[INSERTS], until=now(shop, items)) as consumer:
        again = {key for delivery in consumer for key in keys_of(delivery)}
    assert 7 in again
    assert done | again == set(range(20)), "what was not done comes again"


@pytest.mark.parametrize("where", ["handle", "acknowledge"])
def test_whatever_ends_a_worker_ends_the_pool(
    shop: Database, items: CollectionInfo, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Otherwise its part of the group would stop without a word."""
    for key in range(5):
        shop.new_producer().insert(items, item_rows(key))

    def fails(each: Any) -> None:
        raise SystemExit(3) if where == "handle" else PermissionDenied("the grant was taken away")

    group = f"ends {items.id}"
    with shop.consumer(items.name, group=group, filters=[INSERTS], until=now(shop, items)) as consumer:
        handle = fails if where == "handle" else lambda work: None
        pool = ParallelConsumer(consumer, handle, workers=2, on_dead=lambda work, error: None)
        with monkeypatch.context() as patched:
            if where == "acknowledge":
                patched.setattr(consumer, "acknowledge", fails)
            with pytest.raises((SystemExit, PermissionDenied)):
                pool.run()
    with shop.consumer(items.name, group=group, filters=[INSERTS], until=now(shop, items)) as consumer:
        assert sorted(key for delivery in consumer for key in keys_of(delivery)) == list(range(5))


@pytest.mark.parametrize("wrong", [{"by": "row"}, {"workers": 0}, {"retry_delay": -1.0}, {"retry_delay": float("nan")}])
def test_wrong_options_of_a_pool_are_refused(shop: Database, items: CollectionInfo, wrong: Any) -> None:
    with shop.consumer(items.name) as consumer, pytest.raises(InvalidArgument):
        ParallelConsumer(consumer, lambda work: None, **wrong)


def test_work_that_fails_for_good_goes_to_the_dead_letters(
    shop: Database, reader: Database, items: CollectionInfo
) -> None:
    for key in range(6):
        shop.new_producer().insert(items, item_rows(key))
    dead: list[tuple[list[int], str]] = []
    done: list[int] = []

    def handle(work: Work) -> None:
        keys = keys_of(work.delivery)
        if 3 in keys:
            raise ValueError("bad row")
        done.extend(keys)

    def on_dead(work: Work, error: Exception) -> None:
        dead.append((keys_of(work.delivery), str(error)))

    with reader.consumer(items.name, group=f"dead {items.id}", filters=[INSERTS], until=now(shop, items)) as consumer:
        ParallelConsumer(consumer, handle, retry_delay=0.001, on_dead=on_dead).run()
    assert dead == [([3], "bad row")]
    assert sorted(done) == [0, 1, 2, 4, 5]


def test_deliveries_can_be_awaited(shop: Database, reader: Database, items: CollectionInfo) -> None:
    found: list[int] = []

    async def run() -> None:
        consumer = reader.consumer(items.name, group=f"async {items.id}", filters=[INSERTS])
        async with AsyncConsumer(consumer) as awaited:
            write: Callable[[], object] = lambda: shop.new_producer().insert(items, item_rows(*range(5)))  # noqa: E731
            writing = asyncio.create_task(asyncio.to_thread(write))
            async for delivery in awaited:
                found.extend(keys_of(delivery))
                awaited.acknowledge(delivery)
                if len(found) == 5:
                    break
            await writing

    asyncio.run(asyncio.wait_for(run(), 20))
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_a_consumer_outlives_the_event_loop_that_waited_for_it(shop: Database, items: CollectionInfo) -> None:
    with shop.consumer(items.name, filters=[INSERTS], start=Latest()) as consumer:
        for _ in range(2):
            assert asyncio.run(AsyncConsumer(consumer).poll(timeout=0.05)) is None
        shop.collection(items).insert(item_rows(1))
        assert taken(consumer, 1) == [1]


@pytest.mark.slow
def test_what_nobody_acknowledges_holds_no_rows(shop: Database, items: CollectionInfo) -> None:
    producer = shop.new_producer()
    for start in range(0, 2_000, 100):
        producer.insert(items, item_rows(*range(start, start + 100)))
    ingest_to_end(shop.settings, shop.log)
    until = now(shop, items)
    with shop.consumer(items.name, filters=[INSERTS], until=until) as consumer:
        found = [keys_of(delivery) for delivery in consumer]
        gc.collect()
        known = [
            each for each in gc.get_objects() if type(each) is Delivery
        ]  # proxies of others load when they are asked
        held = [each for each in known if each.vchannel in items.vchannels]
        assert sum(map(len, found)) == 2_000
        assert len(held) <= 1, "a unit that was handed out is kept"


def test_what_passes_a_consumer_that_nobody_polls_adds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither messages of others, nor errors that pass by themselves."""
    monkeypatch.setattr(consumer_module, "_PAUSE", 0.005)
    with (
        open_log(tmp_path / "log", PCHANNEL) as service,
        AppendHost(service, ChannelState.new) as host,
    ):
        host.append(PCHANNEL, opening()).results()
        commit_wal(service, tmp_path / "wal")
        with Consumer([VCHANNELS[0]], wal=str(tmp_path / "wal"), tail=host, filters=[INSERTS]) as consumer:
            [place] = consumer._places.values()
            for each in range(20):
                host.append(PCHANNEL, encode_entry([insert(keys_of_vchannel(VCHANNELS[1], 1)[0])])).results()
                if each == 10:
                    host.append(PCHANNEL, encode_entry([insert(keys_of_vchannel(VCHANNELS[0], 1)[0])])).results()
                tick = host.tick(PCHANNEL)
                until(lambda tick=tick: place.queued >= tick, "it has passed")  # type: ignore[misc]
            assert len(consumer._ready) <= 3, "a unit, with a mark before and after it"
            delivery = consumer.poll(timeout=5.0)
            assert delivery is not None
            consumer.acknowledge(delivery)
            assert consumer.poll(timeout=0.05) is None
            assert place.tick >= tick
            failed = 0

            def fails(scan: Scan) -> None:
                nonlocal failed
                failed += 1
                raise LogUnavailable("the log is away")

            monkeypatch.setattr(Scan, "poll_once", fails)
            host.append(PCHANNEL, encode_entry([insert(keys_of_vchannel(VCHANNELS[0], 1)[0])])).results()
            until(lambda: failed >= 5, "it tries again")
            monkeypatch.undo()
            with pytest.raises(LogUnavailable):
                consumer.poll(timeout=5.0)
            assert consumer.poll(timeout=5.0) is not None


@pytest.mark.slow
def test_many_small_messages_are_read_ahead_up_to_a_bound(tmp_path: Path) -> None:
    count, ahead = 8_000, 2 << 20
    key = keys_of_vchannel(VCHANNELS[0], 1)[0]
    one = insert(key, body=b"x" * 100)
    with (
        open_log(tmp_path / "log", PCHANNEL) as service,
        AppendHost(service, ChannelState.new) as host,
    ):
        host.append(PCHANNEL, opening()).results()
        for _ in range(10):
            host.append(PCHANNEL, encode_entry([one] * (count // 10))).results()
        commit_wal(service, tmp_path / "wal")
        until = host.tick(PCHANNEL)
        wal = str(tmp_path / "wal")
        tracemalloc.start()
        try:
            with Consumer(
                [VCHANNELS[0]], wal=wal, tail=host, filters=[INSERTS], until_tick=until, prefetch_bytes=ahead
            ) as consumer:
                got = 0
                for delivery in consumer:
                    got += 1
                    consumer.acknowledge(delivery)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert got == count
    assert peak < 2 * ahead, f"{peak >> 10} KiB of objects at once, with {ahead >> 10} to be read ahead"
