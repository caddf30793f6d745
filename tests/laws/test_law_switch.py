"""A switch of the backend is nothing to the chain: the log up to its AlterWAL and the next one are one log (law 1)."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import assume, given
from hypothesis import strategies as st

from millrace.message.builders import alter_wal, config
from millrace.message.ids import GENERATION_BITS, LogId
from millrace.message.types import MessageType as T
from millrace.message.wire.encode import encode_entry
from tests.laws.parts import Row
from tests.laws.profile import examples
from tests.laws.real import Ran, run
from tests.laws.scribe import LOGS, Scribe, Written

CUTS = st.sets(st.integers(1, 34), max_size=6)
SECOND = 1 << GENERATION_BITS


def as_one(row: Row) -> Row:
    """The row as it would be if the log had never changed its backend."""
    row = dict(row)
    for name in ("ledger", "lc_ledger"):
        row[name] = 0
    if row["detail"]:
        row["detail"] = row["detail"].replace(f"{SECOND}:", "0:")
    return row


def state_as_one(ran: Ran) -> str:
    """The state behind a run, but for what only the two barriers' own bytes differ in."""
    state = ran.state.copy()
    state.last_entry_crc = 0
    return state.to_bytes()[1:].decode().replace(str(SECOND), "0")


def switched(log: Scribe, place: int, outside: Iterable[int]) -> tuple[Written, Written]:
    """The log with a barrier behind `place` entries, over two backends and as one.

    Entries `outside` follow it in the first.
    """
    entries = log.written.entries
    term, stamp = log.written.snapshots[place - 1]["term"], entries[place - 1][1]
    barrier = encode_entry([alter_wal(term=term, generation=1, log="")])
    nothing = encode_entry([config({}, term=term)])
    before = [(LogId(0, n), ms, value) for n, (_, ms, value) in enumerate(entries[:place], 1)]
    numbered = list(enumerate(entries[place:], place + 2))
    one = [
        *before,
        (LogId(0, place + 1), stamp, nothing),
        *((LogId(0, n), ms, value) for n, (_, ms, value) in numbered),
    ]
    raced = [(LogId(0, place + 2 + n), stamp, entries[k % len(entries)][2]) for n, k in enumerate(outside)]
    two = [*before, (LogId(0, place + 1), stamp, barrier), *raced]
    two += [(LogId(SECOND, n), ms, value) for n, (_, ms, value) in numbered]
    return Written(entries=two), Written(entries=one)


def has_switch(log: Scribe) -> bool:
    return any(snapshot["position"][0] for snapshot in log.written.snapshots)


@examples(70)
@given(LOGS, st.integers(1, 24), st.lists(st.integers(0, 24), max_size=3), CUTS)
def test_a_log_over_two_backends_is_judged_as_one_log_with_the_same_entries(
    log: Scribe, place: int, outside: list[int], cuts: set[int]
) -> None:
    assume(not has_switch(log))
    place = min(place, len(log.written.entries))
    assume(log.written.snapshots[place - 1]["term"] > 0)
    two, one = switched(log, place, outside)
    parts, whole = run(two, cuts), run(one)
    barriers = [n for n, row in enumerate(parts.rows) if row["type"] == T.ALTER_WAL.name and row["reason"] is None]
    assume(barriers)  # a term that runs version 1 knows no AlterWAL
    (barrier,) = barriers
    stands_for = whole.rows[barrier]
    assert stands_for["type"] == T.CONFIG.name
    parts.rows[barrier] |= {"type": stands_for["type"], "payload": stands_for["payload"]}
    assert [as_one(row) for row in parts.rows] == whole.rows
    last_is_barrier = place == len(log.written.entries)
    if not last_is_barrier:
        assert state_as_one(parts) == state_as_one(whole)
    else:
        assert parts.state.position == LogId(SECOND, 0)
        assert parts.state.last_entry == LogId(0, place + 1)


@examples(40)
@given(LOGS, st.integers(1, 24), st.lists(st.integers(0, 24), min_size=1, max_size=4), CUTS)
def test_what_stands_behind_the_barrier_in_the_old_backend_is_never_read_wherever_a_batch_ends(
    log: Scribe, place: int, outside: list[int], cuts: set[int]
) -> None:
    place = min(place, len(log.written.entries))
    assume(log.written.snapshots[place - 1]["term"] > 0)
    assume(not has_switch(log))
    two, _ = switched(log, place, outside)
    clean = Written(entries=[entry for entry in two.entries if entry[0] <= LogId(0, place + 1) or entry[0].generation])
    found, wanted = run(two, cuts), run(clean)
    assume(any(row["type"] == T.ALTER_WAL.name and row["reason"] is None for row in wanted.rows))
    assert found.rows == wanted.rows
    assert found.state.to_bytes() == wanted.state.to_bytes()
