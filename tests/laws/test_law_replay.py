"""Law 7: the state at any position comes out the same from any earlier state and the decided rows between."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from millrace.wal.chain import Outcome, replay
from millrace.wal.rows import rows_in_order
from millrace.wal.schema import ROW_SCHEMA
from millrace.wal.state import ChannelState
from tests.laws.profile import examples
from tests.laws.real import new_state, run
from tests.laws.scribe import LOGS, Scribe

CUTS = st.sets(st.integers(1, 24), min_size=1, max_size=5)


def replayed(earlier: ChannelState, outcomes: list[Outcome]) -> ChannelState:
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
