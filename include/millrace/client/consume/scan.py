"""A scan over both sources of a PChannel through one call: the ``wal`` table up to its end, then the append host's tail.

    with scan("p0_1v0", StartAfterTick(tick), wal=settings.wal_uri, tail=client) as found:
        for message in found:
            ...

The place of a scan is a time tick: both sources are asked for what lies behind it and hold the same rows in the same order
(the chain is pure), so that the switch leaves no gap and repeats nothing. A reader too slow for the tail goes on in the
table and comes back. A scan begins at the LastConfirmed of its starting tick, so that transactions that are open there are
whole when they commit. What has left the tail and is not in the table yet is read from the log itself, if that can be had here.

Every wait for a source ends: in TickNotReached, which names what is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, PositionTruncated, TableDamaged, TickNotReached, WalGap
from millrace.base.metrics import Metrics
from millrace.message.ids import LogId, MessageId, tick_physical_ms
from millrace.message.model import ImmutableMessage
from millrace.rpc.tail import Evicted, TailBatch
from millrace.wal.scanner import (
    All,
    DeliverPolicy,
    Filter,
    ImmutableTxn,
    Latest,
    Scanner,
    StartAfter,
    StartAfterTick,
    StartFrom,
    VChannelFilter,
    visible_units,
)
from millrace.wal.txn_buffer import VISIBLE_TICK

_WAIT: Final = 1.0
"""Longest wait for the tail in one go, in seconds: how long a close may take."""
_PAUSE: Final = 0.05
"""Pause before the table is looked at again, where the tail has gone past and the table is not there yet."""
_TABLE_FIRST: Final = 1.0
"""Seconds that the table may take to come that far before the log is read instead: a running streaming node takes less."""
STALL_TIMEOUT: Final = 30.0
"""Seconds without any progress after which a scan says what it waits for."""
_ASK_MS: Final = 200
"""Least time between two time ticks that a scan asks for."""
_ID_COLUMNS: Final = ("ledger", "entry", "index", "ordinal")


class TailSource(Protocol):
    """What a scan tails: an AppendHost, or an AppendClient."""

    def tail(
        self, pchannel: str, after_tick: int, *, timeout: float, max_bytes: int = 8 << 20
    ) -> TailBatch | Evicted: ...

    def tick(self, pchannel: str, *, deadline: float = 30.0) -> int: ...


class WalView(Protocol):
    """One version of the ``wal`` table: millrace.tables.wal.reader.WalSnapshot, or what a server says of its own."""

    @property
    def version(self) -> int: ...

    def refreshed(self) -> WalView:
        """The newest version; this one is of no more use where that is another."""
        ...

    def last_tick(self, pchannel: str) -> int:
        """Everything of `pchannel` up to this tick is in this version; 0 where nothing was committed."""
        ...

    def trimmed(self, pchannel: str) -> tuple[int, LogId]:
        """Up to which tick retention may have taken rows away, and the first entry that a reader may begin at."""
        ...

    def confirmed_at(self, pchannel: str, tick: int) -> MessageId:
        """LastConfirmed of the last message <= `tick`: from there on is all that becomes visible after `tick`."""
        ...

    def messages(
        self,
        pchannel: str,
        *,
        start: MessageId | None = None,
        after_tick: int = 0,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        """Messages in id order, with id >= `start` or, without one, time_tick > after_tick. Raises PositionTruncated at once."""
        ...


WalOpener: TypeAlias = Callable[[], WalView | None]
"""Opens the newest version; None where there is no table yet."""


UncommittedReader: TypeAlias = Callable[[str], Iterator[tuple[pa.RecordBatch, int]]]
"""Gives the messages of a PChannel that the log has after the newest version of the ``wal`` table: in order, each piece with the
tick that it completes."""


def wal_opener(wal: str) -> WalOpener:
    """The ``wal`` table at the URI `wal`."""
    from millrace.tables.wal.reader import (
        WalSnapshot,  # brings the library of tables, which clients of a server do without
    )

    return partial(WalSnapshot.open, wal)


def scan(
    channel: str,
    policy: DeliverPolicy | None = None,
    *,
    wal: str | WalOpener,
    tail: TailSource,
    filters: Sequence[Filter] = (),
    until_tick: int | None = None,
    metrics: Metrics | None = None,
    log: UncommittedReader | None = None,
    patience: float = STALL_TIMEOUT,
) -> Scan:
    """Units of a PChannel, or of a VChannel (`<pchannel>_<collection id>v<n>`), in tick order; `policy` is All by default.

    The scan goes on until it is closed, or has delivered everything up to `until_tick`; on a PChannel where nothing more
    happens it has a time tick appended for that. `wal` is the table's URI (it need not exist yet) or who opens it, `tail` the append host
    or its client. Raises what the sources raise, TickNotReached if for `patience` seconds neither the tail nor the table (nor the
    `log`) has what comes next, PositionTruncated where retention has taken what lies behind the scan's place,
    be it while the scan stood there; WalGap where a source is broken.
    """
    pchannel, is_vchannel = _pchannel(channel)
    own = [VChannelFilter({channel})] if is_vchannel else []
    return Scan(
        pchannel,
        policy or All(),
        wal=wal if callable(wal) else wal_opener(wal),
        tail=tail,
        filters=[*own, *filters],
        until_tick=until_tick,
        metrics=metrics,
        log=log,
        patience=patience,
    )


class Scan(Closeable):
    """A scan under way. One thread reads; any may close it."""

    def __init__(
        self,
        pchannel: str,
        policy: DeliverPolicy,
        *,
        wal: WalOpener,
        tail: TailSource,
        filters: Sequence[Filter],
        until_tick: int | None,
        metrics: Metrics | None = None,
        log: UncommittedReader | None = None,
        patience: float = STALL_TIMEOUT,
    ) -> None:
        self._pchannel = pchannel
        self._log = log
        self._untaken: Iterator[tuple[pa.RecordBatch, int]] | None = None
        self._patience = patience
        self._waiting: float | None = None
        """Since when nothing has what comes next, by the monotonic clock."""
        self._log_helps = False
        """Whether the log has not been read in vain since then."""
        self._table_stood = 0
        """Where the table stood when that began, or when it last moved."""
        self._caught_up = False
        self._metrics = metrics
        self._tail = tail
        self._until = until_tick
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._wal = wal
        # A snapshot is taken before the tail is asked where it stands: what lies between is in the tail or in a newer one.
        self._snapshot = wal()
        after, first_id = self._begin(policy)
        self._scanner = Scanner(after_tick=after, first_id=first_id, filters=filters)
        after = self._scanner.after_tick  # a tick filter may lie behind the policy
        snapshot = self._snapshot
        start = snapshot.confirmed_at(pchannel, after) if snapshot is not None else None
        self._asked = 0
        """When a tick was asked for, in Unix milliseconds."""
        self._seen = 0
        """Every row up to this tick was pushed, or lies before the start."""
        self._delivered = after
        self._table = self._catch_up(start)
        if metrics is not None:
            metrics.wal_scanner_total.labels(pchannel).inc()

    @property
    def confirmed_tick(self) -> int:
        """Everything that became visible up to this tick has been returned by :meth:`poll`."""
        return self._delivered

    @property
    def caught_up(self) -> bool:
        """Whether the tail had nothing more when it was asked last."""
        return self._caught_up

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to come: closed, or everything up to `until_tick` returned."""
        return self._closed.is_set() or (self._until is not None and self._delivered >= self._until)

    def poll(self, *, timeout: float) -> pa.Table | None:
        """The next units as rows of ROW_SCHEMA with ``visible_tick``; None where none came within `timeout` seconds. Raises
        TickNotReached, and what the sources raise; the next poll goes on where that is retriable."""
        deadline = Deadline.after(timeout)
        while not self.ended:
            rows = self._next(deadline.remaining())
            if rows is not None and rows.num_rows:
                return rows
            if rows is None and deadline.expired():
                return None
        return None

    def tables(self) -> Iterator[pa.Table]:
        """Units as tables (see :meth:`poll`), until the scan ends."""
        while not self.ended:
            rows = self.poll(timeout=_WAIT)
            if rows is not None:
                yield rows

    def __iter__(self) -> Iterator[ImmutableMessage | ImmutableTxn]:
        """Units as objects, until the scan ends."""
        for rows in self.tables():
            yield from visible_units(rows)

    def close(self) -> None:
        """End the scan; who waits in it returns within a second. Idempotent."""
        with self._closing:
            first = not self._closed.is_set()
            self._closed.set()
        if first and self._metrics is not None:
            self._metrics.wal_scanner_total.labels(self._pchannel).dec()

    # --- where it begins ------------------------------------------------------------------------------------------------

    def _begin(self, policy: DeliverPolicy) -> tuple[int, MessageId | None]:
        """The tick after which units are delivered, and the least id of a unit, where ids decide."""
        match policy:
            case All():  # all that there is: retention may have taken the beginning
                return 0 if self._snapshot is None else self._snapshot.trimmed(self._pchannel)[0], None
            case StartAfterTick(tick):
                return tick, None
            case Latest():
                return self._now(), None
            case StartFrom(first):
                return self._tick_before(first), first
            case StartAfter(MessageId(ledger, entry, index, ordinal)):
                first = MessageId(ledger, entry, index, ordinal + 1)
                return self._tick_before(first), first
            case _:
                raise InvalidArgument(f"{policy!r} is no deliver policy")

    def _now(self) -> int:
        try:
            return self._tail.tick(self._pchannel)
        except InvalidArgument:
            return 0  # no term is open yet: there is nothing that would not be new

    def _tick_before(self, first: MessageId) -> int:
        """A tick before that of the first message with an id >= `first`, as close to it as the table can say."""
        snapshot = self._snapshot
        if snapshot is None:
            return 0
        columns = ["time_tick", *_ID_COLUMNS]
        for table in snapshot.messages(self._pchannel, start=first, columns=columns):
            return int(table.column("time_tick")[0].as_py()) - 1
        return snapshot.last_tick(self._pchannel)

    # --- going on -------------------------------------------------------------------------------------------------------

    def _next(self, timeout: float) -> pa.Table | None:
        """What the next piece of either source delivers, perhaps nothing; None where there was no piece."""
        if self._table is not None:
            return self._next_of_table()
        if self._untaken is not None:
            return self._next_of_log(self._untaken)
        found = self._tail.tail(self._pchannel, self._seen, timeout=min(timeout, _WAIT))
        if isinstance(found, Evicted):
            self._caught_up = False
            self._table = self._newer_table()
            if self._table is None:
                self._wait_for_the_table(timeout)
                return None
            self._waiting = None
            return self._next_of_table()
        self._waiting = None
        self._caught_up = found.confirmed_tick <= self._seen
        if found.confirmed_tick <= self._seen:
            self._ask_for_a_tick()
            return None
        return self._pushed(found.batches, found.confirmed_tick)

    def _wait_for_the_table(self, timeout: float) -> None:
        """Wait a moment for what the tail has let go; then the log is read, or the wait is over. Raises TickNotReached."""
        now = time.monotonic()
        stands = 0 if self._snapshot is None else self._snapshot.last_tick(self._pchannel)
        if self._waiting is None or stands > self._table_stood:
            self._waiting, self._table_stood, self._log_helps = now, stands, self._log is not None
        waited = now - self._waiting
        if self._log is not None and self._log_helps and (self._snapshot is None or waited >= _TABLE_FIRST):
            self._untaken, self._log_helps = self._log(self._pchannel), False
        elif waited >= self._patience:
            self._waiting = None
            raise TickNotReached(
                f"the server's tail of {self._pchannel} no longer has what follows tick {self._seen}, and for {waited:.0f} s the wal"
                f" table, which is at tick {stands}, has not come further: is the streaming node running (`millrace status`)?"
            )
        else:
            self._closed.wait(min(timeout, _PAUSE))

    def _next_of_log(self, uncommitted: Iterator[tuple[pa.RecordBatch, int]]) -> pa.Table | None:
        try:
            piece = next(uncommitted, None)
        except PositionTruncated:  # the table has taken it meanwhile
            piece = None
        if piece is None:
            self._untaken = None
            return None
        rows, through = piece
        if through <= self._seen:
            return None
        self._waiting = None  # and where the log has been read to its end, it may help again
        return self._pushed([rows.filter(pc.greater(rows.column("time_tick"), self._seen))], through)

    def _ask_for_a_tick(self) -> None:
        """Have the PChannel pass `until_tick` where nobody appends to it any more, once its time has come."""
        now = time.time_ns() // 1_000_000
        if self._until is None or tick_physical_ms(self._until) > now or now < self._asked + _ASK_MS:
            return
        self._asked = now
        self._tail.tick(self._pchannel)

    def _next_of_table(self) -> pa.Table | None:
        assert self._table is not None
        assert self._snapshot is not None
        try:
            piece = next(self._table, None)
        except TableDamaged as error:
            # Compaction and VACUUM may have taken a file of this version: the newer one has the same rows elsewhere.
            version = self._snapshot.version
            self._snapshot = self._snapshot.refreshed()
            if not error.missing or self._snapshot.version == version:
                raise
            self._table = self._rest_of_table()
            return None
        if piece is not None:
            return self._pushed([piece], int(piece.column("time_tick")[-1].as_py()))
        self._table = None
        return self._pushed([], self._snapshot.last_tick(self._pchannel))

    def _pushed(self, pieces: Sequence[pa.Table | pa.RecordBatch], through: int) -> pa.Table | None:
        """Push rows, after which every row up to tick `through` is pushed."""
        left_out = self._scanner.filtered_count
        try:
            visible = [self._scanner.push(piece) for piece in pieces]
        except WalGap:
            if self._metrics is not None:
                self._metrics.wal_scan_time_tick_violation_message_total.labels(self._pchannel).inc()
            raise
        self._seen = max(self._seen, through)
        self._delivered = max(self._delivered, through)
        parts = [part for part in visible if part.num_rows]
        rows = pa.concat_tables(parts) if parts else None
        if rows is not None and self._until is not None and through > self._until:
            rows = rows.filter(pc.less_equal(rows.column(VISIBLE_TICK), self._until))
        if self._metrics is not None:
            self._count(self._metrics, rows, self._scanner.filtered_count - left_out)
        return rows

    def _count(self, metrics: Metrics, rows: pa.Table | None, left_out: int) -> None:
        metrics.wal_scan_pass_message_total.labels(self._pchannel).inc(left_out)
        metrics.wal_scanner_txn_buf_bytes.labels(self._pchannel).set(self._scanner.held_bytes)
        if rows is not None and rows.num_rows:
            for each in pc.value_counts(rows.column("type").cast(pa.utf8())).to_pylist():
                metrics.wal_scan_message_total.labels(self._pchannel, each["values"]).inc(each["counts"])
            newest = tick_physical_ms(rows.column(VISIBLE_TICK)[-1].as_py())
            metrics.wal_scan_delay_seconds.labels(self._pchannel).observe(max(0.0, time.time() - newest / 1000))
            size = pc.sum(pc.binary_length(rows.column("payload"))).as_py() or 0
            metrics.wal_scan_message_bytes_total.labels(self._pchannel).inc(size)

    def _catch_up(self, start: MessageId | None) -> Iterator[pa.Table] | None:
        if self._snapshot is None:
            return None
        return self._snapshot.messages(self._pchannel, start=start)

    def _rest_of_table(self) -> Iterator[pa.Table]:
        assert self._snapshot is not None
        if self._snapshot.trimmed(self._pchannel)[0] > self._seen:
            # Retention has come by while this scan stood: it says so where a scan that began here would.
            self._snapshot.messages(self._pchannel, start=self._snapshot.confirmed_at(self._pchannel, self._seen))
        return self._snapshot.messages(self._pchannel, after_tick=self._seen)

    def _newer_table(self) -> Iterator[pa.Table] | None:
        """The table's rows behind what was seen, where it has got that far by now."""
        self._snapshot = self._wal() if self._snapshot is None else self._snapshot.refreshed()
        if self._snapshot is None or self._snapshot.last_tick(self._pchannel) <= self._seen:
            return None
        return self._rest_of_table()


def _pchannel(channel: str) -> tuple[str, bool]:
    """The PChannel of a channel's name, and whether it names a VChannel."""
    head, _, tail = channel.rpartition("_")
    collection, v, number = tail.partition("v")
    if head and v and collection.isdigit() and number.isdigit():
        return head, True
    return channel, False
