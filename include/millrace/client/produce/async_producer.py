"""A producer for asyncio: awaited appends without a thread per call.

    async with AsyncProducer(db.new_producer()) as producer:
        written = await producer.insert(users, rows)

A call is sent at once if nothing is in flight; the calls that tasks make meanwhile share the next message. The calls of
one task keep their order; tasks that wait for room proceed in the order of their calls. Nothing here blocks the event
loop: a name that is not known yet is looked up in a thread, and rows that take a while to convert are converted in one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

import pyarrow as pa

from millrace.base.closeable import AsyncCloseable
from millrace.base.errors import BufferFull, InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.batch_appender import BatchAppender, BatchLimits, BufferedCall
from millrace.client.produce.channel_queue import Call, CallSplitter, Piece
from millrace.client.produce.plain_rows import FEW_ROWS
from millrace.client.produce.producer import Producer
from millrace.client.produce.rows import Keys, Rows
from millrace.client.produce.written import Written
from millrace.message.types import MessageType

_Split: TypeAlias = Callable[[Call, CollectionInfo], list[Piece]]
"""Splits the rows or keys of a call by a definition."""

_LIGHT_ROWS: Final = 1_000
"""Arrow rows up to this number are split in the event loop."""


class _Mailbox:
    """Calls that have ended, for the tasks of one event loop: one wake-up for all that end together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ended: deque[_TaskCall] = deque()
        self._called = False

    def put(self, call: _TaskCall) -> None:
        """Add a call that has ended, from any thread; `wake` follows."""
        self._ended.append(call)

    def wake(self) -> None:
        """Have the loop empty this box."""
        if not self._called:
            self._called = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                pass  # the loop is closed, and its tasks with it

    def _deliver(self) -> None:
        self._called = False  # before the last look: a later call wakes the loop again
        while self._ended:
            call = self._ended.popleft()
            if not call.future.done():  # its task may have been cancelled
                call.future.set_result(None)


class _TaskCall(BufferedCall):
    """A call that a task awaits."""

    def __init__(self, holder: BatchAppender, mailbox: _Mailbox) -> None:
        super().__init__()
        self.holder = holder
        self.mailbox = mailbox
        self.future: asyncio.Future[None] = mailbox.loop.create_future()

    def finish(self) -> Callable[[], None]:
        super().finish()
        self.mailbox.put(self)
        return self.mailbox.wake


class AsyncProducer(AsyncCloseable):
    """Awaitable appends of `producer`. The caller closes `producer`. Use it from one event loop.

    `limits` bound what is held; their `delay` (default: none) is the time that a call waits for others.
    """

    def __init__(self, producer: Producer, *, limits: BatchLimits | None = None) -> None:
        self.producer = producer
        self._batch = producer.batch(limits=limits or BatchLimits(delay=0.0))
        self._splitter = CallSplitter()
        self._order = asyncio.Lock()
        self._mailbox: _Mailbox | None = None

    async def insert(
        self,
        collection: CollectionInfo | str,
        rows: Rows,
        *,
        partition: str | None = None,
        partition_by: str | None = None,
        evolve: bool = False,
    ) -> Written:
        """Append rows; they are durable and decided when the await ends.

        With `evolve`, the schema is changed first, in a thread, if the newest known one does not fit the rows.

        Raises the errors of :meth:`Producer.insert`, and BufferFull.
        """
        return await self._rows(MessageType.INSERT, collection, rows, partition, partition_by, evolve)

    async def upsert(
        self,
        collection: CollectionInfo | str,
        rows: Rows,
        *,
        partition: str | None = None,
        partition_by: str | None = None,
        evolve: bool = False,
    ) -> Written:
        """Replace the rows of these keys and insert new ones, as :meth:`BatchAppender.upsert` does."""
        return await self._rows(MessageType.UPSERT, collection, rows, partition, partition_by, evolve)

    async def delete(self, collection: CollectionInfo | str, keys: Keys, *, partition: str | None = None) -> Written:
        """Delete by primary key."""
        return await self._by_definition(
            collection, keys, lambda call, chosen: self._splitter.keys(call, chosen, keys, partition)
        )

    async def close(self) -> None:
        """Wait until every append is decided. Uses a thread. Raises DeadlineExceeded."""
        await asyncio.to_thread(self._batch.close)

    async def _rows(
        self,
        kind: MessageType,
        collection: CollectionInfo | str,
        rows: Rows,
        partition: str | None,
        partition_by: str | None,
        evolve: bool,
    ) -> Written:
        return await self._by_definition(
            collection,
            rows,
            lambda call, chosen: self._splitter.rows(call, kind, chosen, rows, partition, partition_by),
            evolve=evolve,
        )

    async def _by_definition(
        self, collection: CollectionInfo | str, given: Rows | Keys, split: _Split, *, evolve: bool = False
    ) -> Written:
        """Append by a definition, as :meth:`Producer._by_definition` does. The catalog is asked in a thread."""
        if evolve:
            definition = await asyncio.to_thread(self.producer.evolved, collection, given)
        else:
            cached = self.producer.cached(collection)
            definition = await asyncio.to_thread(self.producer.known, collection) if cached is None else cached
        if not isinstance(collection, str):
            return (await self._appended(definition, given, split)).checked()
        try:
            written = await self._appended(definition, given, split)
        except InvalidArgument:
            newer = await asyncio.to_thread(self.producer.renewed, definition)
            if newer is None:
                raise
        else:
            if not written.rejections:
                return written
            newer = await asyncio.to_thread(self.producer.renewed_after, written, definition)
            if newer is None:
                return written.checked()
        return (await self._appended(newer, given, split)).checked()

    async def _appended(self, definition: CollectionInfo, given: Rows | Keys, split: _Split) -> Written:
        """Split and queue a call once there is room, in the order of the calls, and wait for its outcome."""
        call = _TaskCall(self._batch, self._box())
        if _is_light(given):
            pieces = split(call, definition)
        else:
            pieces = await asyncio.to_thread(split, call, definition)
        if self._order.locked() or not self._took(call, pieces):
            await self._wait_for_room(call, pieces)
        await call.future
        return call.result()

    def _box(self) -> _Mailbox:
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        return self._mailbox

    def _took(self, call: _TaskCall, pieces: list[Piece]) -> bool:
        try:
            self._batch.take(call, pieces, wait=False)
        except BufferFull:
            return False
        return True

    async def _wait_for_room(self, call: _TaskCall, pieces: list[Piece]) -> None:
        loop = call.mailbox.loop
        end = loop.time() + self._batch.limits.deadline
        async with self._order:
            while not self._took(call, pieces):
                room = loop.create_future()
                self._batch.on_capacity(partial(_wake, loop, room))
                try:
                    await asyncio.wait_for(room, timeout=max(0.001, end - loop.time()))
                except TimeoutError:
                    self._batch.take(call, pieces, wait=False)  # raises BufferFull
                    return


def _is_light(given: Any) -> bool:
    """Return whether rows or keys are converted in a moment, so that the event loop does it."""
    if isinstance(given, pa.Table | pa.RecordBatch):
        return given.num_rows <= _LIGHT_ROWS
    return isinstance(given, list | tuple) and len(given) <= FEW_ROWS


def _wake(loop: asyncio.AbstractEventLoop, room: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and its tasks with it
        loop.call_soon_threadsafe(_set, room)


def _set(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
