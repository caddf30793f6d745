"""The real chain as the laws drive it, and its rows in the plain form that the model's rows have."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millrace.message.types import MessageType as T
from millrace.wal.chain import Chain, ChainOutcome
from millrace.wal.state import ChannelState
from tests.laws.parts import Row
from tests.laws.scribe import PCHANNEL, Written

EMITTED_ALWAYS = {T.CREATE_SEGMENT.name, T.FLUSH.name}


@dataclass
class Ran:
    """What a run of the chain gave: its rows, and per batch its outcome."""

    rows: list[Row]
    outcomes: list[ChainOutcome]

    @property
    def state(self) -> ChannelState:
        return self.outcomes[-1].state


def new_state() -> ChannelState:
    return ChannelState.new(PCHANNEL)


def run(
    written: Written,
    cuts: Iterable[int] = (),
    *,
    state: ChannelState | None = None,
    begin: int = 0,
    chain: Chain | None = None,
) -> Ran:
    """Process entries from `begin` on, in batches that end at each of `cuts` (entry numbers) and at the end."""
    chain = Chain() if chain is None else chain
    state = new_state() if state is None else state
    ran = Ran([], [])
    for cut in [*sorted({cut for cut in cuts if begin < cut < len(written.entries)}), len(written.entries)]:
        outcome = chain.process(state, written.read(begin, cut))
        ran.rows += merged(outcome.messages, outcome.rejections)
        state, begin = outcome.state, cut
        ran.outcomes.append(outcome)
    return ran


def snapshot_of(state: ChannelState) -> dict[str, Any]:
    """The state in the plain form of `Model.snapshot`."""
    channels = sorted(state.vchannels.items())
    segments = [(name, segment) for name, channel in channels for segment in channel.growing.values()]
    return {
        "position": tuple(state.position),
        "term": state.term,
        "last_tick": state.last_tick,
        "config": state.config.to_json(),
        "mvcc": {name: channel.mvcc for name, channel in channels},
        "txns": sorted((name, txn.id, tuple(txn.begin)) for name, channel in channels for txn in channel.txns.values()),
        "growing": {
            segment.id: (name, segment.partition_id, segment.rows, segment.bytes) for name, segment in segments
        },
        "sealed": sorted(segment_id for _, channel in channels for segment_id in channel.sealed),
        "producers": {
            (name, producer_id): (producer.epoch, producer.next_sequence)
            for name, channel in channels
            for producer_id, producer in channel.producers.items()
        },
    }


def merged(*batches: pa.RecordBatch) -> list[Row]:
    """The rows of several batches, by id."""
    rows = [row for batch in batches for row in batch.to_pylist()]
    return sorted(rows, key=row_id)


def row_id(row: Row) -> tuple[int, int, int, int]:
    return (row["ledger"], row["entry"], row["index"], row["ordinal"])


def confirmed_id(row: Row) -> tuple[int, int, int, int]:
    return (row["lc_ledger"], row["lc_entry"], row["lc_index"], row["lc_ordinal"])


def is_emitted(row: Row) -> bool:
    """Whether the chain made this row by itself (a client's rollback has no detail; one that the chain emits has)."""
    if row["reason"] is not None:
        return False
    return row["type"] in EMITTED_ALWAYS or (row["type"] == T.ROLLBACK_TXN.name and row["detail"] is not None)


def plain(row: Row) -> Row:
    """The row without what docs/chain.md leaves open.

    A rejection in words, the spelling of a body, absent or empty bytes.
    """
    row = dict(row)
    row["payload"] = row["payload"] or b""
    if row["type"] == T.FLUSH.name and row["reason"] is None:
        row["payload"] = json.loads(row["payload"])
    if row["reason"] not in (None, "DUPLICATE"):
        row["detail"] = None
    return row


def assert_same_rows(expected: list[Row], got: list[Row]) -> None:
    """Row for row; a failure shows the first row that differs, and only the columns that do."""
    for number, (one, other) in enumerate(zip(expected, got, strict=False)):
        left, right = plain(one), plain(other)
        differing = {name: (left[name], right.get(name)) for name in left if left[name] != right.get(name)}
        assert not differing, f"row {number} ({left['type']} {row_id(left)}): (expected, got) {differing}"
    assert len(expected) == len(got), f"expected {len(expected)} rows, got {len(got)}: {[*expected, *got][-1]}"
