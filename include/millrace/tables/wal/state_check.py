"""States of the ``wal`` table that cannot be taken at their word: older ones to go back to, and a replay that proves one.

A state row has a checksum; one that an earlier build wrote has none until its PChannel's next commit, and is held against the log:
run through the chain from an older state it must give these very bytes. An older state is that of the commit before, whose file
stays until VACUUM, or the one before the log's first entry.
"""

from __future__ import annotations

from typing import Final

from millrace.base.errors import StateDamaged
from millrace.log.protocol import Log
from millrace.message.ids import EARLIEST
from millrace.tables.wal.log_replay import replay_totals
from millrace.tables.wal.table import WalTable, WalTotals
from millrace.wal.state import ChannelState

MAX_LOOKBACK: Final = 12
"""Earlier versions of the table that are looked at: 1, 2, 4 ... before."""


def previous_state(table: WalTable, log: Log, pchannel: str) -> tuple[ChannelState, WalTotals] | None:
    """The nearest state before the newest commit from which the log that is left leads on, with what the WAL added up to there."""
    commits, begin = table.commits(pchannel), log.describe().begin
    for power in range(MAX_LOOKBACK):
        version = table.version - (1 << power)
        found = table.position_at(pchannel, version) if version > 0 else None
        if found is None:
            continue
        state = found.state
        if state is not None and found.commits < commits and state.position >= begin:
            return state, found.totals
    return (ChannelState.new(pchannel), WalTotals()) if begin <= EARLIEST else None


def check_state(table: WalTable, log: Log, pchannel: str) -> None:
    """Hold a state row without a checksum against the log; one that has a checksum is good already. Raises StateDamaged.

    Where the log no longer reaches back to an older state nothing can be said, and where it ends before the row's position that
    is another error (LogRegressed), which whoever reads on meets.
    """
    position = table.position(pchannel)
    stands = position.position
    if position.has_checksum or stands is None:
        return
    start = previous_state(table, log, pchannel)
    if start is None:
        return
    state, totals = replay_totals(log, *start, until=stands)
    if state.position == stands and (state.to_bytes(), totals) != (position.state_bytes, position.totals):
        raise StateDamaged(
            f"the state row of {pchannel} is not what the log gives at {stands}: run the operation recovery (mode repair), which"
            " computes it again"
        )


def valid_state(table: WalTable, log: Log, pchannel: str) -> ChannelState:
    """A state to follow the log from: the newest, or where that is damaged an older one. Raises StateDamaged where there is none."""
    try:
        check_state(table, log, pchannel)
        return table.position(pchannel).state or ChannelState.new(pchannel)
    except StateDamaged:
        start = previous_state(table, log, pchannel)
        if start is None:
            raise
        return start[0]
