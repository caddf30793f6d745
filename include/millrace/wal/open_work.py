"""Pending work in the channel state: timers, open transactions, and segments that can be flushed.

:class:`OpenWork` summarises a segment, a transaction, a VChannel or a whole PChannel alike. The state's maps keep these
summaries with their nodes (millrace.wal.shared_map), so the next timer is known without a walk, and what is due is
found by descending to it. A summary depends on the config: after a change of the config all are made again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from millrace.message.ids import LOGICAL_BITS, MessageId
from millrace.wal.config import ChainConfig
from millrace.wal.segments import NEVER, Segment, seal_deadline


class OpenTxn(NamedTuple):
    """An open transaction."""

    id: int
    begin: MessageId
    begin_tick: int
    keepalive_ms: int
    last_tick: int
    bytes: int

    def deadline(self, config: ChainConfig) -> int:
        """Return the tick at which it expires unless it is renewed or ended."""
        return min(
            self.last_tick + (self.keepalive_ms << LOGICAL_BITS),
            self.begin_tick + (config.max_txn_lifetime_ms << LOGICAL_BITS),
        )


class OpenWork(NamedTuple):
    """Open work of a part of the state. The defaults are those of nothing at all."""

    txn_timer: tuple[int, int] = (NEVER, NEVER)
    """Earliest deadline of a transaction, and the tick of its Begin."""
    segment_timer: tuple[int, int] = (NEVER, NEVER)
    """Earliest deadline of a growing segment, and its id."""
    begin: MessageId = MessageId(NEVER, 0, 0, 0)
    """Smallest Begin id of the open transactions."""
    ready: int = NEVER
    """Smallest id of a sealed segment that no open transaction touches."""
    oldest: tuple[int, int] = (NEVER, 0)
    """Smallest id of a growing segment, and the deleted rows of its VChannel when it was created."""
    open_txns: int = 0
    growing: int = 0
    """Number of growing segments."""
    txn_ids: frozenset[int] = frozenset()
    """Transactions that touch the segments of one VChannel; always empty for more than one VChannel."""


NO_WORK: Final = OpenWork()


class _Measure:
    def same(self, old: object, new: object) -> bool:
        return old is new

    def join(self, works: list[OpenWork]) -> OpenWork:
        """Return the open work of several parts together."""
        if len(works) == 1:
            return works[0]
        if not works:
            return NO_WORK
        txn_timers, segment_timers, begins, ready, oldest, open_txns, growing, txn_ids = zip(*works, strict=True)
        return OpenWork(
            min(txn_timers),
            min(segment_timers),
            min(begins),
            min(ready),
            min(oldest),
            sum(open_txns),
            sum(growing),
            frozenset().union(*txn_ids) if any(txn_ids) else NO_WORK.txn_ids,
        )


class _SegmentMeasure(_Measure):
    def of(self, key: int, segment: Segment, config: ChainConfig) -> OpenWork:
        if segment.seal_policy:
            return OpenWork(ready=NEVER if segment.txns else segment.id, txn_ids=segment.txns)
        return OpenWork(
            segment_timer=(seal_deadline(segment, config), segment.id),
            oldest=(segment.id, segment.deletes_before),
            growing=1,
            txn_ids=segment.txns,
        )


class _TxnMeasure(_Measure):
    def of(self, key: int, txn: OpenTxn, config: ChainConfig) -> OpenWork:
        return OpenWork(txn_timer=(txn.deadline(config), txn.begin_tick), begin=txn.begin, open_txns=1)


SEGMENTS: Final = _SegmentMeasure()
"""Measure of maps of segments."""

TXNS: Final = _TxnMeasure()
"""Measure of maps of open transactions."""
