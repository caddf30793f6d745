"""Transactions as context managers: the lease is kept while the block runs, and a lost one is said at the commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from millrace.base.errors import InvalidArgument, TransactionLost
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.transaction import DEFAULT_LEASE_MS, Transaction
from millrace.client.produce.written import Written
from millrace.message.ids import LOGICAL_BITS, pchannel_of
from millrace.message.model import MutableMessage
from millrace.wal.config import ChainConfig
from tests.client.conftest import item_rows
from tests.client.produce.test_batch_appender import item_home

Stored = Callable[..., dict[int, str]]


def mine(items: CollectionInfo, count: int = 3) -> list[int]:
    return [key for key in range(100) if item_home(key, items) == 0][:count]


def let_log_time_pass(shop: Database, items: CollectionInfo, milliseconds: int) -> None:
    """Until the log's own clock has gone on that far."""
    name = pchannel_of(items.vchannels[0])
    end = (shop.connection.tick(name) >> LOGICAL_BITS) + milliseconds
    for _ in range(1000):
        if shop.connection.tick(name) >> LOGICAL_BITS >= end:
            return
        threading.Event().wait(0.02)  # the poll interval of a bounded wait
    raise AssertionError("the log's clock stands still")


def end_by_a_flush(shop: Database, items: CollectionInfo, txn: Transaction) -> None:
    txn.insert(item_rows(*mine(items)))
    shop.catalog.flush(items.name)


@pytest.mark.slow
def test_a_block_may_last_longer_than_its_lease(shop: Database, items: CollectionInfo, stored: Stored) -> None:
    # Three seconds may a renewal come late on a machine that has much to do.
    with shop.new_producer().transaction(items, keepalive_ms=4500) as txn:
        txn.insert(item_rows(*mine(items), name="kept"))
        let_log_time_pass(shop, items, 5000)
        assert not txn.lost
    assert txn.commit_tick is not None
    assert set(stored(items)) == set(mine(items))
    assert stored(items, at=txn.commit_tick - 1) == {}


class Clock:
    """The end of a block as a lease's keeper waits for it.

    Time that passes by waiting alone, and no other message comes.
    """

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self._seconds = seconds

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.now > self._seconds


class Renewals:
    """A producer that notes when it is sent what."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at = [0.0]

    def send(self, messages: Sequence[MutableMessage], *, raise_rejected: bool = True) -> Written:
        self.at.append(self._clock.now)
        return Written()


@pytest.mark.parametrize("lease_ms", [None, 600, 60_000])
def test_a_quiet_block_of_many_leases_is_renewed_twice_in_each(items: CollectionInfo, lease_ms: int | None) -> None:
    lease = (lease_ms or DEFAULT_LEASE_MS) / 1000
    clock = Clock(5 * lease)
    renewals = Renewals(clock)
    txn = Transaction(renewals, items, items.vchannels[0], keepalive_ms=lease_ms)
    txn._ended = clock  # type: ignore[assignment]
    txn._keep()
    assert max(later - earlier for earlier, later in pairwise([*renewals.at, 5 * lease])) < lease / 2
    assert len(renewals.at) <= 5 * 4, "and no more often than it takes"


def test_the_lease_that_none_names_is_the_chains() -> None:
    assert ChainConfig().default_txn_keepalive_ms == DEFAULT_LEASE_MS


@pytest.mark.slow
def test_a_lease_is_renewed_for_the_longest_lifetime_and_no_longer(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    begun = shop.new_producer().transaction(items, keepalive_ms=200, max_lifetime=0.0)

    def work() -> None:
        begun.insert(item_rows(*mine(items)))
        let_log_time_pass(shop, items, 500)

    with pytest.raises(TransactionLost, match="nothing of it is visible") as caught, begun:
        work()
    assert caught.value.reason == "TXN_EXPIRED"
    assert begun.commit_tick is None
    assert stored(items) == {}


def test_a_flush_that_ends_a_transaction_is_said_at_its_commit(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    with pytest.raises(TransactionLost) as caught, shop.new_producer().transaction(items) as txn:
        end_by_a_flush(shop, items, txn)
    assert caught.value.reason == "TXN_NOT_ACTIVE"
    assert stored(items) == {}


def test_an_error_in_the_block_is_the_callers_own_even_where_the_transaction_is_lost(
    shop: Database, items: CollectionInfo
) -> None:
    def work(txn: Transaction) -> None:
        end_by_a_flush(shop, items, txn)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), shop.new_producer().transaction(items) as txn:
        work(txn)


def test_keys_are_deleted_and_inserted_in_the_order_of_the_block(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    producer = shop.new_producer()
    keys = mine(items)
    producer.insert(items, item_rows(*keys, name="old"))
    with producer.transaction(items) as txn:
        txn.delete(keys)
        txn.insert(item_rows(*keys[:2], name="new"))
    assert stored(items) == dict.fromkeys(keys[:2], "new")


def test_a_transaction_upserts_and_deletes_by_predicate_with_its_inserts_at_one_tick(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    first, second, third, fourth = mine(items, 4)
    producer = shop.new_producer()
    producer.insert(items, item_rows(first, second, name="old"))
    assert stored(items) == {first: "old", second: "old"}
    before = shop.current_tick(items.pchannels)
    with producer.transaction(items) as txn:
        txn.insert(item_rows(third, name="inserted"))
        txn.upsert(item_rows(first, third, fourth, fourth, name="upserted"))
        deleted = txn.delete_where(f"id = {second}", at=before)
        assert deleted.keys == 1
        assert stored(items) == {first: "old", second: "old"}, "nothing of it is visible before its end"
    assert txn.commit_tick is not None
    assert stored(items) == dict.fromkeys((first, third, fourth), "upserted")
    assert stored(items, at=txn.commit_tick - 1) == {first: "old", second: "old"}


@pytest.mark.slow
def test_keys_of_another_vchannel_are_refused_with_what_to_do_instead(
    shop: Database, items: CollectionInfo, stored: Stored
) -> None:
    [ours], theirs = mine(items, 1), next(key for key in range(100) if item_home(key, items) == 1)
    producer = shop.new_producer()
    producer.insert(items, item_rows(ours, theirs))
    stored(items)
    before = shop.current_tick(items.pchannels)
    uses: list[Callable[[Transaction], object]] = [
        lambda txn: txn.insert(item_rows(ours, theirs)),
        lambda txn: txn.upsert(item_rows(ours, theirs)),
        lambda txn: txn.delete([theirs]),
        lambda txn: txn.delete_where("id >= 0", at=before),
    ]
    for use in uses:
        with (
            pytest.raises(
                InvalidArgument, match=rf"{items.vchannels[1]} too: open a transaction for each.*vchannels=1"
            ),
            producer.transaction(items) as txn,
        ):
            use(txn)
    assert set(stored(items)) == {ours, theirs}
