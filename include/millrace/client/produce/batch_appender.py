"""Appends batched by size and time: many small calls become few large messages, and each call has a future.

    with producer.batch() as batch:
        future = batch.insert(rows, collection=users)
        ...
        print(future.result().last_tick)

Rows of one VChannel keep the order of the calls. Consecutive calls for the same partition share a message and its
result. The appender holds at most `buffer_bytes` of rows; a call beyond that waits, and raises BufferFull if there is
no room in time. A future's result is a Written, which includes the rejections of its rows. A future fails with
AppendUnresolved if the outcome is unknown. Rows that were not sent yet wait for the log.

An appender has no thread of its own: it queues its calls with those of the producer's threads and tasks
(:mod:`~millrace.client.produce.channel_sender`).
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import BufferFull, Closed, DeadlineExceeded, InvalidArgument, LogUnavailable
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.channel_queue import Call, CallSplitter, Piece, finish_calls
from millrace.client.produce.channel_sender import ChannelSender
from millrace.client.produce.rows import Keys, Rows
from millrace.client.produce.written import Written
from millrace.message.types import MessageType

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits at which a batch is sent, and of the rows held in memory.

    A PChannel's batch is sent at `bytes` of rows or `count` calls, or `delay` seconds after its first row.
    """

    bytes: int = 1 << 20
    count: int = 0
    """Calls' shares of a PChannel that complete a batch; 0: only bytes and delay count."""
    delay: float = 0.005
    buffer_bytes: int = 64 << 20
    deadline: float = 30.0
    """Seconds that a call waits for room, and `close` for what is held."""


class BufferedCall(Call):
    """A call whose rows a batch appender holds."""

    holder: BatchAppender
    size = 0

    def finish(self) -> Callable[[], None] | None:
        self.holder.release(self)
        return None


class FutureCall(BufferedCall, Future[Written]):
    """A call of a batch, and its future.

    The future's condition and lists, which cost more than the call itself, are made once something asks for them; most
    results are read after the call has ended, and need none.
    """

    def __init__(self, holder: BatchAppender) -> None:
        Call.__init__(self)
        self.holder = self.series = holder
        self._finished = False
        self._callbacks: list[Callable[[FutureCall], object]] | None = None

    def __getattr__(self, name: str) -> Any:
        """Make the parts of a future. Called only while they are missing."""
        if not name.startswith("_"):
            raise AttributeError(name)
        with self.holder.guard:
            make = "_condition" not in self.__dict__
            if make:
                Future.__init__(self)
            finished = make and self._finished
        if finished:
            self._set()
        return object.__getattribute__(self, name)

    def finish(self) -> Callable[[], None] | None:
        with self.holder.guard:
            self._finished = True
            made, callbacks = "_condition" in self.__dict__, self._callbacks
        if made:
            self._set()
        for each in callbacks or ():
            try:
                each(self)
            except Exception:  # as those of any future
                _log.exception("a callback of an append failed")
        return super().finish()

    def _set(self) -> None:
        if self.error is None:
            self.set_result(self.written)
        else:
            self.set_exception(self.error)

    def result(self, timeout: float | None = None) -> Written:
        return Call.result(self) if self._finished else Future.result(self, timeout)

    def done(self) -> bool:
        return self._finished

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        """Call `call` with this future once it is done: in the thread that ends it, or at once."""
        with self.holder.guard:
            if not self._finished:
                self._callbacks = [*(self._callbacks or ()), call]
                return
        call(self)

    def cancel(self) -> bool:
        """Return False: an append cannot be cancelled."""
        return False


