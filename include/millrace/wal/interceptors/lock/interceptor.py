"""Lock: row changes share a VChannel; an exclusive message is a barrier on it, or on the whole PChannel.

A run of inserts, deletes and upserts is judged together; every other message is judged alone. An exclusive message that
the inner interceptors accept fails the open transactions in its scope, in the order of their Begin ids, before it takes
effect.
"""

from __future__ import annotations

import numpy as np

from millrace.message.types import Flag, MessageType, flags_of
from millrace.wal.interceptors.interceptor import Proceed
from millrace.wal.message_run import DecidedBatch, DecidedMessage, Emission, MessageRun, dml_mask
from millrace.wal.open_work import OpenTxn
from millrace.wal.state import ChannelState, VChannelState

BARRIER = "barrier"
EXPIRED = "expired"


def rollback_emission(channel: VChannelState, txn: OpenTxn, why: str) -> Emission:
    """Return the RollbackTxn that the chain emits for `txn`; `why` (barrier or expired) becomes its detail."""
    return Emission(
        type=MessageType.ROLLBACK_TXN,
        vchannel=channel.name,
        collection_id=channel.collection_id,
        txn_id=txn.id,
        detail=why,
    )


class LockInterceptor:
    """Between redo and timetick."""

    name = "lock"

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        if run.count > 1:
            types = run.view(run.columns.type)
            # By chain version: an old version judges a type that it does not know as a control message, and always
            # must.
            control = np.flatnonzero(~dml_mask(state.chain_version)[types])
            if len(control):
                # A control message at the front is judged alone; one further back begins the next run.
                run.cut(max(int(control[0]), 1))
        proceed(run)

    def emissions(self, state: ChannelState, run: MessageRun) -> list[Emission]:
        """Return the rollbacks of transactions that an exclusive message fails."""
        flags = flags_of(int(run.columns.type[run.start]))
        if not run.first_accepted or flags is None or Flag.EXCLUSIVE not in flags:
            return []
        scope = run.columns.vchannel_name(run.start)
        failing = [(channel, txn) for channel, txn in state.open_txns() if scope in ("", channel.name)]
        # By Begin id: each rollback takes a tick, and ids tell in which order the transactions began.
        failing.sort(key=lambda pair: pair[1].begin)
        return [rollback_emission(channel, txn, BARRIER) for channel, txn in failing]

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        """Do nothing: a lock is held for one message only, so there is no state."""

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        """Do nothing: a lock is held for one message only, so there is no state."""
