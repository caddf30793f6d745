"""The log run through the chain again, slice by slice: what the ``wal`` table must hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from millrace.log.protocol import Log
from millrace.message.ids import LogId
from millrace.tables.wal.table import Totals
from millrace.wal.chain import Chain, Outcome
from millrace.wal.digest import digest
from millrace.wal.portions import portions
from millrace.wal.state import ChannelState

SLICE_BYTES: Final = 32 << 20
"""Of the log that are in memory at once."""


def replay_log(log: Log, state: ChannelState, *, until: LogId) -> Iterator[Outcome]:
    """Outcomes from the position of `state` up to `until`, in order; fewer where the log has no more. Raises what `log` raises."""
    chain = Chain()
    while state.position < until:
        entries = log.read(state.position, end=until, max_bytes=SLICE_BYTES)
        if entries.next <= state.position:
            return
        for portion in portions(entries):
            outcome = chain.process(state, portion)
            yield outcome
            state = outcome.state


def replayed(log: Log, state: ChannelState, totals: Totals, *, until: LogId) -> tuple[ChannelState, Totals]:
    """The state at `until` (or where the log ends), and what rows add up to there that add up to `totals` at `state`."""
    for outcome in replay_log(log, state, until=until):
        added = digest(outcome.messages) + digest(outcome.rejections)
        totals += Totals(outcome.messages.num_rows, outcome.rejections.num_rows, added)
        state = outcome.state
    return state, totals
