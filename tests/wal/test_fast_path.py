"""The fast path of a few plain messages gives what the interceptors give, and is what single appends take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import crc32c
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.message import builders
from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_entry
from millrace.rpc.outcome import accepted_rows, outcome_rows
from millrace.wal.chain import CHAIN_VERSION, Chain, ChainOutcome
from millrace.wal.fast_path import FEW
from millrace.wal.state import ChannelState
from tests.laws.profile import examples
from tests.laws.real import run
from tests.laws.scribe import LOGS, Scribe
from tests.node.append.samples import PCHANNEL, SCHEMA, VCHANNELS, insert, keys_of, opening

HERE = VCHANNELS[0]
KEYS = keys_of(HERE, FEW + 1)


@examples(120)
@given(LOGS, st.sets(st.integers(1, 24), max_size=24))
def test_rows_states_and_answers_are_those_of_the_interceptors(log: Scribe, cuts: set[int]) -> None:
    fast, slow = run(log.written, cuts), run(log.written, cuts, chain=Chain(fast=False))
    assert fast.rows == slow.rows
    for one, other in zip(fast.outcomes, slow.outcomes, strict=True):
        assert one.state.to_bytes() == other.state.to_bytes()
        assert one.messages.equals(other.messages)
        if one.plain is not None:
            begin = one.state.first_open_begin()
            assert accepted_rows(one.plain, begin).equals(outcome_rows(other.messages, other.rejections))


class Log:
    """A PChannel's log in memory, with its chain."""

    def __init__(self) -> None:
        self.state = ChannelState.new(PCHANNEL)
        self.ms = 1_700_000_000_000
        self.append(*opening())
        self.append(encode_entry([insert(KEYS[0], producer=7, sequence=0)]))  # its segment is created

    def append(self, *values: bytes, fast: bool = True) -> ChainOutcome:
        self.ms += 1
        first = self.ms << 18
        places = range(first, first + len(values))
        batch = pa.record_batch(
            [[0] * len(values), list(places), [self.ms] * len(values), list(values)], schema=ENTRY_SCHEMA
        )
        outcome = Chain(fast=fast).process(self.state, LogEntries(batch, LogId(0, places[-1] + 1)))
        self.state = outcome.state
        return outcome


def test_plain_appends_take_it() -> None:
    log = Log()
    entries = [encode_entry([insert(key, producer=7, sequence=at + 1)]) for at, key in enumerate(KEYS[1 : FEW + 1])]
    assert log.append(entries[0]).plain is not None
    group = log.append(*entries[1:])
    assert group.plain is not None
    assert group.accepted == FEW - 1
    keys = pa.record_batch([pa.array(KEYS[:2])], schema=SCHEMA.key_arrow())
    removed = builders.delete(keys, schema=SCHEMA, vchannel=HERE, collection_id=1, term=1)
    assert log.append(encode_entry([removed])).plain is not None


def test_an_entry_of_several_messages_takes_it_too() -> None:
    log = Log()
    there = keys_of(VCHANNELS[1], 3)
    log.append(encode_entry([insert(there[0], producer=7, sequence=0)]))
    group = log.append(
        encode_entry([insert(KEYS[1], producer=7, sequence=1), insert(there[1], producer=7, sequence=1)]),
        encode_entry([insert(key, producer=7, sequence=2 + at) for at, key in enumerate(KEYS[2:5])]),
    )
    assert group.plain is not None
    assert [(each.vchannel, each.index) for each in group.plain] == [
        (HERE, 0),
        (VCHANNELS[1], 1),
        *((HERE, index) for index in range(3)),
    ]
    assert log.append(encode_entry([insert(KEYS[0])] * (FEW + 1))).plain is None


def test_it_shares_the_vchannels_that_a_message_does_not_change() -> None:
    log = Log()
    log.append(encode_entry([insert(keys_of(VCHANNELS[1], 1)[0], vchannel=VCHANNELS[1])]))
    before = log.state
    bytes_before = before.to_bytes()
    assert log.append(encode_entry([insert(KEYS[1])])).plain is not None
    assert log.state.vchannels[VCHANNELS[1]] is before.vchannels[VCHANNELS[1]]
    assert log.state.vchannels[HERE] is not before.vchannels[HERE]
    assert before.to_bytes() == bytes_before


