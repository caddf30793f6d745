"""A scan of a PChannel over both sources: the ``wal`` table up to its end, then the append host's tail.

    with scan("p0_1v0", StartAfterTick(tick), wal=settings.wal_uri, tail=client) as found:
        for message in found:
            ...

A scan's position is a time tick. Both sources return what comes after it, and have the same rows in the same order (the
chain is pure), so switching between them leaves no gap and repeats nothing. A reader that is too slow for the tail
returns to the table and catches up. A scan starts at the LastConfirmed of its starting tick, so that transactions that
are open there are complete when they commit. Messages that have left the tail and are not in the table yet are read
from the log, if it is available here.

Every wait for a source has a timeout, and ends in TickNotReached, which says what the scan waits for.
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
from millrace.base.errors import (
    InvalidArgument,
    PositionTruncated,
    TableDamaged,
    TickNotReached,
    WalGap,
)
from millrace.base.metrics import Metrics
from millrace.client.consume.shared_tail import SharedBatch, SharedRows, SharedTail, VisibleRows
from millrace.message.ids import LogId, MessageId, split_channel, tick_physical_ms
from millrace.message.model import ImmutableMessage
from millrace.rpc.tail import Evicted, TailSource, TimeTick
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
"""Longest wait for the tail per call, in seconds; a close may take that long."""
_PAUSE: Final = 0.05
"""Pause before checking the table again, if the tail has gone past and the table is not there yet."""
_TABLE_FIRST: Final = 1.0
"""Seconds to wait for the table before reading the log instead; a running streaming node needs less."""
STALL_TIMEOUT: Final = 30.0
"""Seconds without progress after which a scan raises TickNotReached."""
_ASK_SECONDS: Final = 0.2
"""Minimum time between two time ticks that a scan requests to reach its `until_tick`."""
_PERSISTED_SECONDS: Final = 10.0
"""Minimum time between two time ticks that a scan has a broker's log persist, because nothing else moves its time."""
_ID_COLUMNS: Final = ("ledger", "entry", "index", "ordinal")


