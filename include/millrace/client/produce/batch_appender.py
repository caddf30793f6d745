"""Appends batched by size and time: many small calls become few large messages, and each call has a future.

    with producer.batch() as batch:
        future = batch.insert(users, rows)
        ...
        print(future.result().last_tick)

Rows of one VChannel keep the order of the calls. Consecutive calls for the same partition share a message and its
result. The appender holds at most `buffer_bytes` of rows; a call beyond that waits, and raises BufferFull if there is
no room in time. A future's result is a Written, which includes the rejections of its rows. A future fails with
AppendUnresolved if the outcome is unknown. Rows that were not sent yet wait for the log.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    AppendUnresolved,
    BufferFull,
    Closed,
    DeadlineExceeded,
    LogUnavailable,
    SpoolFull,
)
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.batch_queue import (
    ChannelQueue,
    EntryContents,
    PendingCall,
    Piece,
    take_entry,
    to_outbound_entry,
)
from millrace.client.produce.lane import Lane
from millrace.client.produce.rows import (
    ENTRY_BYTES,
    Keys,
    Rows,
    conform,
    key_rows,
    last_of_each_key,
    partition_id,
    split_keys,
    split_rows,
)
from millrace.client.produce.sequencer import OutboundEntry
from millrace.client.produce.written import Written
from millrace.message.ids import pchannel_of
from millrace.message.types import MessageType

_IDLE: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """When a batch is sent, and how much may be held.

    A PChannel's batch is sent at `bytes` of rows or `count` calls, or `delay` seconds after its first row.
    """

    bytes: int = 1 << 20
    count: int = 0
    """Calls' shares of a PChannel that complete a batch; 0: only bytes and delay count."""
    delay: float = 0.005
    buffer_bytes: int = 64 << 20
    deadline: float = 30.0
    """Seconds that a call waits for room, and `close` for what is held."""


class Deliverer(Protocol):
    """Sends in place of a lane: a spool."""

    def deliver(
        self, pchannel: str, source: Callable[[], OutboundEntry | None], *, size: Callable[[], int] | None = None
    ) -> None: ...

    def contended(self, pchannel: str) -> bool: ...


