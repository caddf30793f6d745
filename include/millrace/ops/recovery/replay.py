"""The log run through the chain again, slice by slice: what the WAL of a PChannel must hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from millrace.errors import RepairImpossible
from millrace.log.protocol import LogService
from millrace.message.ids import EARLIEST, LogId
from millrace.wal.chain import Chain, Outcome
from millrace.wal.state import ChannelState

SLICE_BYTES = 32 << 20


def replay_log(service: LogService, pchannel: str, *, until: LogId) -> Iterator[Outcome]:
    """Outcomes from the log's first entry up to `until`, in order. Memory is bounded by a slice.

    Raises RepairImpossible where truncation has removed the beginning.
    """
    log = service.open(pchannel)
    try:
        begin = log.describe().begin
        if begin > EARLIEST:
            raise RepairImpossible(
                f"the log of {pchannel} begins at {begin}: what lies before it cannot be computed again; "
                "restore the wal table from a backup"
            )
        chain, state = Chain(), ChannelState.new(pchannel)
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


def replayed_state(outcomes: Iterable[Outcome]) -> ChannelState:
    """The state behind the last of `outcomes`, of which there is at least one."""
    state: ChannelState | None = None
    for outcome in outcomes:
        state = outcome.state
    assert state is not None
    return state
