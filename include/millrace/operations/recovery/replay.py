"""Where a repair or a diagnosis begins to run the log of a PChannel through the chain again.

At the log's first entry, or, where truncation has removed that, from a recovery checkpoint that the log still reaches back to:
a checkpoint is a state that a replay has confirmed, with what the WAL added up to there.
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
    """Where a replay begins: a state, and what the WAL adds up to there."""

    state: ChannelState
    totals: WalTotals = WalTotals()  # noqa: RUF009 - a value


def replay_starts(settings: Settings, service: LogService, pchannel: str) -> list[ReplayStart]:
    """Every state from which the log that is left can be run through the chain; the earliest first, maybe none.

    The state before the log's first entry is among them where nothing was truncated. A checkpoint that cannot be read is none.
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
    """The latest of :func:`replay_starts` at `before` or earlier. Raises RepairImpossible where there is none."""
    fitting = [each for each in replay_starts(settings, service, pchannel) if each.state.position <= before]
    if not fitting:
        raise RepairImpossible(
            f"the log of {pchannel} was truncated, and from no checkpoint of it can entry {before} be computed again; "
            "restore the wal table from a backup"
        )
    return fitting[-1]


def replay_range(service: LogService, pchannel: str, start: ReplayStart, *, until: LogId) -> Iterator[ChainOutcome]:
    """Outcomes from `start` up to `until`, in order. Raises RepairImpossible where the log ends before that."""
    log = service.open(pchannel)
    try:
        reached = start.state.position
        for outcome in replay_log(log, start.state, until=until):
            yield outcome
            reached = outcome.state.position
        if reached < until:
            raise RepairImpossible(
                f"the log of {pchannel} has nothing at {reached}, the wal table needs it up to {until}"
            )
    finally:
        log.close()


def state_at(service: LogService, pchannel: str, start: ReplayStart, *, until: LogId) -> ReplayStart:
    """The state at `until`, and what the WAL must add up to there. Raises RepairImpossible as :func:`replay_range`."""
    log = service.open(pchannel)
    try:
        state, totals = replay_totals(log, start.state, start.totals, until=until)
    finally:
        log.close()
    if state.position < until:
        raise RepairImpossible(
            f"the log of {pchannel} has nothing at {state.position}, the wal table needs it up to {until}"
        )
    return ReplayStart(state, totals)
