"""The tail of a connection, which its consumers share: one call to the server and one decode for each new piece.

    shared = SharedTail(client)
    with shared.reader("p0") as reader:
        found = reader.tail(tick, timeout=1.0)

A reader that has taken everything waits. One of the waiting readers, the leader, calls the server, and its answer
serves all of them: it goes into a window of recent pieces, from which each reader takes what comes after its own
position. The next waiting reader leads once the leader has its answer. A reader without a thread asks to be called when
there is news (`TailReader.on_news`): as long as a PChannel has such readers, one thread leads for all its readers.
Pieces that every reader has taken are dropped, and the oldest ones beyond WINDOW_BYTES. A reader that is too slow for
the window, or that has just begun, calls the server by itself until it has caught up, so that it delays nobody and
keeps nothing in memory. A reader thus takes from the window only answers to calls that began after its own first one:
the server judges each call by the rights that the token has then.

What a window holds is immutable. The rows, units and decoded columns of a piece are made once for all readers with the
same filters; transactions are assembled by each reader (:mod:`millrace.wal.scanner`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import LogUnavailable, MillraceError
from millrace.client.consume.batch_decoder import BatchDecoder
from millrace.client.consume.delivery import OBJECT_BYTES
from millrace.message.model import ImmutableMessage
from millrace.message.types import MessageType
from millrace.rpc.tail import Evicted, TailBatch, TailSource, TimeTick
from millrace.wal.scanner import ImmutableTxn, Scanner, visible_units

WINDOW_BYTES: Final = 16 << 20
"""Bytes of the pieces of one PChannel that wait for slow readers.

The newest piece is kept whatever its size. The oldest piece also keeps the answer that it is a part of.
"""

_PIECE_ROWS: Final = 256
_PIECE_BYTES: Final = 512 << 10
"""Approximate limits of a piece: its units are in memory at once."""
_TAKE_BYTES: Final = 8 << 20
"""Approximate size of what a reader takes at a time."""
_LISTEN_SECONDS: Final = 1.0
"""Longest call for readers without a thread; a new one waits for so long until it can share the answers."""
_LISTEN_PAUSE: Final = 0.2
_LONGEST_PAUSE: Final = 2.0
_PIECE_OVERHEAD: Final = 16 << 10
"""Bytes of a piece in addition to its buffers: it has two dozen Arrow columns."""


class VisibleRows:
    """Rows that became visible to a reader, with the units that they are."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows

    def units(self) -> Iterable[ImmutableMessage | ImmutableTxn]:
        """Return the units in order."""
        return visible_units(self.rows)


class SharedUnits(VisibleRows):
    """Visible rows of a shared piece, all outside transactions: their units are made once. Thread-safe."""

    def __init__(self, rows: pa.Table, excluded: int) -> None:
        super().__init__(rows)
        self.excluded = excluded
        """Number of messages that the filters exclude."""
        self.decoder = BatchDecoder()
        """Decodes the rows of all units, once."""
        self._making = threading.Lock()
        self._units: list[ImmutableMessage | ImmutableTxn] | None = None

    def units(self) -> Sequence[ImmutableMessage | ImmutableTxn]:
        with self._making:
            if self._units is None:
                found = list(visible_units(self.rows))
                for unit in found:
                    if isinstance(unit, ImmutableMessage):
                        self.decoder.add(unit)
                self._units = found
            return self._units


