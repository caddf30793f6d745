"""The log run through the chain again, slice by slice: what the WAL of a PChannel must hold.

From the log's first entry, or, where truncation has removed that, from a recovery checkpoint that the log still reaches back to:
a checkpoint is a state that a replay has confirmed, with what the WAL added up to there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from millrace.errors import MillraceError, RepairImpossible
from millrace.log.protocol import LogService
from millrace.message.ids import EARLIEST, LogId
from millrace.ops.checkpoint import store
from millrace.settings import Settings
from millrace.tables.wal_table import Totals
from millrace.wal.chain import Chain, Outcome
from millrace.wal.digest import digest
from millrace.wal.state import ChannelState

SLICE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ReplayStart:
    """Where a replay begins: a state, and what the WAL adds up to there."""

    state: ChannelState
    totals: Totals = Totals()  # noqa: RUF009 - a value


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
    for name in [name for owner, name in store.live_files(settings) if owner == pchannel]:
        try:
            checkpoint = store.load(settings, pchannel, name)
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


def replay_log(service: LogService, pchannel: str, start: ReplayStart, *, until: LogId) -> Iterator[Outcome]:
    """Outcomes from `start` up to `until`, in order. Memory is bounded by a slice.

    Raises RepairImpossible where the log ends before `until`.
    """
    log = service.open(pchannel)
    try:
        chain, state = Chain(), start.state
        while state.position < until:
            entries = log.read(state.position, end=until, max_bytes=SLICE_BYTES)
            if entries.next <= state.position:
                raise RepairImpossible(
                    f"the log of {pchannel} has nothing at {state.position}, the wal table needs it up to {until}"
                )
            outcome = chain.process(state, entries)
            yield outcome
            state = outcome.state
    finally:
        log.close()


def replayed(service: LogService, pchannel: str, start: ReplayStart, *, until: LogId) -> ReplayStart:
    """The state at `until`, and what the WAL must add up to there."""
    state, totals = start.state, start.totals
    for outcome in replay_log(service, pchannel, start, until=until):
        added = digest(outcome.messages) + digest(outcome.rejections)
        totals += Totals(outcome.messages.num_rows, outcome.rejections.num_rows, added)
        state = outcome.state
    return ReplayStart(state, totals)