class WalView(Protocol):
    """One version of the ``wal`` table: a WalSnapshot (millrace.tables.wal.reader), or a server's."""

    @property
    def version(self) -> int: ...

    def refreshed(self) -> WalView:
        """Return the newest version; if that is another one, this one is no longer usable."""
        ...

    def last_tick(self, pchannel: str) -> int:
        """Return the tick up to which this version has everything of `pchannel`; 0 if nothing was committed."""
        ...

    def trimmed(self, pchannel: str) -> tuple[int, LogId]:
        """Return the tick up to which retention may have removed rows, and the first readable entry."""
        ...

    def confirmed_at(self, pchannel: str, tick: int) -> MessageId:
        """Return the LastConfirmed of the last message <= `tick`.

        Everything that becomes visible after `tick` starts there or later.
        """
        ...

    def messages(
        self,
        pchannel: str,
        *,
        start: MessageId | None = None,
        after_tick: int = 0,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        """Yield messages in id order, with id >= `start`, or time_tick > `after_tick` without `start`.

        Raises PositionTruncated at once.
        """
        ...


WalOpener: TypeAlias = Callable[[], WalView | None]
"""Opens the newest version; returns None if there is no table yet."""


UncommittedReader: TypeAlias = Callable[[str], Iterator[tuple[pa.RecordBatch, int]]]
"""Yields the messages of a PChannel that the log has after the newest version of the ``wal`` table, in order.

Each piece has the tick that it completes.
"""


def wal_opener(wal: str) -> WalOpener:
    """Return an opener of the ``wal`` table at the URI `wal`."""
    from millrace.tables.wal.reader import (
        WalSnapshot,  # imports the table library, which clients of a remote server do not need
    )

    return partial(WalSnapshot.open, wal)


def scan(
    channel: str,
    policy: DeliverPolicy | None = None,
    *,
    wal: str | WalOpener,
    tail: TailSource | SharedTail,
    filters: Sequence[Filter] = (),
    until_tick: int | None = None,
    metrics: Metrics | None = None,
    log: UncommittedReader | None = None,
    stall_timeout: float = STALL_TIMEOUT,
    tick_interval: float | None = None,
) -> Scan:
    """Scan the units of a PChannel, or of a VChannel (`<pchannel>_<collection id>v<n>`), in tick order.

    `policy` is All by default. `wal` is the table's URI (it need not exist yet) or an opener, `tail` the append host or
    its client. The scan runs until it is closed or has delivered everything up to `until_tick`; on an idle PChannel it
    requests a time tick to get there.

    With `tick_interval`, iteration also yields TimeTick messages that are not persisted: while the PChannel is idle,
    one about every so many seconds. Everything up to its `time_tick` was yielded before it.

    Raises what the sources raise.
    Raises TickNotReached if for `stall_timeout` seconds neither the tail nor the table (nor the `log`) has the next
    messages.
    Raises PositionTruncated if retention has removed messages after the scan's position, even while the scan is
    running.
    Raises WalGap if a source is broken.
    """
    pchannel, vchannel = split_channel(channel)
    own = [VChannelFilter({vchannel})] if vchannel else []
    return Scan(
        pchannel,
        policy or All(),
        wal=wal if callable(wal) else wal_opener(wal),
        tail=tail,
        filters=[*own, *filters],
        until_tick=until_tick,
        metrics=metrics,
        log=log,
        stall_timeout=stall_timeout,
        tick_interval=tick_interval,
    )


class Scan(Closeable):
    """A running scan. One thread reads; any thread may close it."""

    def __init__(
        self,
        pchannel: str,
        policy: DeliverPolicy,
        *,
        wal: WalOpener,
        tail: TailSource | SharedTail,
        filters: Sequence[Filter],
        until_tick: int | None,
        metrics: Metrics | None = None,
        log: UncommittedReader | None = None,
        stall_timeout: float = STALL_TIMEOUT,
        tick_interval: float | None = None,
    ) -> None:
        if tick_interval is not None and tick_interval <= 0:
            raise InvalidArgument(f"the interval of ticks is {tick_interval} s: it must be greater than 0")
        self._pchannel = pchannel
        self._log = log
        self._untaken: Iterator[tuple[pa.RecordBatch, int]] | None = None
        self._stall_timeout = stall_timeout
        self._waiting: float | None = None
        """Since when no source has the next messages, by the monotonic clock."""
        self._log_helps = False
        """Whether reading the log may still help; False after it was read in vain since then."""
        self._table_tick = 0
        """The table's tick when the wait began, or when the table last advanced."""
        self._caught_up = False
        self._metrics = metrics
        self._tail = SharedTail.of(tail)
        self._until = until_tick
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._wal = wal
        # The order matters: with the snapshot first, messages between the two are in the tail or in a newer snapshot.
        self._snapshot = wal()
        after, first_id = self._begin(policy)
        self._scanner = Scanner(after_tick=after, first_id=first_id, filters=filters)
        after = self._scanner.after_tick  # a tick filter may start after the policy
        snapshot = self._snapshot
        start = snapshot.confirmed_at(pchannel, after) if snapshot is not None else None
        self._tick_interval = tick_interval
        self._asked = self._persisted = -_PERSISTED_SECONDS
        """When a tick, and one that is persisted, was last requested, by the monotonic clock."""
        self._tick_stalled = False
        """Whether the last tick that was not persisted showed no progress: the log is a broker's, perhaps."""
        self._idle_tick: TimeTick | None = None
        """The tick to be yielded once everything up to it was."""
        self._seen = 0
        """Every row up to this tick was pushed, or is before the start."""
        self._delivered = after
        self._table = self._catch_up(start)
        self._reader = self._tail.reader(pchannel)
        if metrics is not None:
            metrics.wal_scanner_total.labels(pchannel).inc()

    @property
    def confirmed_tick(self) -> int:
        """The tick up to which :meth:`poll` has returned everything that became visible."""
        return self._delivered

    @property
    def caught_up(self) -> bool:
        """Whether the tail had nothing new at the last call."""
        return self._caught_up

    @property
    def ended(self) -> bool:
        """Whether the scan is closed or has returned everything up to `until_tick`."""
        return self._closed.is_set() or (self._until is not None and self._delivered >= self._until)

    def poll(self, *, timeout: float) -> pa.Table | None:
        """Return the next units as rows of ROW_SCHEMA with ``visible_tick``; None after `timeout` seconds.

        Raises TickNotReached, and what the sources raise. After a retriable error, the next poll continues.
        """
        parts = self.poll_parts(timeout=timeout)
        return pa.concat_tables([part.rows for part in parts]) if parts else None

    def poll_parts(self, *, timeout: float) -> list[VisibleRows]:
        """Return the next units as :meth:`poll` does, in parts; none after `timeout` seconds."""
        deadline = Deadline.after(timeout)
        while not self.ended:
            parts = self._next(deadline.remaining())
            if parts or self._tick_is_due() or (parts is None and deadline.expired()):
                return parts or []
        return []

    def poll_once(self) -> list[VisibleRows] | None:
        """Return what the next piece delivers, perhaps nothing; None without waiting if there is none now."""
        return [] if self.ended else self._next(0.0)

    def on_news(self, call: Callable[[], None]) -> float | None:
        """Call `call` once, from any thread, when a poll may find more, or the scan is closed.

        Returns the seconds after which to poll instead if the scan waits for something else than the tail.
        """
        if self.ended or self._table is not None or self._untaken is not None:
            return 0.0
        if self._waiting is not None or not self._caught_up:
            return _PAUSE
        if self._until is not None or self._tick_interval is not None:
            return min(_ASK_SECONDS, self._tick_interval or _ASK_SECONDS)
        self._reader.on_news(self._seen, call)
        return None

    def tables(self) -> Iterator[pa.Table]:
        """Yield units as tables (see :meth:`poll`) until the scan ends."""
        while not self.ended:
            rows = self.poll(timeout=_WAIT)
            if rows is not None:
                yield rows

    def __iter__(self) -> Iterator[ImmutableMessage | ImmutableTxn]:
        """Yield units as objects until the scan ends."""
        while not self.ended:
            rows = self.poll(timeout=_WAIT)
            if rows is not None:
                yield from visible_units(rows)
            tick = self._idle_tick
            if tick is not None and self._tick_is_due():
                self._idle_tick = None
                yield tick.message()

    def close(self) -> None:
        """Close the scan; a waiting reader returns within a second. Idempotent."""
        with self._closing:
            first = not self._closed.is_set()
            self._closed.set()
        if first:
            self._reader.close()
        if first and self._metrics is not None:
            self._metrics.wal_scanner_total.labels(self._pchannel).dec()

    # --- start --------------------------------------------------------------------------------------------------------

    def _begin(self, policy: DeliverPolicy) -> tuple[int, MessageId | None]:
        """Return the tick after which units are delivered, and the least id of a unit if the policy is by id."""
        match policy:
            case All():  # everything that exists: retention may have removed the beginning
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
                raise InvalidArgument(
                    f"{policy!r} is not a deliver policy: use All(), Latest(), StartFrom(message id),"
                    " StartAfter(message id) or StartAfterTick(tick)"
                )

    def _now(self) -> int:
        try:
            return self._tail.time_tick(self._pchannel, persist=False).time_tick
        except InvalidArgument:
            return 0  # no term is open yet, so every message is new

    def _tick_before(self, first: MessageId) -> int:
        """Return a tick before the first message with an id >= `first`, as close to it as the table allows."""
        snapshot = self._snapshot
        if snapshot is None:
            return 0
        columns = ["time_tick", *_ID_COLUMNS]
        for table in snapshot.messages(self._pchannel, start=first, columns=columns):
            return int(table.column("time_tick")[0].as_py()) - 1
        return snapshot.last_tick(self._pchannel)

    # --- progress -----------------------------------------------------------------------------------------------------

    def _next(self, timeout: float) -> list[VisibleRows] | None:
        """Return what the next piece of either source delivers, perhaps nothing; None if there was no piece."""
        if self._table is not None:
            return self._next_of_table()
        if self._untaken is not None:
            return self._next_of_log(self._untaken)
        found = self._reader.tail(self._seen, timeout=min(timeout, self._tick_interval or _WAIT, _WAIT))
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
        pieces = found.pieces if isinstance(found, SharedBatch) else found.batches
        return self._pushed(pieces, found.confirmed_tick)

    def _wait_for_the_table(self, timeout: float) -> None:
        """Wait for messages that have left the tail; then read the log, or raise TickNotReached."""
        now = time.monotonic()
        table_tick = 0 if self._snapshot is None else self._snapshot.last_tick(self._pchannel)
        if self._waiting is None or table_tick > self._table_tick:
            self._waiting, self._table_tick, self._log_helps = now, table_tick, self._log is not None
        waited = now - self._waiting
        if self._log is not None and self._log_helps and (self._snapshot is None or waited >= _TABLE_FIRST):
            self._untaken, self._log_helps = self._log(self._pchannel), False
        elif waited >= self._stall_timeout:
            self._waiting = None
            raise TickNotReached(
                f"the server's tail of {self._pchannel} no longer has the messages after tick {self._seen}, and for"
                f" {waited:.0f} s the wal"
                f" table, which is at tick {table_tick}, has not advanced: is the streaming node running (`millrace"
                " status`)?"
            )
        else:
            self._closed.wait(min(timeout, _PAUSE))

    def _next_of_log(self, uncommitted: Iterator[tuple[pa.RecordBatch, int]]) -> list[VisibleRows] | None:
        try:
            piece = next(uncommitted, None)
        except PositionTruncated:  # it has reached the table meanwhile
            piece = None
        if piece is None:
            self._untaken = None
            return None
        rows, through = piece
        if through <= self._seen:
            return None
        self._waiting = None  # reading the log may help again later
        return self._pushed([rows.filter(pc.greater(rows.column("time_tick"), self._seen))], through)

    def _ask_for_a_tick(self) -> None:
        """Have an idle PChannel pass `until_tick` once its time has come, or give the next tick to yield."""
        ends = self._until is not None and tick_physical_ms(self._until) <= time.time_ns() // 1_000_000
        interval = _ASK_SECONDS if ends else self._tick_interval
        now = time.monotonic()
        if interval is None or now < self._asked + interval:
            return
        self._asked = now
        # A log that promises its later stamps needs no entry. A broker's stands still without one.
        persist = self._tick_stalled and (ends or now >= self._persisted + _PERSISTED_SECONDS)
        if persist:
            self._persisted = now
        found = self._tail.time_tick(self._pchannel, persist=persist)
        self._tick_stalled = not found.persisted and found.time_tick <= self._seen
        if self._tick_interval is not None and not found.persisted and not self._tick_stalled:
            self._idle_tick = found

    def _tick_is_due(self) -> bool:
        """Return whether the idle tick is next: everything up to it was delivered."""
        return self._idle_tick is not None and self._delivered >= self._idle_tick.time_tick

    def _next_of_table(self) -> list[VisibleRows] | None:
        assert self._table is not None
        assert self._snapshot is not None
        try:
            piece = next(self._table, None)
        except TableDamaged as error:
            # Compaction and VACUUM may have removed a file of this version; the newer one has the same rows.
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

    def _pushed(self, pieces: Sequence[pa.Table | pa.RecordBatch | SharedRows], through: int) -> list[VisibleRows]:
        """Push rows, which complete every row up to tick `through`; return the parts that became visible."""
        left_out = self._scanner.filtered_count
        try:
            visible = [
                piece.visible(self._scanner)
                if isinstance(piece, SharedRows)
                else VisibleRows(self._scanner.push(piece))
                for piece in pieces
            ]
        except WalGap:
            if self._metrics is not None:
                self._metrics.wal_scan_time_tick_violation_message_total.labels(self._pchannel).inc()
            raise
        self._seen = max(self._seen, through)
        self._delivered = max(self._delivered, through)
        if self._until is not None and through > self._until:
            visible = [
                VisibleRows(part.rows.filter(pc.less_equal(part.rows.column(VISIBLE_TICK), self._until)))
                for part in visible
            ]
        parts = [part for part in visible if part.rows.num_rows]
        if parts:
            self._idle_tick = None  # they may come after it, and tell the time
        if self._metrics is not None:
            self._metrics.wal_scan_pass_message_total.labels(self._pchannel).inc(
                self._scanner.filtered_count - left_out
            )
            self._metrics.wal_scanner_txn_buf_bytes.labels(self._pchannel).set(self._scanner.held_bytes)
            for part in parts:
                self._count(self._metrics, part.rows)
        return parts

    def _count(self, metrics: Metrics, rows: pa.Table) -> None:
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
            # Retention has removed rows during the scan: raise the error that a new scan from here would raise.
            self._snapshot.messages(self._pchannel, start=self._snapshot.confirmed_at(self._pchannel, self._seen))
        return self._snapshot.messages(self._pchannel, after_tick=self._seen)

    def _newer_table(self) -> Iterator[pa.Table] | None:
        """Return the table's rows after the last pushed one, if the table has advanced past it."""
        self._snapshot = self._wal() if self._snapshot is None else self._snapshot.refreshed()
        if self._snapshot is None or self._snapshot.last_tick(self._pchannel) <= self._seen:
            return None
        return self._rest_of_table()
