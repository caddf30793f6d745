"""The order of the interceptors: redo → lock → timetick (with the transaction manager beside it) → shard."""

from __future__ import annotations

from millrace.wal.interceptors.interceptor import Interceptor
from millrace.wal.interceptors.lock.interceptor import Lock
from millrace.wal.interceptors.redo.interceptor import Redo
from millrace.wal.interceptors.shard.interceptor import Shard
from millrace.wal.interceptors.timetick.interceptor import TimeTick
from millrace.wal.interceptors.txn.interceptor import TxnManager


def links() -> tuple[Interceptor, ...]:
    """The links of a chain, outermost first."""
    txns = TxnManager()
    return Redo(), Lock(), TimeTick(), txns, Shard(txns)
