"""The start of a replay: where a repair or a diagnosis begins to run a PChannel's log through the chain again.

At the log's first entry or, if that is truncated, at a recovery checkpoint that the log still reaches back to. Such a
checkpoint is a state that a replay has confirmed, with the totals of the WAL up to there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from millrace.base.errors import MillraceError, RepairImpossible
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.message.ids import EARLIEST, LogId
from millrace.operations.checkpoint import recovery_checkpoints
from millrace.tables.wal.log_replay import replay_log, replay_totals
from millrace.tables.wal.table import WalTotals
from millrace.wal.chain import ChainOutcome
from millrace.wal.state import ChannelState


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """The start of a replay: a state, and the totals of the WAL up to there."""

    state: ChannelState
    totals: WalTotals = WalTotals()  # noqa: RUF009 - a value


def replay_starts(settings: Settings, service: LogService, pchannel: str) -> list[ReplayStart]:
    """Return every state from which the remaining log can be run through the chain, earliest first.

    Includes the state before the log's first entry if nothing was truncated. Skips unreadable checkpoints.
    """
    log = service.open(pchannel)
    try:
        begin = log.describe().begin
    finally:
        log.close()
    found = [ReplayStart(ChannelState.new(pchannel))] if begin <= EARLIEST else []
    for name in [name for owner, name in recovery_checkpoints.live_files(settings) if owner == pchannel]:
        try:
            checkpoint = recovery_checkpoints.load(settings, pchannel, name)
            start = ReplayStart(checkpoint.state, checkpoint.totals)
        except (OSError, MillraceError, pa.ArrowException):
            continue
        if start.state.position >= begin:
            found.append(start)
    return found


def nearest_start(settings: Settings, service: LogService, pchannel: str, *, before: LogId) -> ReplayStart:
    """Return the latest of :func:`replay_starts` at or before `before`. Raises RepairImpossible if there is none."""
    fitting = [each for each in replay_starts(settings, service, pchannel) if each.state.position <= before]
    if not fitting:
        raise RepairImpossible(
            f"the log of {pchannel} was truncated, and no checkpoint allows entry {before} to be computed again: "
            "restore the wal table from a backup"
        )
    return fitting[-1]


def replay_range(service: LogService, pchannel: str, start: ReplayStart, *, until: LogId) -> Iterator[ChainOutcome]:
    """Yield the outcomes from `start` to `until`, in order. Raises RepairImpossible if the log ends earlier."""
    log = service.open(pchannel)
    try:
        reached = start.state.position
        for outcome in replay_log(log, start.state, until=until):
            yield outcome
            reached = outcome.state.position
        if reached < until:
            raise RepairImpossible(
                f"the log of {pchannel} has nothing at {reached}, but the wal table needs it up to {until}"
            )
    finally:
        log.close()


def state_at(service: LogService, pchannel: str, start: ReplayStart, *, until: LogId) -> ReplayStart:
    """Return the state at `until` and the totals of the WAL up to there.

    Raises RepairImpossible if the log ends earlier.
    """
    log = service.open(pchannel)
    try:
        state, totals = replay_totals(log, start.state, start.totals, until=until)
    finally:
        log.close()
    if state.position < until:
        raise RepairImpossible(
            f"the log of {pchannel} has nothing at {state.position}, but the wal table needs it up to {until}"
        )
    return ReplayStart(state, totals)
