"""Law 1: the chain is a pure function of (state, log range), whatever the batch boundaries.

The state is canonical and small.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.message.types import MessageType as T
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState
from tests.laws.parts import Msg
from tests.laws.profile import examples
from tests.laws.real import merged, new_state, run
from tests.laws.scribe import COLLECTIONS, FIELDS, LOGS, Scribe, create_body, keys_at, opening, rows_payload

CUTS = st.sets(st.integers(1, 24), max_size=6)


@examples(70)
@given(LOGS, CUTS)
def test_batch_boundaries_change_neither_rows_nor_state(log: Scribe, cuts: set[int]) -> None:
    every = range(len(log.written.entries))
    singly, batched = run(log.written, every), run(log.written, cuts)
    assert singly.rows == batched.rows
    at = {outcome.state.position: outcome.state.to_bytes() for outcome in singly.outcomes}
    for outcome in batched.outcomes:
        assert outcome.state.to_bytes() == at[outcome.state.position]


@examples(70)
@given(LOGS, st.integers(1, 5))
def test_how_many_messages_a_step_may_judge_changes_neither_rows_nor_state(log: Scribe, most: int) -> None:
    whole, stepped = run(log.written), run(log.written, chain=Chain(max_run=most))
    assert whole.rows == stepped.rows
    assert whole.state.to_bytes() == stepped.state.to_bytes()


@examples(40)
@given(LOGS, st.integers(1, 24))
def test_a_stored_state_goes_on_as_the_live_one(log: Scribe, cut: int) -> None:
    cut = min(cut, len(log.written.entries))
    before = run(log.written, [cut]).outcomes[0].state
    stored = before.to_bytes()
    restored = ChannelState.from_bytes(stored)
    assert restored.to_bytes() == stored
    live, again = (Chain().process(state, log.written.read(cut)) for state in (before, restored))
    assert merged(live.messages, live.rejections) == merged(again.messages, again.rejections)
    assert live.state.to_bytes() == again.state.to_bytes()


@examples(40)
@given(LOGS, st.integers(1, 24))
def test_processing_leaves_the_state_it_started_from_alone(log: Scribe, cut: int) -> None:
    state = run(log.written, [cut]).outcomes[0].state
    stored = state.to_bytes()
    Chain().process(state, log.written.read(cut))
    assert state.to_bytes() == stored


@examples(40)
@given(LOGS)
def test_one_chain_object_serves_any_number_of_channels(log: Scribe) -> None:
    chain, states = Chain(), [new_state(), new_state()]
    rows: list[list[dict[str, object]]] = [[], []]
    for place in range(len(log.written.entries)):
        for number, state in enumerate(states):
            outcome = chain.process(state, log.written.read(place, place + 1))
            rows[number] += merged(outcome.messages, outcome.rejections)
            states[number] = outcome.state
    assert rows[0] == rows[1] == run(log.written).rows


@pytest.mark.slow
def test_the_state_stays_bounded_however_long_the_log() -> None:
    scribe = Scribe()
    create = Msg(T.CREATE_COLLECTION, "p0_1v0", collection_id=1, payload=create_body(1))
    scribe.append([opening(1), create])
    payload, batch = rows_payload(FIELDS, keys_at(0, len(COLLECTIONS[1]))[:1])
    on: dict[str, Any] = {"vchannel": "p0_1v0", "collection_id": 1}
    row: dict[str, Any] = {**on, "partition_id": 1, "schema_version": 1, "rows": 1, "payload": payload, "batch": batch}
    sizes = []
    for number in range(1, 241):
        scribe.append(
            [
                Msg(T.BEGIN_TXN, **on, txn_id=number),
                Msg(T.INSERT, **row, txn_id=number),
                Msg(T.INSERT, **row, producer_id=number),
                Msg((T.COMMIT_TXN, T.ROLLBACK_TXN, T.TIME_TICK)[number % 3], **on, txn_id=number),
            ],
            after_ms=11,
        )
        if number % 80 == 0:
            sizes.append(len(run(scribe.written).state.to_bytes()))
    assert sizes[2] < 1.25 * sizes[0] + 200
    assert sizes[2] < 8_000
