"""A producer that cannot reach the log.

It keeps rows on its disk, and sends them in order, once, when the log is back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from millrace.base.errors import AppendUnresolved, LogUnavailable, SpoolBusy, SpoolFull
from millrace.base.metrics import Metrics
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce import rows as producer_rows
from millrace.client.produce.producer import Producer
from millrace.client.spool.queue import SpoolChannel
from millrace.client.spool.sender import SpoolSender
from millrace.rpc.append_pipeline import AppendFuture, AppendPipeline
from millrace.rpc.outcome import AppendOutcome
from tests.client.conftest import item_rows
from tests.client.medium import Medium
from tests.client.produce.test_transaction import mine

Stored = Callable[..., dict[int, str]]


class Breakable:
    """The way to the append host, which can be cut: before an append, or behind it, so that its answer gets lost."""

    def __init__(self, client: Database) -> None:
        self._append = client.connection
        self.down = False
        self.loses_answers = 0

    def append(self, pchannel: str, entries: Sequence[bytes], *, deadline: float | None = None) -> AppendOutcome:
        if self.down:
            raise LogUnavailable("cut")
        outcome = self._append.append(pchannel, entries, deadline=deadline)
        if self.loses_answers:
            self.loses_answers -= 1
            self.down = True
            raise LogUnavailable("cut behind the append")
        return outcome

    def append_stream(self, pchannel: str, *, deadline: float | None = None) -> AppendPipeline[AppendOutcome]:
        return BreakableStream(self, self._append.append_stream(pchannel, deadline=deadline))  # type: ignore[return-value]


class BreakableStream:
    """A pipeline on that way."""

    def __init__(self, way: Breakable, pipeline: AppendPipeline[AppendOutcome]) -> None:
        self._way = way
        self._pipeline = pipeline
        self.close = pipeline.close

    def submit(self, values: bytes) -> AppendFuture[AppendOutcome]:
        if self._way.down:
            raise LogUnavailable("cut")
        return self._pipeline.submit(values)


@pytest.fixture
def way(shop: Database) -> Breakable:
    return Breakable(shop)


def producer_with(shop: Database, way: Breakable, folder: Path, **options: object) -> Producer:
    spool = SpoolSender(folder, retry_delay=0.02, **options)  # type: ignore[arg-type]
    return Producer(way, shop.catalog, shop.settings, spool=spool)


def test_rows_go_straight_to_the_log_while_it_is_there(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path
) -> None:
    with producer_with(shop, way, tmp_path) as producer:
        written = producer.insert(items, item_rows(1, 2, 3))
        assert (written.rows, written.spooled_rows) == (3, 0)
        assert producer.spool is not None
        assert producer.spool.empty


def test_what_is_spooled_is_sent_in_order_once_the_log_is_back(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    metrics = Metrics()
    with producer_with(shop, way, tmp_path, metrics=metrics) as producer:
        assert producer.spool is not None
        producer.insert(items, item_rows(1, name="direct"))
        way.loses_answers = 1  # the next one is in the log, and nobody knows
        for turn in range(10):
            written = producer.insert(items, item_rows(10 + turn, name=f"spooled {turn}"))
            assert written.spooled_rows == 1
        producer.delete(items, [1])
        assert metrics.producer_spool_entries._value.get() == 11
        assert metrics.producer_spool_bytes._value.get() > 0
        assert metrics.producer_spool_oldest_seconds._value.get() > 0
        way.down = False
        assert producer.spool.wait_empty(timeout=10)
        assert metrics.producer_spool_entries._value.get() == 0
        assert producer.insert(items, item_rows(99, name="direct")).spooled_rows == 0
    expected = {10 + turn: f"spooled {turn}" for turn in range(10)}
    assert stored(items) == expected | {99: "direct"}


def test_a_batch_appender_spools_too_and_its_futures_say_so(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    way.down = True
    with producer_with(shop, way, tmp_path) as producer:
        with producer.batch() as batch:
            futures = [batch.insert(item_rows(key), collection=items) for key in range(50)]
            batch.flush(deadline=10)
            assert all(future.result(timeout=0).spooled_rows == 1 for future in futures)
        way.down = False
        assert producer.spool is not None
        assert producer.spool.wait_empty(timeout=10)
    assert stored(items).keys() == set(range(50))


def test_what_a_process_left_in_the_spool_the_next_one_sends(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    way.down = True
    with producer_with(shop, way, tmp_path) as first:
        first.insert(items, item_rows(1, 2, name="left"))
        with pytest.raises(SpoolBusy):
            producer_with(shop, way, tmp_path)
    with producer_with(shop, way, tmp_path) as second:
        second.delete(items, [1])  # behind what is there, though nobody has sent that yet
        second.insert(items, item_rows(3, name="new"))
        way.down = False
        assert second.spool is not None
        assert second.spool.wait_empty(timeout=10)
    assert stored(items) == {2: "left", 3: "new"}


def test_what_processes_left_goes_out_in_their_order_though_one_knew_no_term(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    """Of one entry the chain fences what has no term and takes what stands behind it, if another producer wrote it."""
    way.down = True
    with producer_with(shop, way, tmp_path) as first:
        for pchannel in items.pchannels:
            first.lane(pchannel).sequencer.term = 0  # as where the log's server is away when a process begins
        first.insert(items, item_rows(8, 9, name="left"))
        first.insert(items, item_rows(1, 2, name="left"))
    with producer_with(shop, way, tmp_path) as second:
        second.delete(items, [1])
        second.insert(items, item_rows(3, name="new"))
        way.down = False
        assert second.spool is not None
        assert second.spool.wait_empty(timeout=10)
    assert stored(items) == {2: "left", 3: "new", 8: "left", 9: "left"}


def accepted(producer: Producer, items: CollectionInfo) -> list[int]:
    """Keys that were taken, one by one, before the first that was not."""
    taken: list[int] = []
    while True:
        try:
            producer.insert(items, item_rows(len(taken)))
        except SpoolFull:
            return taken
        taken.append(len(taken))


def test_a_full_spool_refuses_and_loses_nothing(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    metrics = Metrics()
    way.down = True
    with producer_with(shop, way, tmp_path, max_bytes=8_000, metrics=metrics) as producer:
        taken = accepted(producer, items)
        assert 3 < len(taken) < 100
        assert metrics.producer_spool_refused_total._value.get() == 1
        way.down = False
        assert producer.spool is not None
        assert producer.spool.wait_empty(timeout=10)
        producer.insert(items, item_rows(5000))
    assert stored(items).keys() == {*taken, 5000}


def test_what_the_chain_rejects_of_the_spool_is_written_down_and_told(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    shop.catalog.create_partition(items.name, "gone")
    there = shop.definition(items.name)
    told: list[str] = []
    way.down = True
    with producer_with(shop, way, tmp_path, on_rejected=lambda message, error: told.append(error.reason)) as producer:
        producer.insert(there, item_rows(1), partition="_default")
        producer.insert(there, item_rows(2), partition="gone")
        producer.insert(there, item_rows(3), partition="_default")
        shop.catalog.drop_partition(items.name, "gone")
        way.down = False
        assert producer.spool is not None
        assert producer.spool.wait_empty(timeout=10)
    (line,) = [json.loads(each) for each in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert told == [line["reason"]] == ["PARTITION_NOT_FOUND"]
    assert line["payload"]
    assert stored(items).keys() == {1, 3}


def test_what_the_chain_rejects_is_written_down_for_good_before_it_counts_as_settled(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = Medium(monkeypatch)
    durable: list[bool] = []
    settle = SpoolChannel.settle

    def settled(self: SpoolChannel, number: int) -> None:
        left = medium.restore(tmp_path.stat().st_ino, tmp_path / f"left-{len(durable)}")
        rejected = left / "spool" / "rejected.jsonl"
        durable.append(rejected.exists() and "PARTITION_NOT_FOUND" in rejected.read_text())
        settle(self, number)

    monkeypatch.setattr(SpoolChannel, "settle", settled)
    shop.catalog.create_partition(items.name, "gone")
    there = shop.definition(items.name)
    way.down = True
    with producer_with(shop, way, tmp_path / "spool") as producer:
        producer.insert(there, item_rows(2), partition="gone")
        shop.catalog.drop_partition(items.name, "gone")
        way.down = False
        assert producer.spool is not None
        assert producer.spool.wait_empty(timeout=10)
    assert durable == [True]


@pytest.mark.slow
def test_what_is_spooled_is_sent_in_order_in_many_entries_too(
    shop: Database,
    way: Breakable,
    items: CollectionInfo,
    tmp_path: Path,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_rows, "ENTRY_BYTES", 1)
    way.down = True
    with producer_with(shop, way, tmp_path) as producer:
        for turn in range(5):
            producer.insert(items, item_rows(1, name=f"turn {turn}"))
            producer.delete(items, [1])
        producer.insert(items, item_rows(1, name="last"))
        way.down = False
        assert producer.spool is not None
        assert producer.spool.wait_empty(timeout=10)
    assert stored(items) == {1: "last"}
    assert not (tmp_path / "rejected.jsonl").exists()


@pytest.mark.slow
def test_a_new_term_while_rows_are_spooled_changes_nothing(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path, stored: Stored
) -> None:
    way.down = True
    with producer_with(shop, way, tmp_path) as producer:
        producer.insert(items, item_rows(1, 2, 3))
        for name in ("dml_0", "dml_1"):
            shop.catalog.open_term(name)
        way.down = False
        assert producer.spool is not None
        assert producer.spool.wait_empty(timeout=10)
    assert stored(items).keys() == {1, 2, 3}


def test_a_transaction_is_not_spooled(shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path) -> None:
    way.down = True
    with producer_with(shop, way, tmp_path) as producer:
        producer.insert(items, item_rows(*range(10)))  # on both PChannels
        with pytest.raises(LogUnavailable, match="begin the transaction later"), producer.transaction(items):
            pass


def test_a_transaction_whose_answer_is_lost_is_told_so_although_there_is_a_spool(
    shop: Database, way: Breakable, items: CollectionInfo, tmp_path: Path
) -> None:
    with producer_with(shop, way, tmp_path) as producer:
        begun = producer.transaction(items)

        def work() -> None:
            way.loses_answers = 1
            begun.insert(item_rows(*mine(items)))

        with pytest.raises(AppendUnresolved), begun:
            work()
        way.down = False
        assert producer.spool is not None
        assert producer.spool.wait_empty(timeout=10)


@pytest.mark.slow
def test_without_a_spool_an_unknown_append_is_held_and_settled_before_the_next(
    shop: Database, way: Breakable, items: CollectionInfo, stored: Stored
) -> None:
    with Producer(way, shop.catalog, shop.settings) as producer:
        way.loses_answers = 1
        with pytest.raises(AppendUnresolved, match="settle"):
            producer.insert(items, item_rows(1, name="unknown"))
        assert producer.unresolved == 1
        with pytest.raises(AppendUnresolved):
            producer.settle()
        way.down = False
        settled = producer.settle()
        assert settled.rows == 1
        assert settled.results[0].duplicate, "it was in the log"
        assert producer.unresolved == 0
        way.down = True
        with pytest.raises(AppendUnresolved):
            producer.insert(items, item_rows(2, name="never sent"))
        way.down = False
        producer.insert(items, item_rows(3, name="next"))
    assert stored(items) == {1: "unknown", 2: "never sent", 3: "next"}