class SharedRows:
    """A piece of the tail that several readers take. Thread-safe."""

    def __init__(self, rows: pa.RecordBatch, after: int, through: int) -> None:
        """Hold `rows`, which are everything in (`after`, `through`]."""
        self.rows = rows
        self.after = after
        self.through = through
        ticks = rows.column("time_tick")
        self._first, self._last = ticks[0].as_py(), ticks[-1].as_py()
        self._outside_transactions = bool(
            pc.all(pc.equal(rows.column("txn_id"), 0)).as_py()
            and not pc.any(pc.equal(rows.column("type").cast(pa.utf8()), MessageType.DROP_COLLECTION.name)).as_py()
        )
        self._making = threading.Lock()
        self._visible: dict[object, SharedUnits] = {}
        self.bytes = rows.nbytes + _PIECE_OVERHEAD
        """Approximate size in memory, with everything that was made of it."""

    def visible(self, scanner: Scanner) -> VisibleRows:
        """Push the rows to `scanner`, and return what they make visible.

        Rows outside transactions are visible or not by the filters alone, so scanners with the same filters share it.
        """
        selection = scanner.selection
        if selection is None or not self._outside_transactions or self._first <= scanner.after_tick:
            return VisibleRows(scanner.push(self.rows))
        with self._making:
            found = self._visible.get(selection)
            if found is None:
                twin = scanner.twin()
                found = SharedUnits(twin.push(self.rows), twin.filtered_count)
                self._visible[selection] = found
                self.bytes += found.rows.num_rows * OBJECT_BYTES
        scanner.pass_over(self._first, self._last, excluded=found.excluded)
        return found


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """Pieces after the requested tick, complete up to `confirmed_tick`; see TailBatch."""

    pieces: list[SharedRows | pa.RecordBatch]
    confirmed_tick: int


class SharedTail:
    """The tail of the connection `source`. Thread-safe."""

    def __init__(self, source: TailSource) -> None:
        self._source = source
        self._opening = threading.Lock()
        self._windows: dict[str, _Window] = {}

    @classmethod
    def of(cls, source: TailSource | SharedTail) -> SharedTail:
        """Return `source`, or a tail of it that nobody else shares."""
        return source if isinstance(source, SharedTail) else cls(source)

    def time_tick(self, pchannel: str, *, persist: bool) -> TimeTick:
        """See :meth:`millrace.rpc.tail.TailSource.time_tick`."""
        return self._source.time_tick(pchannel, persist=persist)

    def held_bytes(self) -> int:
        """Return the approximate size of all windows."""
        with self._opening:
            return sum(window.held_bytes() for window in self._windows.values())

    def reader(self, pchannel: str) -> TailReader:
        """Return a new reader of the PChannel; the window ends with its last reader."""
        with self._opening:
            window = self._windows.get(pchannel)
            if window is None:
                window = self._windows[pchannel] = _Window(self._source, pchannel)
            reader = TailReader(self, window)
            window.readers.add(reader)
            return reader

    def leave(self, reader: TailReader, window: _Window) -> None:
        """Note that a reader has closed."""
        with self._opening:
            window.leave(reader)
            if not window.readers and self._windows.get(window.pchannel) is window:
                del self._windows[window.pchannel]


class TailReader(Closeable):
    """A reader of one PChannel's tail. One thread reads; any may close it."""

    def __init__(self, shared: SharedTail, window: _Window) -> None:
        self._shared = shared
        self._window = window

    def tail(self, after_tick: int, *, timeout: float) -> TailBatch | SharedBatch | Evicted:
        """Return what comes after `after_tick`, as TailSource.tail does, and raise what it raises."""
        return self._window.tail(self, after_tick, Deadline.after(timeout))

    def on_news(self, after_tick: int, call: Callable[[], None]) -> None:
        """Call `call` once, from any thread and without waiting, when `tail` may have more after `after_tick`.

        Or when it would raise, or the reader is closed. The reader has called `tail` before.
        """
        self._window.on_news(self, after_tick, call)

    def close(self) -> None:
        """Leave the window; a waiting reader returns. Idempotent."""
        self._shared.leave(self, self._window)


class _Leading(NamedTuple):
    """The leader's call: its number among all calls, and the position from which it reads."""

    number: int
    after: int