@pytest.mark.parametrize(
    ("header", "plain"),
    [
        ({"producer_id": 7, "epoch": 2}, True),
        ({"producer_id": 7, "epoch": 900}, True),
        ({"producer_id": 7, "epoch": 0}, False),
        ({"producer_id": 9, "epoch": 5}, True),
        ({"producer_id": 9, "epoch": 5, "barrier_tick": 1_700_000_000_100 << 18}, True),
        ({"producer_id": 9, "epoch": 5, "barrier_tick": 1}, False),  # it may be the one that was forgotten
    ],
)
def test_a_first_message_of_an_epoch_takes_it_also_at_the_limit_of_producers(
    header: dict[str, int], plain: bool
) -> None:
    entry = encode_entry([replace(insert(KEYS[1], producer=7), term=2, **header)])
    logs = []
    for fast in (True, False):
        log = Log()
        opened = builders.term_opening(term=2, chain_version=CHAIN_VERSION, config={"max_producers": 1})
        log.append(encode_entry([opened]))
        for producer in (8, 7):
            log.append(encode_entry([replace(insert(KEYS[0], producer=producer), term=2)]))
        assert log.state.vchannels[HERE].forgotten
        outcome = log.append(entry, fast=fast)
        logs.append((outcome.messages, outcome.rejections, log.state.to_bytes(), outcome.plain is not None))
    (messages, rejections, state, taken), (others, refused, other_state, _) = logs
    assert messages.equals(others)
    assert rejections.equals(refused)
    assert state == other_state
    assert taken == plain


def _with(**header: Any) -> Callable[[MutableMessage], MutableMessage]:
    return lambda message: replace(message, **header)


@pytest.mark.parametrize(
    "change",
    [
        _with(term=2),
        _with(term=0),
        _with(txn_id=3),
        _with(collection_id=2),
        _with(partition_id=9),
        _with(partition_id=0),
        _with(schema_version=2),
        _with(schema_version=0),
        _with(rows=2),
        _with(producer_id=8, sequence=1),
        _with(producer_id=7, epoch=1, sequence=0),
        _with(producer_id=7, epoch=1, sequence=2),
        _with(producer_id=7, epoch=1, sequence=5),
        _with(barrier_tick=(1_800_000_000_000 << 18)),
        _with(vchannel=VCHANNELS[1]),
        _with(vchannel=""),
        _with(vchannel="p0_9v0"),
        _with(payload=b""),
        _with(payload=b"x" * 64),
        _with(type=MessageType.UPSERT),
        _with(type=MessageType.DELETE),
        _with(type=MessageType.FLUSH_ALL),
    ],
)
def test_a_message_that_breaks_a_rule_is_judged_by_the_interceptors(
    change: Callable[[MutableMessage], MutableMessage],
) -> None:
    entry = encode_entry([change(insert(KEYS[1], producer=7, sequence=1))])
    one, other = Log().append(entry), Log().append(entry, fast=False)
    assert one.plain is None
    assert one.messages.equals(other.messages)
    assert one.rejections.equals(other.rejections)
    assert one.state.to_bytes() == other.state.to_bytes()


@pytest.mark.parametrize("place", range(0, 60, 3))
def test_a_damaged_entry_is_never_plain(place: int) -> None:
    entry = bytearray(encode_entry([insert(KEYS[1], producer=7, sequence=1)]))
    entry[place] ^= 0x41
    one, other = Log().append(bytes(entry)), Log().append(bytes(entry), fast=False)
    assert one.plain is None
    assert one.messages.equals(other.messages)
    assert one.rejections.equals(other.rejections)


def stamped(flags: int, stamp: bytes) -> bytes:
    """An entry of a plain message with this stamp, whatever it means, and a right checksum."""
    plain = encode_entry([insert(KEYS[1])])
    rest = bytes([2, flags]) + len(stamp).to_bytes(2, "little") + plain[12:] + stamp
    return plain[:4] + crc32c.crc32c(rest).to_bytes(4, "little") + rest


@pytest.mark.parametrize(
    ("value", "principal"),
    [
        (encode_entry([insert(KEYS[1])]), None),
        (encode_entry([insert(KEYS[1])], principal="etl"), "asserted:etl"),
        (stamped(0, "é".encode()), "é"),
        (stamped(0, b"\xff"), None),
        (stamped(2, b"etl"), None),
        (stamped(0, b""), None),
        (stamped(0, b"x" * 256), None),
    ],
)
def test_a_stamp_is_read_as_the_interceptors_read_it(value: bytes, principal: str | None) -> None:
    fast, slow = (Log().append(value, fast=fast) for fast in (True, False))
    assert fast.state.to_bytes() == slow.state.to_bytes()
    for one, other in ((fast.messages, slow.messages), (fast.rejections, slow.rejections)):
        assert one.to_pylist() == other.to_pylist()
    assert (fast.plain is not None) == (principal is not None or value[8] == 1)
    assert [row["principal"] for row in (*fast.messages.to_pylist(), *fast.rejections.to_pylist())] == [principal]