class BatchAppender(Closeable):
    """Batches appends of one producer. Thread-safe.

    Made by :meth:`Producer.batch`, or for one collection by :meth:`millrace.client.collection.Collection.batch`.
    """

    def __init__(
        self,
        sender: Callable[[str], ChannelSender],
        splitter: CallSplitter,
        *,
        known: Callable[[CollectionInfo | str], CollectionInfo],
        renewed: Callable[[CollectionInfo], CollectionInfo | None],
        evolved: Callable[[CollectionInfo | str, Rows], CollectionInfo],
        collection: CollectionInfo | None = None,
        limits: BatchLimits | None = None,
    ) -> None:
        self.limits = limits or BatchLimits()
        self._sender = sender
        self._splitter = splitter
        self._known = known
        self._renewed = renewed
        self._evolved = evolved
        self._collection = collection
        self._changed = threading.Condition()
        self.guard = threading.Lock()
        """Guards the futures of its calls."""
        self._senders: dict[str, ChannelSender] = {}
        self._calls: dict[BufferedCall, None] = {}
        """Calls that have not ended."""
        self._room: deque[Callable[[], None]] = deque()
        self._held = 0
        self._waiters = 0
        """Threads that wait for room or for the end of all calls."""
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def held_bytes(self) -> int:
        """Bytes of rows that are not settled yet."""
        return self._held

    def insert(
        self,
        rows: Rows,
        *older: Any,
        collection: CollectionInfo | str | None = None,
        partition: str | None = None,
        partition_by: str | None = None,
        wait: bool = True,
        evolve: bool = False,
    ) -> Future[Written]:
        """Buffer rows to append (see :meth:`Producer.insert`); wait while the buffer is full, unless `wait` is False.

        `collection` is given by definition or name, unless the appender is a collection's. With `evolve`, the schema is
        changed first, in this call, if the newest known one does not fit the rows; rows that are buffered already keep
        theirs.

        Raises BufferFull (nothing was buffered), InvalidArgument, Closed.
        """
        rows, chosen = self._target(rows, older, collection)
        return self._rows(MessageType.INSERT, chosen, rows, partition, partition_by, wait, evolve)

    def upsert(
        self,
        rows: Rows,
        *older: Any,
        collection: CollectionInfo | str | None = None,
        partition: str | None = None,
        partition_by: str | None = None,
        wait: bool = True,
        evolve: bool = False,
    ) -> Future[Written]:
        """Buffer rows to upsert (see :meth:`Producer.upsert`).

        Of several rows with one key, the last one counts, within a call and among calls that share a message. The rows
        of a message change at once, those of a call may not. A PChannel whose term runs a chain version before 4
        rejects them (UNSUPPORTED_TYPE, in the result); :meth:`Producer.upsert` has a fallback for that.

        Raises the errors of `insert`.
        """
        rows, chosen = self._target(rows, older, collection)
        return self._rows(MessageType.UPSERT, chosen, rows, partition, partition_by, wait, evolve)

    def delete(
        self,
        keys: Keys,
        *older: Any,
        collection: CollectionInfo | str | None = None,
        partition: str | None = None,
        wait: bool = True,
    ) -> Future[Written]:
        """Buffer primary keys to delete. Raises the errors of `insert`."""
        keys, chosen = self._target(keys, older, collection)
        return self._split(chosen, lambda call, found: self._splitter.keys(call, found, keys, partition), wait)

    def flush(self, *, deadline: float | None = None) -> None:
        """Send everything held and wait until it is settled. Raises DeadlineExceeded; sending continues."""
        end = Deadline.after(self.limits.deadline if deadline is None else deadline)
        for sender in list(self._senders.values()):
            sender.hurry()
        with self._changed:
            while self._calls:
                if end.expired():
                    raise DeadlineExceeded(f"{self._held} bytes are not settled yet: they are still being sent")
                self._wait(end)

    def close(self, *, deadline: float | None = None) -> None:
        """Flush and stop. Idempotent.

        What cannot be sent in time fails with LogUnavailable and is not in the log. Raises DeadlineExceeded if anything
        was given up.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        try:
            self.flush(deadline=deadline)
        finally:
            error = LogUnavailable("the appender was closed before this was sent: it is not in the log")
            for sender in list(self._senders.values()):
                sender.drop(list(self._calls), error)

    def on_capacity(self, call: Callable[[], None]) -> None:
        """Call `call` once, from any thread, when there may be room again: for callers that must not block."""
        with self._changed:
            if self._held:
                self._room.append(call)
                return
        call()

    def take(self, call: BufferedCall, pieces: Sequence[Piece], *, wait: bool) -> None:
        """Queue a call's pieces. Raises as :meth:`insert` does."""
        call.left, call.size = len(pieces), sum(piece.bytes for piece in pieces)
        with self._changed:
            self._wait_for_room(call.size, wait)
            self._held += call.size
            self._calls[call] = None
        if not pieces:
            call.ended = True
            finish_calls([call])
            return
        limits = self.limits
        due = time.monotonic() + limits.delay if limits.delay else 0.0
        if len(pieces) == 1:
            self._sender_of(pieces[0]).add(pieces, due=due, bytes=limits.bytes, count=limits.count)
            return
        shares: dict[ChannelSender, list[Piece]] = {}
        for piece in pieces:
            shares.setdefault(self._sender_of(piece), []).append(piece)
        for sender, share in shares.items():
            sender.add(share, due=due, bytes=limits.bytes, count=limits.count)

    def release(self, call: BufferedCall) -> None:
        """Give the room of a call back."""
        with self._changed:
            self._calls.pop(call, None)
            self._held -= call.size
            waiting = self._room
            if waiting:
                self._room = deque()
            if self._waiters:
                self._changed.notify_all()
        for each in waiting:
            each()

    def _rows(
        self,
        kind: MessageType,
        chosen: CollectionInfo | str,
        rows: Rows,
        partition: str | None,
        partition_by: str | None,
        wait: bool,
        evolve: bool,
    ) -> Future[Written]:
        return self._split(
            self._evolved(chosen, rows) if evolve else chosen,
            lambda call, found: self._splitter.rows(call, kind, found, rows, partition, partition_by),
            wait,
        )

    def _split(
        self, chosen: CollectionInfo | str, split: Callable[[Call, CollectionInfo], list[Piece]], wait: bool
    ) -> Future[Written]:
        """Buffer what `split` makes of a call by the collection's definition.

        If it raises InvalidArgument, and another client has changed the collection that has the name, it is asked again
        with the newer definition. A call is not made again once it is buffered: later ones may be ahead of it.
        """
        call, definition = FutureCall(self), self._known(chosen)
        try:
            pieces = split(call, definition)
        except InvalidArgument:
            newer = self._renewed(definition) if isinstance(chosen, str) else None
            if newer is None:
                raise
            call = FutureCall(self)
            pieces = split(call, newer)
        self.take(call, pieces, wait=wait)
        return call

    def _target(
        self, rows: Any, older: Sequence[Any], collection: CollectionInfo | str | None
    ) -> tuple[Any, CollectionInfo | str]:
        """Return the rows (or keys) and the collection of a call, whose arguments may have the older order."""
        if older:
            words = "batch.insert(collection, rows) is deprecated: write batch.insert(rows, collection=collection)"
            warnings.warn(words, DeprecationWarning, stacklevel=3)
            collection, (rows, *more) = rows, older
            if more:
                raise InvalidArgument("a batch takes rows (or keys); its other arguments are given by name")
        given = self._collection if collection is None else collection
        if given is None:
            raise InvalidArgument("name the collection: collection=, or take the batch of a collection")
        return rows, given

    def _sender_of(self, piece: Piece) -> ChannelSender:
        assert piece.destination is not None
        name = piece.destination.pchannel
        found = self._senders.get(name)
        if found is None:
            found = self._senders[name] = self._sender(name)
        return found

    def _wait_for_room(self, size: int, wait: bool) -> None:
        end: Deadline | None = None
        while not self._closed and self._held and self._held + size > self.limits.buffer_bytes:
            end = end or Deadline.after(self.limits.deadline if wait else 0.0)
            if end.expired():
                raise BufferFull(
                    f"the producer holds {self._held} bytes that the log has not taken, of {self.limits.buffer_bytes}"
                    f" allowed; these {size} were not taken: append them again later"
                )
            self._wait(end)
        if self._closed:
            raise Closed("this appender is closed: make a new one")

    def _wait(self, end: Deadline) -> None:
        self._waiters += 1
        try:
            end.wait(self._changed)
        finally:
            self._waiters -= 1