class BatchAppender(Closeable):
    """Batches appends of one producer; made by :meth:`Producer.batch`. Thread-safe; one thread per PChannel sends."""

    def __init__(
        self,
        lane: Callable[[str], Lane],
        settings: Settings,
        *,
        known: Callable[[CollectionInfo | str], CollectionInfo],
        evolved: Callable[[CollectionInfo, Rows], CollectionInfo],
        limits: BatchLimits | None = None,
        spool: Deliverer | None = None,
    ) -> None:
        self.limits = limits or BatchLimits()
        self._lane = lane
        self._known = known
        self._evolved = evolved
        self._spool = spool
        self._retry_delay = settings.append_retry_delay
        self._changed = threading.Condition()
        self._queues: dict[str, ChannelQueue] = {}
        self._threads: list[threading.Thread] = []
        self._room: deque[Callable[[], None]] = deque()
        self._held = 0
        self._flushing = 0
        self._closed = False
        self._given_up = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def held_bytes(self) -> int:
        """Bytes of rows that are not settled yet."""
        return self._held

    def insert(
        self,
        collection: CollectionInfo | str,
        rows: Rows,
        *,
        partition: str | None = None,
        partition_by: str | None = None,
        wait: bool = True,
        evolve: bool = False,
    ) -> Future[Written]:
        """Buffer rows to append (see :meth:`Producer.insert`); wait while the buffer is full, unless `wait` is False.

        With `evolve`, the schema is changed first, in this call, if the newest known one does not fit the rows; rows
        that are buffered already keep theirs.

        Raises BufferFull (nothing was buffered), InvalidArgument, Closed.
        """
        collection = self._known(collection)
        if evolve:
            collection = self._evolved(collection, rows)
        return self._rows(MessageType.INSERT, collection, conform(rows, collection), partition, partition_by, wait)

    def upsert(
        self,
        collection: CollectionInfo | str,
        rows: Rows,
        *,
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
        collection = self._known(collection)
        if evolve:
            collection = self._evolved(collection, rows)
        table = last_of_each_key(conform(rows, collection), collection.schema.key_names)
        return self._rows(MessageType.UPSERT, collection, table, partition, partition_by, wait)

    def _rows(
        self,
        kind: MessageType,
        collection: CollectionInfo,
        table: pa.Table,
        partition: str | None,
        partition_by: str | None,
        wait: bool,
    ) -> Future[Written]:
        shares = split_rows(table, collection, partition, partition_by)
        version = collection.schema_version
        return self._take(
            collection,
            [((vchannel, collection.id, number, version, kind), part) for vchannel, number, part in shares],
            wait,
        )

    def delete(
        self, collection: CollectionInfo | str, keys: Keys, *, partition: str | None = None, wait: bool = True
    ) -> Future[Written]:
        """Buffer primary keys to delete. Raises the errors of `insert`."""
        collection = self._known(collection)
        found = key_rows(keys, collection)
        number = 0 if partition is None else partition_id(collection, partition)
        shares = split_keys(found, collection)
        version = collection.schema_version
        return self._take(
            collection,
            [((vchannel, collection.id, number, version, MessageType.DELETE), part) for vchannel, part in shares],
            wait,
        )

    def flush(self, *, deadline: float | None = None) -> None:
        """Send everything held and wait until it is settled. Raises DeadlineExceeded; sending continues."""
        end = Deadline.after(self.limits.deadline if deadline is None else deadline)
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            try:
                while any(queue.pieces or queue.busy for queue in self._queues.values()):
                    if end.expired():
                        raise DeadlineExceeded(f"{self._held} bytes are not settled yet: they are still being sent")
                    end.wait(self._changed, maximum=_IDLE)
            finally:
                self._flushing -= 1

    def close(self, *, deadline: float | None = None) -> None:
        """Flush and stop. Idempotent.

        What cannot be sent in time fails with LogUnavailable and is not in the log. Raises DeadlineExceeded if anything
        was given up.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
        try:
            self.flush(deadline=deadline)
        finally:
            with self._changed:
                self._given_up = True
            for queue in list(self._queues.values()):
                self._drop(queue, LogUnavailable("the appender was closed before this was sent: it is not in the log"))

    def on_capacity(self, call: Callable[[], None]) -> None:
        """Call `call` once, from any thread, when there may be room again: for callers that must not block."""
        with self._changed:
            if self._held:
                self._room.append(call)
                return
        call()

    # --- buffering ----------------------------------------------------------------------------------------------------

    def _take(
        self,
        collection: CollectionInfo,
        shares: list[tuple[tuple[str, int, int, int, MessageType], pa.RecordBatch | pa.Array]],
        wait: bool,
    ) -> Future[Written]:
        ticket = PendingCall()
        sizes = [rows.nbytes for _, rows in shares]
        size = sum(sizes)
        with self._changed:
            self._wait_for_room(size, wait)
            ticket.expect(len(shares))
            self._held += size
            now = time.monotonic()
            news = False
            for (key, rows), own in zip(shares, sizes, strict=True):
                queue = self._queue(pchannel_of(key[0]))
                news |= not queue.pieces
                queue.pieces.append(Piece(key, collection, rows, own, ticket, now))
                queue.bytes += own
                news |= self._full(queue)
            if news:  # a sender that already waits for the delay is not woken by each call
                self._changed.notify_all()
        return ticket.future

    def _wait_for_room(self, size: int, wait: bool) -> None:
        end: Deadline | None = None
        while not self._closed and self._held and self._held + size > self.limits.buffer_bytes:
            end = end or Deadline.after(self.limits.deadline if wait else 0.0)
            if end.expired():
                raise BufferFull(
                    f"the producer holds {self._held} bytes that the log has not taken, of {self.limits.buffer_bytes}"
                    f" allowed; these {size} were not taken: append them again later"
                )
            end.wait(self._changed, maximum=_IDLE)
        if self._closed:
            raise Closed("this appender is closed: make a new one")

    def _full(self, queue: ChannelQueue) -> bool:
        """Return whether the queue holds a batch."""
        return queue.bytes >= self.limits.bytes or 0 < self.limits.count <= len(queue.pieces)

    def _queue(self, pchannel: str) -> ChannelQueue:
        queue = self._queues.get(pchannel)
        if queue is None:
            queue = self._queues[pchannel] = ChannelQueue()
            thread = threading.Thread(target=self._run, args=(pchannel, queue), name=f"batch-{pchannel}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return queue

    # --- sending ------------------------------------------------------------------------------------------------------

    def _run(self, pchannel: str, queue: ChannelQueue) -> None:
        lane = self._lane(pchannel)
        while self._wait_until_ripe(queue):
            try:
                if self._spool is not None:
                    self._spool.deliver(
                        pchannel,
                        lambda: self._next(queue, self._spool_contended(pchannel)),
                        size=lambda: min(queue.bytes, ENTRY_BYTES),
                    )
                else:
                    lane.deliver(lambda: self._next(queue, lane.lock.contended))
            except SpoolFull:
                self._pause()  # the pieces keep waiting, and the buffer fills up
            except AppendUnresolved as error:
                for sending in lane.unresolved:
                    self._give_up(sending, error)
            except Exception as error:  # even a bug: no future may wait forever
                for sending in lane.unresolved:
                    self._give_up(sending, error)
                self._drop(queue, error)
            with self._changed:
                queue.busy = False
                self._changed.notify_all()

    def _pause(self) -> None:
        end = Deadline.after(jittered(self._retry_delay))
        with self._changed:
            while not self._given_up and not end.expired():
                end.wait(self._changed)

    def _spool_contended(self, pchannel: str) -> bool:
        return self._spool is not None and self._spool.contended(pchannel)

    def _wait_until_ripe(self, queue: ChannelQueue) -> bool:
        """Wait for a batch to send; False if there will be none."""
        with self._changed:
            while True:
                if self._given_up:
                    return False
                if queue.pieces:
                    left = queue.pieces[0].enqueued_at + self.limits.delay - time.monotonic()
                    if left <= 0 or self._full(queue) or self._flushing or self._closed:
                        queue.busy = True
                        return True
                    self._changed.wait(left)
                else:
                    self._changed.wait(_IDLE)

    def _next(self, queue: ChannelQueue, contended: bool) -> OutboundEntry | None:
        """Return the next entry, or None if nothing waits or another caller should get the lane first."""
        if contended and not self._given_up:
            return None
        with self._changed:
            taken = take_entry(queue)
        if not taken:
            return None
        try:
            return to_outbound_entry(taken, self._release)
        except Exception as error:
            EntryContents(taken, self._release).fail(error)
            raise

    def _release(self, size: int) -> None:
        with self._changed:
            self._held -= size
            calls = list(self._room)
            self._room.clear()
            self._changed.notify_all()
        for call in calls:
            call()

    def _give_up(self, sending: OutboundEntry, error: Exception) -> None:
        """Fail the futures of what stays in the lane, which resends it later without them."""
        carried = sending.context
        if isinstance(carried, EntryContents):
            carried.fail(error)

    def _drop(self, queue: ChannelQueue, error: Exception) -> None:
        """Drop a queue's contents: fail its futures and free its room."""
        with self._changed:
            dropped = list(queue.pieces)
            queue.pieces.clear()
            queue.bytes = 0
        for piece in dropped:
            piece.ticket.fail(error)
        self._release(sum(piece.bytes for piece in dropped))


class CollectionBatch(Closeable):
    """A batch appender of one collection. Thread-safe; made by :meth:`millrace.client.collection.Collection.batch`."""

    def __init__(self, definition: CollectionInfo, appender: BatchAppender) -> None:
        self._definition = definition
        self._appender = appender

    def insert(self, rows: Rows, **where: Any) -> Any:
        """Buffer rows to append and return a future of :class:`Written`. Raises BufferFull, InvalidArgument."""
        return self._appender.insert(self._definition, rows, **where)

    def upsert(self, rows: Rows, **where: Any) -> Any:
        """Buffer rows to upsert; see `insert`."""
        return self._appender.upsert(self._definition, rows, **where)

    def delete(self, keys: Keys, **where: Any) -> Any:
        """Buffer keys to delete; see `insert`."""
        return self._appender.delete(self._definition, keys, **where)

    def flush(self) -> None:
        """Send everything held and wait until it is settled. Raises DeadlineExceeded."""
        self._appender.flush()

    def close(self) -> None:
        """Flush and stop. Raises DeadlineExceeded if anything was given up."""
        self._appender.close()
