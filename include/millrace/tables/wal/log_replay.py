"""Replays the log through the chain, slice by slice: the result is what the ``wal`` table must hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

import pyarrow as pa

from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId
from millrace.storage.table import open_table
from millrace.tables.wal.table import WalTable, WalTotals
from millrace.wal.chain import Chain, ChainOutcome
from millrace.wal.digest import digest_rows
from millrace.wal.entry_chunks import chunk_entries
from millrace.wal.state import ChannelState

SLICE_BYTES: Final = 32 << 20
"""Bytes of the log in memory at once."""


def replay_log(log: Log, state: ChannelState, *, until: LogId) -> Iterator[ChainOutcome]:
    """Yield outcomes from the position of `state` up to `until`; fewer if the log ends before. Raises what `log`
    raises.
    """
    chain = Chain()
    while state.position < until:
        entries = log.read(state.position, end=until, max_bytes=SLICE_BYTES)
        if entries.next <= state.position:
            return
        for portion in chunk_entries(entries):
            outcome = chain.process(state, portion)
            yield outcome
            state = outcome.state


class UncommittedMessages:
    """The messages that the log has after the ``wal`` table, by the chain's rules. For one reader.

    A call continues after the previous one, or after the table if that is further. Memory: a piece of the log, and one
    channel state per PChannel.
    """

    def __init__(self, wal_uri: str, service: LogService) -> None:
        self._wal_uri = wal_uri
        self._service = service
        self._states: dict[str, ChannelState] = {}

    def __call__(self, pchannel: str) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the messages in order, each piece with the tick that it completes. Raises what the log raises."""
        with closing(self._service.open(pchannel)) as log:
            for outcome in replay_log(log, self._state(pchannel), until=log.end()):
                self._states[pchannel] = outcome.state
                yield outcome.messages, outcome.state.last_tick

    def _state(self, pchannel: str) -> ChannelState:
        found = open_table(self._wal_uri)
        taken = None if found is None else WalTable(found).position(pchannel).state
        states = [each for each in (taken, self._states.get(pchannel)) if each is not None]
        return max(states, key=lambda each: each.position, default=ChannelState.new(pchannel))


def replay_totals(log: Log, state: ChannelState, totals: WalTotals, *, until: LogId) -> tuple[ChannelState, WalTotals]:
    """Return the state at `until` (or the end of the log), and the totals there, given `totals` at `state`."""
    for outcome in replay_log(log, state, until=until):
        added = digest_rows(outcome.messages) + digest_rows(outcome.rejections)
        totals += WalTotals(outcome.messages.num_rows, outcome.rejections.num_rows, added)
        state = outcome.state
    return state, totals
