"""Appends that wait for their decisions, and the extraction of their answers from the chain's runs.

The entries of an append are one atomic batch: nothing is between its first and last entry. So its rows are a slice of
each run that it falls into. Time ticks that became no row are answered here too.
"""

from __future__ import annotations

import threading
import time
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from millrace.base.errors import DeadlineExceeded, MillraceError
from millrace.message.ids import LogId, MessageId
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries, framed_counts
from millrace.rpc.outcome import (
    CONFIRMED_COLUMNS,
    ID_COLUMNS,
    OUTCOME_SCHEMA,
    AppendOutcome,
)


@dataclass(frozen=True, slots=True)
class ChainDecisions:
    """The decisions of one run of the chain about the entries in [start, end)."""

    start: LogId
    end: LogId
    entries: pa.RecordBatch
    rows: pa.RecordBatch
    last_tick: int
    confirmed_before: MessageId | None
    """The first Begin that was open before the run."""

    def is_of(self, append: PendingOutcome) -> bool:
        """Return whether the run is about the entries of one append only, and has a row for each of its messages."""
        assert append.ids is not None
        return (
            self.start <= append.ids[0]
            and self.entries.num_rows == len(append.values)
            and self.rows.num_rows == append.messages
        )


@dataclass(slots=True, eq=False)
class PendingOutcome:
    """An append that waits for its decisions."""

    values: pa.LargeBinaryArray
    """Its entries. One atomic batch: nothing is between them in the log."""
    ids: tuple[LogId, LogId] | None = None
    """Its first and last entry, once it is in the log."""
    messages: int = 0
    """Number of messages in its entries, by their headers."""
    begun: float = field(default_factory=time.perf_counter)
    """Time of its submission, by time.perf_counter."""
    _leads: bool = False
    _decided: threading.Lock = field(default_factory=threading.Lock)
    _runs: list[ChainDecisions] = field(default_factory=list)
    _error: MillraceError | None = None
    _settled: bool = False

    def __post_init__(self) -> None:
        self.messages = int(framed_counts(self.values).sum())
        self._decided.acquire()

    def wait(self, *, timeout: float) -> None:
        """Wait up to `timeout` seconds until the append is settled, or its caller leads."""
        if not self._settled:
            self._decided.acquire(timeout=max(0.0, timeout))

    def lead(self) -> None:
        """Wake the caller, who must append the next group (:meth:`millrace.node.append.follower.Follower.append`)."""
        self._leads = True
        self._decided.release()

    def take_lead(self) -> bool:
        """Return whether the caller must append the next group. :meth:`outcome` waits again then."""
        if self._leads:
            self._decided.acquire(blocking=False)  # the wait may have ended just before the wake
        return self._leads

    def outcome(self, *, timeout: float) -> AppendOutcome:
        """Wait up to `timeout` seconds for the decisions and return them.

        Raises DeadlineExceeded (the entries are in the log and will be decided), or the error that parked the PChannel.
        """
        if not self._settled and not self._decided.acquire(timeout=max(0.0, timeout)):
            assert self.ids is not None
            first, last = self.ids
            raise DeadlineExceeded(
                f"entries {first} to {last} are in the log but not decided yet: append again with the same "
                "producer sequences"
            )
        if self._error is not None:
            raise copy(self._error)
        assert self.ids is not None
        if len(self._runs) == 1 and self._runs[0].is_of(self):
            return AppendOutcome(self._runs[0].rows)
        return AppendOutcome(_answer(self._runs, self.ids, self.messages))

    def settle(self, runs: list[ChainDecisions], error: MillraceError | None) -> None:
        """Complete the outcome and wake the waiter. Call once."""
        self._runs, self._error, self._settled = runs, error, True
        self._decided.release()


def _answer(runs: list[ChainDecisions], ids: tuple[LogId, LogId], messages: int) -> pa.RecordBatch:
    """Return the rows of the entries ids[0] .. ids[1] from `runs`, including time ticks without rows."""
    parts = [_between(run.rows, *ids) for run in runs]
    rows = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    if rows.num_rows == messages:
        return rows
    ticks = [tick for run in runs for tick in _unpersisted(run, ids)]
    if not ticks:
        return rows
    whole = pa.concat_batches([rows, pa.RecordBatch.from_pylist(ticks, schema=OUTCOME_SCHEMA)])
    keys = [whole.column(name).to_numpy() for name in ("index", "entry", "ledger")]
    return whole.take(pa.array(np.lexsort(keys)))


def _between(rows: pa.RecordBatch, first: LogId, last: LogId) -> pa.RecordBatch:
    """Return the rows of the entries first .. last."""
    ledger, entry = rows.column("ledger").to_numpy(), rows.column("entry").to_numpy()
    if first.ledger == last.ledger and len(ledger) and ledger[0] == ledger[-1] == first.ledger:
        start, stop = np.searchsorted(entry, [first.entry, last.entry + 1])
        return rows.slice(int(start), int(stop - start))
    from_first = (ledger > first.ledger) | ((ledger == first.ledger) & (entry >= first.entry))
    to_last = (ledger < last.ledger) | ((ledger == last.ledger) & (entry <= last.entry))
    return rows.filter(pa.array(from_first & to_last))


def _unpersisted(run: ChainDecisions, ids: tuple[LogId, LogId]) -> list[dict[str, object]]:
    """Return answers for time ticks of the entries ids[0] .. ids[1] that became no row.

    Their tick is the run's last tick, up to which everything is decided. Their LastConfirmed is not after any Begin
    that was open in the run, so a reader that starts there misses nothing.
    """
    decoded = decode_entries(_between(run.entries, *ids))
    mine = decoded.filter(pa.array(decoded.column("type").to_numpy() == MessageType.TIME_TICK))
    rows = _between(run.rows, *ids)
    known = set(zip(*(rows.column(name).to_pylist() for name in ID_COLUMNS[:3]), strict=True))
    confirmed = [run.confirmed_before] if run.confirmed_before is not None else []
    if run.rows.num_rows:
        columns = [run.rows.column(name).to_pylist() for name in CONFIRMED_COLUMNS]
        confirmed.append(min(MessageId(*place) for place in zip(*columns, strict=True)))
    found: list[dict[str, object]] = []
    for ledger, entry, index in zip(*(mine.column(name).to_pylist() for name in ID_COLUMNS[:3]), strict=True):
        if (ledger, entry, index) in known:
            continue
        own = MessageId(ledger, entry, index, 0)
        earliest = min([own, *confirmed])
        found.append(
            dict(zip(ID_COLUMNS, own, strict=True))
            | dict(zip(CONFIRMED_COLUMNS, earliest, strict=True))
            | {"time_tick": run.last_tick, "txn_id": 0, "reason": "", "detail": ""}
        )
    return found
