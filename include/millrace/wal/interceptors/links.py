"""The order of the interceptors: redo → lock → timetick (with the transaction manager beside it) → shard."""

from __future__ import annotations

from millrace.wal.interceptors.interceptor import Interceptor
from millrace.wal.interceptors.lock.interceptor import LockInterceptor
from millrace.wal.interceptors.redo.interceptor import RedoInterceptor
from millrace.wal.interceptors.shard.interceptor import ShardInterceptor
from millrace.wal.interceptors.timetick.interceptor import TimeTickInterceptor
from millrace.wal.interceptors.txn.interceptor import TxnManager


def build_interceptors() -> tuple[Interceptor, ...]:
    """The links of a chain, outermost first."""
    txns = TxnManager()
    return RedoInterceptor(), LockInterceptor(), TimeTickInterceptor(), txns, ShardInterceptor(txns)
