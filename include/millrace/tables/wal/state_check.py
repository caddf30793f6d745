"""State rows of the ``wal`` table that need proof: older states to fall back to, and a replay that proves a state.

A state row has a checksum. One that an earlier build wrote has none until its PChannel's next commit. It is checked
against the log: the chain, run from an older state, must give exactly these bytes. An older state is that of the
previous commit, whose file exists until VACUUM, or the state before the log's first entry.
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
"""Number of earlier versions to try: 1, 2, 4 ... before."""


def previous_state(table: WalTable, log: Log, pchannel: str) -> tuple[ChannelState, WalTotals] | None:
    """Return the nearest earlier state from which the remaining log leads on, with the WAL's totals there."""
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
    """Check a state row without a checksum against the log; a row with a checksum is already verified. Raises
    StateDamaged.

    If the log no longer reaches back to an older state, nothing can be checked. A log that ends before the row's
    position is another error (LogRegressed), which the next reader raises.
    """
    position = table.position(pchannel)
    committed = position.position
    if position.has_checksum or committed is None:
        return
    start = previous_state(table, log, pchannel)
    if start is None:
        return
    state, totals = replay_totals(log, *start, until=committed)
    if state.position == committed and (state.to_bytes(), totals) != (position.state_bytes, position.totals):
        raise StateDamaged(
            f"the state row of {pchannel} does not match the log at {committed}: run the operation recovery (mode "
            "repair), which recomputes it"
        )


def valid_state(table: WalTable, log: Log, pchannel: str) -> ChannelState:
    """Return a state to follow the log from: the newest, or an older one if that is damaged.

    Raises StateDamaged if there is none.
    """
    try:
        check_state(table, log, pchannel)
        return table.position(pchannel).state or ChannelState.new(pchannel)
    except StateDamaged:
        start = previous_state(table, log, pchannel)
        if start is None:
            raise
        return start[0]
