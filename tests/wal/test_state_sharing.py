"""A batch copies what it touches, whatever else there is on the PChannel (law 11)."""

from __future__ import annotations

from functools import cache

import pytest

from millrace.message import builders
from millrace.wal.open_work import OpenWork
from millrace.wal.state import VCHANNELS, ChannelState
from tests.wal.busy_channel import PRODUCER, BusyChannel, name_of

MANY = 300


@cache
def state_of_many() -> ChannelState:
    return BusyChannel(MANY, producers=2_000).state


@pytest.fixture
def busy() -> BusyChannel:
    channel = BusyChannel(0)
    channel.state = state_of_many()
    channel._entries = channel.state.position.entry
    return channel


def copied(before: ChannelState, after: ChannelState) -> list[str]:
    return [name for name, channel in after.vchannels.items() if before.vchannels.get(name) is not channel]


@pytest.mark.parametrize("fast", [True, False])
def test_a_batch_that_touches_some_vchannels_copies_those(busy: BusyChannel, fast: bool) -> None:
    for touched in ([7], [3, 150, 299], list(range(100, 130))):
        before = busy.append(*map(busy.insert, touched), fast=fast)
        assert copied(before, busy.state) == sorted(map(name_of, touched))
        assert busy.state.vchannels.changed_keys(before.vchannels) == sorted(map(name_of, touched))


def test_a_transaction_copies_its_own_vchannel(busy: BusyChannel) -> None:
    on = {"vchannel": name_of(9), "collection_id": 9, "term": 1}
    begin, commit = builders.begin_txn(5, **on), builders.commit_txn(5, **on)  # type: ignore[arg-type]
    for message in (begin, busy.insert(9, txn_id=5), commit):
        before = busy.append(message)
        assert copied(before, busy.state) == [name_of(9)]


@pytest.mark.parametrize("fast", [True, False])
def test_a_producer_among_many_copies_no_other(busy: BusyChannel, fast: bool) -> None:
    before = busy.append(busy.insert(1, producer_id=PRODUCER, sequence=1), fast=fast)
    old, new = (state.vchannels[name_of(1)].producers for state in (before, busy.state))
    assert (len(new), new[PRODUCER].next_sequence) == (2_000, 2)
    assert new.changed_keys(old) == [PRODUCER]


def test_ddl_copies_no_other_vchannel(busy: BusyChannel) -> None:
    before = busy.append(builders.drop_collection(vchannel=name_of(5), collection_id=5, term=1))
    assert copied(before, busy.state) == []
    assert len(busy.state.vchannels) == MANY - 1


def test_timers_and_open_transactions_are_known_without_a_walk(
    busy: BusyChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy.state.next_deadline()
    asked: list[str] = []
    of = type(VCHANNELS).of

    def counting(self: object, name: str, *others: object) -> OpenWork:
        asked.append(name)
        return of(VCHANNELS, name, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(type(VCHANNELS), "of", counting)
    busy.append(busy.insert(5))
    assert busy.state.next_deadline() > busy.state.last_tick
    assert (busy.state.first_open_begin(), list(busy.state.open_txns())) == (None, [])
    assert set(asked) <= {name_of(5)}
    assert len(asked) <= 4
