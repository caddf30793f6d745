"""TxnBuffer: what became visible, in the order it did, however the rows are cut into
pushes and wherever a reader begins.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import WalGap
from millrace.wal.schema import ROW_SCHEMA
from millrace.wal.txn_buffer import VISIBLE_TICK, TxnBuffer

Message = tuple[str, str, int]
"""Type, VChannel, transaction id; the tick is its place, from 1."""

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["INSERT", "UPSERT", "DELETE", "BEGIN_TXN", "COMMIT_TXN", "ROLLBACK_TXN", "DROP_COLLECTION"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 2),
    ),
    max_size=40,
)


def rows_of(messages: list[Message], first: int = 1) -> pa.Table:
    """ROW_SCHEMA rows of `messages`; what the buffer does not look at is 0."""
    columns = []
    for field in ROW_SCHEMA:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        default: Any = None if field.nullable else "" if pa.types.is_string(kind) else 0
        values = [default] * len(messages)
        if field.name == "time_tick":
            values = list(range(first, first + len(messages)))
        elif field.name in ("type", "vchannel", "txn_id"):
            values = [message[("type", "vchannel", "txn_id").index(field.name)] for message in messages]
        columns.append(pa.array(values, kind).cast(field.type))
    return pa.Table.from_arrays(columns, schema=ROW_SCHEMA)


def accepted(steps: list[Message]) -> list[Message]:
    """Of any steps those that a chain would accept: a transaction's messages while it is open."""
    is_open: set[tuple[str, int]] = set()
    kept = []
    for kind, channel, txn in steps:
        key = (channel, txn)
        if kind == "DROP_COLLECTION":
            kept += [("ROLLBACK_TXN", *each) for each in sorted(is_open) if each[0] == channel]
            is_open = {each for each in is_open if each[0] != channel}
            kept.append((kind, channel, 0))
        elif kind in ("INSERT", "UPSERT", "DELETE"):
            if txn == 0 or key in is_open:
                kept.append((kind, channel, txn))
        elif txn and (kind == "BEGIN_TXN") != (key in is_open):
            is_open ^= {key}
            kept.append((kind, channel, txn))
    return kept


def model(messages: list[Message], after_tick: int) -> list[tuple[int, int]]:
    """(tick, visible tick) of what comes out, in order."""
    held: dict[tuple[str, int], list[int]] = {}
    out = []
    for tick, (kind, channel, txn) in enumerate(messages, 1):
        if kind in ("INSERT", "UPSERT", "DELETE") and txn:
            held.setdefault((channel, txn), []).append(tick)
            continue
        bodies = held.pop((channel, txn), []) if kind in ("COMMIT_TXN", "ROLLBACK_TXN") else []
        out += [(body, tick) for body in bodies if kind == "COMMIT_TXN"]
        out.append((tick, tick))
    return [item for item in out if item[1] > after_tick]


def pushed(buffer: TxnBuffer, table: pa.Table, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(cut % (table.num_rows + 1) for cut in cuts), table.num_rows]
    parts = [buffer.push(table.slice(begin, end - begin)) for begin, end in pairwise(edges)]
    return [(row["time_tick"], row[VISIBLE_TICK]) for part in parts for row in part.to_pylist()]


@given(STEPS, st.lists(st.integers(0, 1000), max_size=4), st.integers(0, 45))
@profile(max_examples=150)
def test_what_comes_out_does_not_depend_on_where_pushes_are_cut(
    steps: list[Message], cuts: list[int], after_tick: int
) -> None:
    messages = accepted(steps)
    buffer = TxnBuffer(after_tick=after_tick)
    assert pushed(buffer, rows_of(messages), cuts) == model(messages, after_tick)
    begun = {(channel, txn) for kind, channel, txn in messages if kind == "BEGIN_TXN"}
    open_now = {
        key
        for key in begun
        if [kind for kind, *place in messages if tuple(place) == key and kind.endswith("_TXN")][-1] == "BEGIN_TXN"
    }
    assert buffer.open_count == len(open_now)


@given(STEPS, st.lists(st.integers(0, 1000), max_size=3), st.integers(0, 45))
@profile(max_examples=150)
def test_a_reader_that_begins_at_the_first_open_begin_misses_and_doubles_nothing(
    steps: list[Message], cuts: list[int], after_tick: int
) -> None:
    messages = accepted(steps)
    is_open: dict[tuple[str, int], int] = {}
    for tick, (kind, channel, txn) in enumerate(messages[:after_tick], 1):
        if kind == "BEGIN_TXN":
            is_open[channel, txn] = tick
        elif kind in ("COMMIT_TXN", "ROLLBACK_TXN"):
            del is_open[channel, txn]
    start = min([*is_open.values(), after_tick + 1])
    found = pushed(TxnBuffer(after_tick=after_tick), rows_of(messages).slice(start - 1), cuts)
    assert found == model(messages, after_tick)


def test_a_commit_without_its_begin_is_a_gap() -> None:
    rows = rows_of([("INSERT", "a", 1), ("COMMIT_TXN", "a", 1)], first=5)
    with pytest.raises(WalGap):
        TxnBuffer(after_tick=4).push(rows)
    assert TxnBuffer(after_tick=6).push(rows).num_rows == 0


def test_bodies_are_dropped_with_their_collection_even_without_a_rollback() -> None:
    buffer = TxnBuffer()
    out = buffer.push(rows_of([("BEGIN_TXN", "a", 1), ("INSERT", "a", 1), ("DROP_COLLECTION", "a", 0)]))
    assert out["type"].to_pylist() == ["BEGIN_TXN", "DROP_COLLECTION"]
    assert buffer.open_count == 0


def test_rows_outside_transactions_pass_without_a_copy() -> None:
    rows = rows_of([("INSERT", "a", 0)] * 3)
    out = TxnBuffer().push(rows)
    assert out["payload"].chunk(0).buffers()[1].address == rows["payload"].chunk(0).buffers()[1].address
