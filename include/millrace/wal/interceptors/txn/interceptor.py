"""The transaction manager: opens, renews, ends and expires transactions, and judges messages that claim to belong to
one.

It runs beside the timetick interceptor, from where Milvus calls it. A transaction is on one VChannel, its lease is in
log time, and each message is judged by its own time tick. docs/chain.md, "Types".
"""

from __future__ import annotations

import numpy as np

from millrace.base.errors import Malformed
from millrace.message.bodies import parse_body
from millrace.message.ids import MessageId
from millrace.message.types import DML, MessageType
from millrace.wal.interceptors.interceptor import Proceed, Timer
from millrace.wal.interceptors.lock.interceptor import BARRIER, EXPIRED, rollback_emission
from millrace.wal.message_run import DecidedBatch, DecidedMessage, MessageRun, group_indices
from millrace.wal.open_work import TXNS, OpenTxn
from millrace.wal.reasons import Reason
from millrace.wal.state import ENDED_TXNS, ChannelState, VChannelState

COMMITTED = "committed"
ROLLED_BACK = "rolled back"

TXN_TYPES = frozenset(
    {MessageType.BEGIN_TXN, MessageType.COMMIT_TXN, MessageType.ROLLBACK_TXN, MessageType.KEEP_ALIVE},
)


class TxnManager:
    """Transactions of one PChannel."""

    name = "txn"

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        number = int(run.columns.type[run.start])
        if number in DML:
            # Bodies themselves are judged by the shard (`judge_bodies`), after everything else has cut the run.
            self._cut_before_overflow(state, run)
        elif run.first_accepted and number == MessageType.BEGIN_TXN:
            self._begin(state, run)
        elif run.first_accepted and number in TXN_TYPES:
            self._member(state, run)
        proceed(run)

    def _begin(self, state: ChannelState, run: MessageRun) -> None:
        columns, row = run.columns, run.start
        txn_id = int(columns.txn_id[row])
        channel = state.vchannels.get(columns.vchannel_name(row))
        try:
            # A payload that does not parse is MALFORMED whatever else is wrong with the message.
            keepalive_ms(state, columns.payload(row))
        except Malformed as error:
            run.reject(0, Reason.MALFORMED, str(error))
            return
        if txn_id == 0:
            run.reject(0, Reason.MALFORMED, "a transaction needs an id that is not 0")
        elif channel is None or int(columns.collection_id[row]) not in (0, channel.collection_id):
            run.reject(0, Reason.COLLECTION_NOT_FOUND, f"no collection on VChannel {columns.vchannel_name(row)!r}")
        elif txn_id in channel.txns:
            run.reject(0, Reason.TXN_EXISTS, f"transaction {txn_id} is open on {channel.name}")
        elif state.open_work.open_txns >= state.config.max_open_txns:
            run.reject(0, Reason.LIMIT_EXCEEDED, f"{state.config.max_open_txns} transactions are open on the PChannel")

    def _member(self, state: ChannelState, run: MessageRun) -> None:
        columns, row = run.columns, run.start
        verdict = membership_error(state, columns.vchannel_name(row), int(columns.txn_id[row]))
        if verdict is not None:
            run.reject(0, *verdict)

    def _cut_before_overflow(self, state: ChannelState, run: MessageRun) -> None:
        """Judge one message at a time if a transaction might exceed its size limit within the run."""
        if run.count == 1:
            return
        txn_id = run.view(run.columns.txn_id)
        bodies = np.flatnonzero(txn_id)
        for places in group_indices(run.view(run.columns.vchannel)[bodies], txn_id[bodies]):
            rows = bodies[places]
            channel = state.vchannels.get(run.columns.vchannel_name(run.start + int(rows[0])))
            txn = None if channel is None else channel.txns.get(int(txn_id[rows[0]]))
            if txn and txn.bytes + int(run.view(run.columns.size)[rows].sum()) > state.config.max_txn_bytes:
                # Which body no longer fits depends on the sizes of the accepted ones before it.
                run.cut(1)
                return

    def judge_bodies(self, state: ChannelState, run: MessageRun) -> None:
        """Reject inserts and deletes whose transaction is not open or is full. The shard calls this."""
        txn_id = run.view(run.columns.txn_id)
        pending = run.pending()
        bodies = pending[txn_id[pending] != 0]
        if not len(bodies):
            return
        for places in group_indices(run.view(run.columns.vchannel)[bodies], txn_id[bodies]):
            rows = bodies[places]
            name = run.columns.vchannel_name(run.start + int(rows[0]))
            verdict = membership_error(state, name, int(txn_id[rows[0]]))
            if verdict is not None:
                run.reject(rows, *verdict)
                continue
            txn = state.vchannels[name].txns[int(txn_id[rows[0]])]
            if txn.bytes + int(run.view(run.columns.size)[rows].sum()) > state.config.max_txn_bytes:
                words = f"transaction {txn.id} would hold more than {state.config.max_txn_bytes} bytes"
                run.reject(rows, Reason.TXN_TOO_LARGE, words)

    def first_timer(self, state: ChannelState, tick: int) -> Timer | None:
        """Return the timer of the open transaction that expires first, by lease or lifetime, if it is due."""
        first = state.open_work.txn_timer
        if first[0] > tick:
            return None
        for channel in state.channels_with(lambda work: work.txn_timer == first):
            for _, txn in channel.txns.where(TXNS, state.config, lambda work: work.txn_timer == first):
                return Timer(*first, rollback_emission(channel, txn, EXPIRED))
        return None

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        bodies = np.flatnonzero((rows.txn_id != 0) & (rows.reason == 0))
        if not len(bodies):
            return
        for places in group_indices(rows.vchannel[bodies], rows.txn_id[bodies]):
            mine = bodies[places]
            channel = state.vchannels[rows.names[rows.vchannel[mine[0]]]]
            size = int(rows.size[mine].sum())
            state.put(_extended(channel, int(rows.txn_id[mine[0]]), tick=int(rows.tick[mine[-1]]), size=size))

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        if row.type in DML and row.txn_id:
            state.put(_extended(state.vchannels[row.vchannel], row.txn_id, tick=row.tick, size=row.size))
        if row.type not in TXN_TYPES:
            return
        channel = state.vchannels[row.vchannel]
        if row.type is MessageType.BEGIN_TXN:
            begun = OpenTxn(
                id=row.txn_id,
                begin=MessageId(row.ledger, row.entry, row.index, row.ordinal),
                begin_tick=row.tick,
                keepalive_ms=keepalive_ms(state, row.payload),
                last_tick=row.tick,
                bytes=0,
            )
            state.put(channel._replace(txns=channel.txns.set(row.txn_id, begun)))
        elif row.type is MessageType.KEEP_ALIVE:
            state.put(_extended(channel, row.txn_id, tick=row.tick, size=0))
        else:
            how = COMMITTED if row.type is MessageType.COMMIT_TXN else row.detail or ROLLED_BACK
            # Only for the words of a later rejection: a forgotten end gives TXN_NOT_FOUND.
            ended = (*channel.ended, (row.txn_id, how))[-ENDED_TXNS:]
            state.put(channel._replace(txns=channel.txns.without(row.txn_id), ended=ended))


