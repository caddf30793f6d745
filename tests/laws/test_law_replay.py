"""Law 7: the state at any position comes out the same from any earlier state and the decided rows between."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.message.types import MessageType as T
from millrace.wal.chain import ChainOutcome, replay
from millrace.wal.rows import rows_in_order
from millrace.wal.schema import ROW_SCHEMA
from millrace.wal.state import ChannelState
from tests.laws.parts import Msg
from tests.laws.profile import examples
from tests.laws.real import new_state, run
from tests.laws.scribe import COLLECTIONS, FIELDS, LOGS, Scribe, keys_at, rows_payload

CUTS = st.sets(st.integers(1, 24), min_size=1, max_size=5)


def replayed(earlier: ChannelState, outcomes: list[ChainOutcome]) -> ChannelState:
    """The state behind `outcomes` from their rows alone, as recovery has them: read back from files, in id order."""
    messages = pa.Table.from_batches([outcome.messages for outcome in outcomes], ROW_SCHEMA)
    rejections = pa.Table.from_batches([outcome.rejections for outcome in outcomes], ROW_SCHEMA)
    end = outcomes[-1].state
    return replay(
        earlier,
        rows_in_order(messages, rejections),
        position=end.position,
        last_tick=end.last_tick,
        last_entry=end.last_entry,
        last_entry_crc=end.last_entry_crc,
    )


@examples(80)
@given(LOGS, CUTS)
def test_replaying_decided_rows_gives_the_state_of_processing(log: Scribe, cuts: set[int]) -> None:
    outcomes = run(log.written, cuts).outcomes
    states = [new_state(), *(outcome.state for outcome in outcomes)]
    for begin in range(len(outcomes)):
        for end in range(begin + 1, len(states)):
            stored = states[begin].to_bytes()
            assert replayed(states[begin], outcomes[begin:end]).to_bytes() == states[end].to_bytes()
            assert states[begin].to_bytes() == stored, "replay changed the state it started from"


def of_producers(sends: list[tuple[int, int, bool]]) -> Scribe:
    """One entry with an insert for each (VChannel, producer, whether it begins anew),
    where two producers are remembered.
    """
    scribe = Scribe()
    scribe.usual_opening()
    following: dict[tuple[int, int], int] = {}
    messages = []
    for vchannel, producer, anew in sends:
        sequence = 0 if anew else following.get((vchannel, producer), 0)
        following[vchannel, producer] = sequence + 1
        payload, batch = rows_payload(FIELDS, keys_at(vchannel, 2)[:1])
        header = {"vchannel": COLLECTIONS[1][vchannel], "collection_id": 1, "schema_version": 1, "partition_id": 1}
        header |= {"producer_id": producer, "sequence": sequence}
        messages.append(Msg(T.INSERT, **header, rows=1, payload=payload, batch=batch))
    scribe.append(messages)
    return scribe


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), st.booleans()), min_size=3, max_size=12))
@example([(0, 1, True), (0, 1, False), (0, 2, True), (0, 3, True), (0, 1, True)])
@example([(0, 1, True), (0, 2, True), (0, 1, False), (0, 3, True), (0, 2, True)])
def test_replay_forgets_the_producers_that_processing_forgot(sends: list[tuple[int, int, bool]]) -> None:
    outcomes = run(of_producers(sends).written).outcomes
    assert replayed(new_state(), outcomes).to_bytes() == outcomes[-1].state.to_bytes()