class _Window:
    """The recent pieces of one PChannel: everything in (earliest, confirmed]."""

    def __init__(self, source: TailSource, pchannel: str) -> None:
        self.pchannel = pchannel
        self.readers: set[TailReader] = set()
        self._source = source
        self._changed = threading.Condition()
        self._pieces: deque[SharedRows] = deque()
        self._earliest = 0
        self._confirmed = 0
        self._positions: dict[TailReader, int] = {}
        """The positions of the readers that have joined: those whose own call had come to the end of the window."""
        self._leading: _Leading | None = None
        """The call of a reader for all that wait."""
        self._calls = 0
        self._failure: MillraceError | None = None
        """The error of the last leader's call that failed."""
        self._asked: dict[TailReader, tuple[int, int]] = {}
        """Of the readers that have not joined, the number of their last call and where it led to."""
        self._parked: dict[TailReader, tuple[int, Callable[[], None]]] = {}
        """The readers that wait without a thread: their positions, and what calls them."""
        self._parkers: set[TailReader] = set()
        """The readers that have ever waited so; one thread leads as long as there are any."""
        self._listening = False
        self._raises: dict[TailReader, MillraceError] = {}
        """Errors of the listening thread that readers meet at their next call."""
        self._takes = 0

    def held_bytes(self) -> int:
        with self._changed:
            return sum(piece.bytes for piece in self._pieces)

    def leave(self, reader: TailReader) -> None:
        with self._changed:
            self.readers.discard(reader)
            self._parkers.discard(reader)
            self._positions.pop(reader, None)
            self._asked.pop(reader, None)
            self._raises.pop(reader, None)
            parked = self._parked.pop(reader, None)
            self._drop_taken()
            self._changed.notify_all()
        if parked is not None:
            parked[1]()

    def on_news(self, reader: TailReader, after: int, call: Callable[[], None]) -> None:
        with self._changed:
            waits = reader in self.readers and after >= self._confirmed and reader not in self._raises
            if waits:
                self._parked[reader] = after, call
                self._parkers.add(reader)
                if reader in self._positions:
                    self._positions[reader] = after
                if not self._listening:
                    self._listening = True
                    name = f"tail-{self.pchannel}"
                    threading.Thread(target=self._listen, name=name, daemon=True).start()
        if not waits:
            call()

    def tail(self, reader: TailReader, after: int, deadline: Deadline) -> TailBatch | SharedBatch | Evicted:
        with self._changed:
            failure = self._failure
            if (met := self._raises.pop(reader, None)) is not None:
                raise copy(met)
            while reader in self.readers:
                calls = self._must_call(reader, after)
                if after < self._confirmed and not calls:
                    return self._taken(reader, after)
                if self._failure is not failure and self._failure is not None:
                    raise copy(self._failure)
                if calls:
                    break
                if deadline.expired():
                    if self._leading is None:
                        self._changed.notify()  # the next one leads; it was perhaps this one that had been told
                    return TailBatch([], after)
                self._positions[reader] = after
                deadline.wait(self._changed)
            else:  # it was closed
                return TailBatch([], after)
            self._calls += 1
            number = self._calls
            leads = self._leading is None and after >= self._confirmed
            if leads:
                self._leading = _Leading(number, after)
        try:
            found = self._source.tail(self.pchannel, after, timeout=deadline.remaining())
        except BaseException as error:
            with self._changed:
                if leads:
                    self._leading = None
                    if isinstance(error, MillraceError):
                        self._failure = error
                    self._changed.notify_all()
            raise
        with self._changed:
            if leads:
                self._leading = None
            if isinstance(found, TailBatch) and reader in self.readers:
                through = max(after, found.confirmed_tick)
                self._push(after, through, found.batches)
                if reader in self._positions and self._earliest <= after < self._confirmed:
                    return self._taken(reader, after)
                # What others asked before this call may lack rows that this reader may see.
                if through >= self._confirmed and (self._leading is None or self._leading.number > number):
                    self._positions[reader] = through
                else:
                    self._asked[reader] = number, through
            elif leads:
                self._changed.notify()
        return found

    def _must_call(self, reader: TailReader, after: int) -> bool:
        """Return whether the reader has to call the server: for itself, or for all that wait."""
        if reader not in self._positions:
            return True
        if after < self._confirmed:
            return after < self._earliest
        if self._listening:
            return False
        # An answer from a later position than this reader's would not serve it.
        return self._leading is None or self._leading.after > after

    def _push(self, after: int, through: int, batches: Sequence[pa.RecordBatch]) -> None:
        """Add what is new in (`after`, `through`], for those that wait too."""
        if through <= self._confirmed:
            self._wake()
            return
        if len(self.readers) == 1 and not self._listening:  # nobody shares it
            self._pieces.clear()
            self._earliest = self._confirmed = through
            return
        if after > self._confirmed:  # nobody has what lies between: the window begins anew
            self._pieces.clear()
            self._earliest = self._confirmed = after
        for batch in batches:
            new = rows_after(batch, self._confirmed)
            step = max(1, min(_PIECE_ROWS, new.num_rows * _PIECE_BYTES // max(1, new.nbytes)))
            for start in range(0, new.num_rows, step):
                rows = new.slice(start, step)
                last = rows.column("time_tick")[-1].as_py()
                self._pieces.append(SharedRows(rows, self._confirmed, last))
                self._confirmed = last
        self._confirmed = through
        size = sum(piece.bytes for piece in self._pieces)
        while len(self._pieces) > 1 and size > WINDOW_BYTES:
            oldest = self._pieces.popleft()
            size -= oldest.bytes
            self._earliest = oldest.through
        self._wake()

    def _wake(self) -> None:
        """Wake those that wait: what is new is for them, or the next one leads."""
        self._drop_taken()
        self._changed.notify_all()
        self._call_parked(lambda after: after < self._confirmed)

    def _call_parked(self, wanted: Callable[[int], bool]) -> None:
        for reader, (after, call) in list(self._parked.items()):
            if wanted(after):
                del self._parked[reader]
                call()

    def _listen(self) -> None:
        """Lead for the readers without threads, until there are none."""
        pause = _LISTEN_PAUSE
        while True:
            with self._changed:
                if not self._parkers:
                    self._listening = False
                    self._changed.notify_all()
                    return
                if self._leading is not None:  # a reader of before; its answer serves all
                    self._changed.wait(_LISTEN_SECONDS)
                    continue
                self._calls += 1
                after = self._confirmed
                self._leading = _Leading(self._calls, after)
                # These calls lie before this one.
                for reader, (_, through) in list(self._asked.items()):
                    if through >= after:
                        self._positions[reader] = through
                    del self._asked[reader]
            try:
                found = self._source.tail(self.pchannel, after, timeout=_LISTEN_SECONDS)
            except Exception as error:
                failure = (
                    error
                    if isinstance(error, MillraceError)
                    else LogUnavailable(f"the tail of {self.pchannel} failed: {type(error).__name__}: {error}")
                )
                with self._changed:
                    self._leading, self._failure = None, failure
                    self._raises |= dict.fromkeys(self._parked, failure)
                    self._changed.notify_all()
                    self._call_parked(lambda after: True)
                    self._changed.wait(jittered(pause))
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause = _LISTEN_PAUSE
            with self._changed:
                self._leading = None
                if isinstance(found, Evicted):  # each reader meets it by itself
                    self._pieces.clear()
                    self._earliest = self._confirmed = max(after, found.earliest)
                    self._positions.clear()
                    self._changed.notify_all()
                    self._call_parked(lambda after: True)
                elif found.confirmed_tick > self._confirmed:
                    self._push(after, found.confirmed_tick, found.batches)

    def _taken(self, reader: TailReader, after: int) -> SharedBatch:
        found = self._batch(after)
        self._positions[reader] = found.confirmed_tick
        self._takes += 1
        if self._takes % max(1, len(self._positions) // 8) == 0:  # each costs a look at all readers
            self._drop_taken()
        return found

    def _batch(self, after: int) -> SharedBatch:
        """Return the pieces after `after`, about _TAKE_BYTES at most."""
        found: list[SharedRows | pa.RecordBatch] = []
        through, size = self._confirmed, 0
        for place in range(bisect_right(self._pieces, after, key=lambda piece: piece.through), len(self._pieces)):
            piece = self._pieces[place]
            if found and size >= _TAKE_BYTES:
                through = piece.after
                break
            size += piece.rows.nbytes
            found.append(piece if piece.after >= after else rows_after(piece.rows, after))
        return SharedBatch(found, through)

    def _drop_taken(self) -> None:
        """Drop the pieces that every reader has taken."""
        least = min(self._positions.values(), default=self._confirmed)
        while self._pieces and self._pieces[0].through <= least:
            self._earliest = self._pieces.popleft().through


def rows_after(batch: pa.RecordBatch, tick: int) -> pa.RecordBatch:
    """Return the rows with a greater tick, without copying."""
    ticks = batch.column("time_tick").to_numpy()
    return batch.slice(bisect_right(ticks, tick)) if len(ticks) and ticks[0] <= tick else batch
