"""Transactions as context managers: the lease is kept while the block runs, and a lost one is said at the commit."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from millrace.base.errors import TransactionLost
from millrace.catalog.collection import Collection, pchannel_of
from millrace.client.client import Client
from millrace.client.produce.transaction import Transaction
from millrace.message.ids import LOGICAL_BITS
from tests.client.conftest import item_rows
from tests.client.produce.test_batch_appender import item_home

Stored = Callable[..., dict[int, str]]


def mine(items: Collection, count: int = 3) -> list[int]:
    return [key for key in range(100) if item_home(key, items) == 0][:count]


def let_log_time_pass(shop: Client, items: Collection, milliseconds: int) -> None:
    """Until the log's own clock has gone on that far."""
    name = pchannel_of(items.vchannels[0])
    end = (shop.append.tick(name) >> LOGICAL_BITS) + milliseconds
    for _ in range(1000):
        if shop.append.tick(name) >> LOGICAL_BITS >= end:
            return
        threading.Event().wait(0.02)  # the poll interval of a bounded wait
    raise AssertionError("the log's clock stands still")


def end_by_a_flush(shop: Client, items: Collection, txn: Transaction) -> None:
    txn.insert(item_rows(*mine(items)))
    shop.catalog.flush(items.name)


def test_a_block_may_last_longer_than_its_lease(shop: Client, items: Collection, stored: Stored) -> None:
    # Three seconds may a renewal come late on a machine that has much to do.
    with shop.producer().transaction(items, keepalive_ms=4500) as txn:
        txn.insert(item_rows(*mine(items), name="kept"))
        let_log_time_pass(shop, items, 5000)
        assert not txn.lost
    assert txn.commit_tick is not None
    assert set(stored(items)) == set(mine(items))
    assert stored(items, at=txn.commit_tick - 1) == {}


def test_a_lease_is_renewed_for_the_longest_lifetime_and_no_longer(
    shop: Client, items: Collection, stored: Stored
) -> None:
    begun = shop.producer().transaction(items, keepalive_ms=200, max_lifetime=0.0)

    def work() -> None:
        begun.insert(item_rows(*mine(items)))
        let_log_time_pass(shop, items, 500)

    with pytest.raises(TransactionLost, match="nothing of it is visible") as caught, begun:
        work()
    assert caught.value.reason == "TXN_EXPIRED"
    assert begun.commit_tick is None
    assert stored(items) == {}


def test_a_flush_that_ends_a_transaction_is_said_at_its_commit(shop: Client, items: Collection, stored: Stored) -> None:
    with pytest.raises(TransactionLost) as caught, shop.producer().transaction(items) as txn:
        end_by_a_flush(shop, items, txn)
    assert caught.value.reason == "TXN_NOT_ACTIVE"
    assert stored(items) == {}


def test_an_error_in_the_block_is_the_callers_own_even_where_the_transaction_is_lost(
    shop: Client, items: Collection
) -> None:
    def work(txn: Transaction) -> None:
        end_by_a_flush(shop, items, txn)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), shop.producer().transaction(items) as txn:
        work(txn)


def test_keys_are_deleted_and_inserted_in_the_order_of_the_block(
    shop: Client, items: Collection, stored: Stored
) -> None:
    producer = shop.producer()
    keys = mine(items)
    producer.insert(items, item_rows(*keys, name="old"))
    with producer.transaction(items) as txn:
        txn.delete(keys)
        txn.insert(item_rows(*keys[:2], name="new"))
    assert stored(items) == dict.fromkeys(keys[:2], "new")
