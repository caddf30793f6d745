"""Assembly of transactions: from a PChannel's messages in tick order to the visible ones, in the order they became
visible.

Promises, for rows pushed in tick order starting at a message's LastConfirmed:

- A message outside transactions comes out at its own place with its own tick.
- The bodies of a transaction come out right before their Commit, in the order of their ticks, with the Commit's tick.
- The bodies of a transaction that is rolled back (by its producer, by expiry, by an exclusive message), or whose
  collection is
  dropped, never come out.
- ``visible_tick`` never decreases. Only rows with a visible tick > `after_tick` come out, so rows that a reader sees
  again for
  open transactions are not duplicated.

Memory: the rows of open transactions, which the chain bounds by ``max_open_txns`` x ``max_txn_bytes`` per PChannel, and
the rows of one push. There is no snapshot: a new reader starts at LastConfirmed.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import WalGap
from millrace.message.columns import string_array
from millrace.message.types import DML, MessageType

VISIBLE_TICK: Final = "visible_tick"

_BODIES: Final = string_array(kind.name for kind in DML)
_BEGIN: Final = MessageType.BEGIN_TXN.name
_COMMIT: Final = MessageType.COMMIT_TXN.name
_ROLLBACK: Final = MessageType.ROLLBACK_TXN.name
_DROP: Final = MessageType.DROP_COLLECTION.name

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


class TxnBuffer:
    """Holds the bodies of one PChannel's open transactions until Commit, Rollback, or the end of their collection."""

    def __init__(self, *, after_tick: int = 0) -> None:
        self._after_tick = after_tick
        self._held: list[pa.Table] = []

    @property
    def open_count(self) -> int:
        """Number of transactions whose Begin was pushed and whose end was not."""
        return sum(pc.sum(pc.equal(_names(table, "type"), _BEGIN)).as_py() or 0 for table in self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes of Arrow columns held for open transactions (shared buffers count once per table)."""
        return sum(table.get_total_buffer_size() for table in self._held)

    def push(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        """Return the rows that `rows` (accepted messages of ROW_SCHEMA in tick order) make visible, with
        ``visible_tick``.

        Raises WalGap if a Commit after `after_tick` has no Begin: the reader started after its LastConfirmed.
        """
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        # No transaction is open or begins: every row is visible at its own tick, without a sort.
        if not self._held and not _any_txn(table):
            ticks = table.column("time_tick")
            visible = table.append_column(VISIBLE_TICK, ticks)
            if len(ticks) and ticks[0].as_py() <= self._after_tick:
                visible = visible.filter(pc.greater(ticks, self._after_tick))
            return visible
        return self._assemble(table)

    def _assemble(self, table: pa.Table) -> pa.Table:
        fresh = table.num_rows
        if self._held:
            table = pa.concat_tables([*self._held, table])
        table = table.unify_dictionaries()
        held = table.num_rows - fresh
        columns = _Columns(table)
        end = columns.ends()
        ticks: npt.NDArray[np.int64] = table.column("time_tick").to_numpy()

        bodies = columns.in_txn & columns.body
        ended = end >= 0
        commits = np.zeros(len(ticks), dtype=bool)
        commits[ended] = columns.commit[end[ended]]
        self._check_begins(columns, ticks, held)

        place = np.where(bodies & commits, end, np.arange(len(ticks)))
        out = ~bodies | commits
        out[:held] &= bodies[:held]  # a held Begin was returned by an earlier push
        visible = ticks[place]
        out &= visible > self._after_tick
        chosen = np.flatnonzero(out)
        # A body sorts before its Commit: both have the Commit's index, and the sort is stable.
        order = chosen[np.argsort(place[chosen], kind="stable")]
        result = table.take(pa.array(order)).append_column(VISIBLE_TICK, pa.array(visible[order]))

        # Bodies whose Begin was not read never become visible: `_check_begins` raises if their Commit comes.
        waits = (bodies | columns.begin) & ~ended & columns.known
        # Rebuild what is held only if something of it ended; otherwise add a slice, so that a long transaction is not
        # copied on each push.
        if ended[:held].any() or not self._held:
            self._held = [table.filter(pa.array(waits))] if waits.any() else []
        elif waits[held:].any():
            self._held.append(table.slice(held).filter(pa.array(waits[held:])))
        return result

    def _check_begins(self, columns: _Columns, ticks: npt.NDArray[np.int64], held: int) -> None:
        orphans = np.flatnonzero(columns.commit & ~columns.known & (ticks > self._after_tick))
        if len(orphans):
            raise WalGap(
                f"the Commit at tick {ticks[orphans[0]]} has no Begin among the rows read: start reading at "
                "LastConfirmed"
            )


class _Columns:
    """The columns that the assembly needs."""

    def __init__(self, table: pa.Table) -> None:
        kind = _names(table, "type")
        txn: npt.NDArray[np.int64] = table.column("txn_id").to_numpy()
        channel = pc.dictionary_encode(_names(table, "vchannel")).combine_chunks()
        self.channel: npt.NDArray[np.int32] = channel.indices.to_numpy(zero_copy_only=False)
        self.txn = txn
        self.in_txn: Bools = txn != 0
        self.body: Bools = _mask(pc.is_in(kind, _BODIES))
        self.begin: Bools = _mask(pc.equal(kind, _BEGIN))
        self.commit: Bools = _mask(pc.equal(kind, _COMMIT))
        self.rollback: Bools = _mask(pc.equal(kind, _ROLLBACK))
        self.drop: Bools = _mask(pc.equal(kind, _DROP))
        self.known: Bools = np.zeros(len(txn), dtype=bool)
        """Rows of transactions whose Begin is among the rows."""

    def ends(self) -> Indices:
        """Return for each row of a transaction the index of the row that ends it; -1 if it is open, or outside any.

        A transaction id may be reused after it has ended: each Begin starts another lifetime of it.
        """
        end = np.full(len(self.txn), -1, dtype=np.intp)
        rows = np.flatnonzero(self.in_txn)
        if len(rows):
            order = rows[np.lexsort((rows, self.txn[rows], self.channel[rows]))]
            channel, txn = self.channel[order], self.txn[order]
            other = np.ones(len(order), dtype=bool)
            other[1:] = (channel[1:] != channel[:-1]) | (txn[1:] != txn[:-1])
            life = np.cumsum(other | self.begin[order]) - 1
            begun = np.zeros(life[-1] + 1, dtype=bool)
            begun[life[self.begin[order]]] = True
            self.known[order] = begun[life]
            last = np.full(life[-1] + 1, -1, dtype=np.intp)
            ends = self.commit[order] | self.rollback[order]
            last[life[ends]] = order[ends]
            end[order] = last[life]
        for place in np.flatnonzero(self.drop):
            # The chain rolls back open transactions before a drop; readers do not rely on it.
            late = self.in_txn & (self.channel == self.channel[place]) & (end < 0)
            late[place:] = False
            end[late] = place
        return end


def _any_txn(table: pa.Table) -> bool:
    return bool((table.column("txn_id").to_numpy() != 0).any())


def _names(table: pa.Table, column: str) -> pa.ChunkedArray:
    """Return a dictionary column as strings (a Parquet reader may return either)."""
    values = table.column(column)
    return values.cast(pa.utf8()) if pa.types.is_dictionary(values.type) else values


def _mask(values: pa.ChunkedArray) -> Bools:
    mask: npt.NDArray[Any] = values.to_numpy()
    return mask.astype(bool)