def _extended(channel: VChannelState, txn_id: int, *, tick: int, size: int) -> VChannelState:
    """Return the VChannel with bodies of `size` bytes added to an open transaction, the last one at `tick`."""
    txn = channel.txns[txn_id]
    return channel._replace(txns=channel.txns.set(txn_id, txn._replace(last_tick=tick, bytes=txn.bytes + size)))


def keepalive_ms(state: ChannelState, payload: bytes) -> int:
    """Return the lease of a Begin message in milliseconds. Raises Malformed."""
    body = parse_body(MessageType.BEGIN_TXN, payload)
    value: int = body.get("keepalive_ms", state.config.default_txn_keepalive_ms)
    if "keepalive_ms" in body and not 1 <= value <= state.config.max_txn_keepalive_ms:
        raise Malformed(f"keepalive_ms must lie in 1..{state.config.max_txn_keepalive_ms}, not {value}")
    return value


def membership_error(state: ChannelState, vchannel: str, txn_id: int) -> tuple[Reason, str] | None:
    """Return None if `txn_id` is open on `vchannel`, else the rejection."""
    channel = state.vchannels.get(vchannel)
    if channel is not None:
        if txn_id in channel.txns:
            return None
        how = channel.txn_outcome(txn_id)
        if how == EXPIRED:
            return Reason.TXN_EXPIRED, f"transaction {txn_id} expired: its lease ran out; begin a new one"
        if how is not None:
            why = "failed at an exclusive message" if how == BARRIER else f"was {how}"
            return Reason.TXN_NOT_ACTIVE, f"transaction {txn_id} {why}"
    return Reason.TXN_NOT_FOUND, f"transaction {txn_id} is not open on VChannel {vchannel!r}"
