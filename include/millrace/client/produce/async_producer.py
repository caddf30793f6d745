"""A producer for asyncio: awaited appends without a thread per call.

    async with AsyncProducer(db.new_producer()) as producer:
        written = await producer.insert(users, rows)

Appends are batched as in :class:`~millrace.client.produce.batch_appender.BatchAppender`, so many tasks share messages.
The calls of one task keep their order; tasks that wait for room proceed in the order of their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from millrace.base.closeable import AsyncCloseable
from millrace.base.errors import BufferFull, InvalidArgument
from millrace.catalog.collection import CollectionInfo
from millrace.client.produce.batch_appender import BatchLimits
from millrace.client.produce.producer import Producer, is_outdated
from millrace.client.produce.rows import Keys, Rows
from millrace.client.produce.written import Written


class AsyncProducer(AsyncCloseable):
    """Awaitable appends of `producer`. The caller closes `producer`. Use it from one event loop."""

    def __init__(self, producer: Producer, *, limits: BatchLimits | None = None) -> None:
        self.producer = producer
        self._batch = producer.batch(limits=limits)
        self._order = asyncio.Lock()

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
        return await self._by_definition(
            collection,
            lambda definition: self._batch.insert(
                definition, rows, partition=partition, partition_by=partition_by, wait=False
            ),
            rows if evolve else None,
        )

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
        return await self._by_definition(
            collection,
            lambda definition: self._batch.upsert(
                definition, rows, partition=partition, partition_by=partition_by, wait=False
            ),
            rows if evolve else None,
        )

    async def delete(self, collection: CollectionInfo | str, keys: Keys, *, partition: str | None = None) -> Written:
        """Delete by primary key."""
        return await self._by_definition(
            collection, lambda definition: self._batch.delete(definition, keys, partition=partition, wait=False)
        )

    async def close(self) -> None:
        """Wait until every append is decided. Uses a thread. Raises DeadlineExceeded."""
        await asyncio.to_thread(self._batch.close)

    async def _by_definition(
        self,
        collection: CollectionInfo | str,
        take: Callable[[CollectionInfo], Future[Written]],
        evolving: Rows | None = None,
    ) -> Written:
        """Append by a definition, as :meth:`Producer._by_definition` does. The catalog is asked in a thread."""
        if evolving is not None:
            definition = await asyncio.to_thread(self.producer.evolved, collection, evolving)
        else:
            cached = self.producer.cached(collection)
            definition = await asyncio.to_thread(self.producer.known, collection) if cached is None else cached
        try:
            written = await self._settled(partial(take, definition))
            if not isinstance(collection, str) or not is_outdated(written):
                return written.checked()
        except InvalidArgument:
            newer = await self._renewed(collection, definition)
            if newer is None:
                raise
        else:
            newer = await self._renewed(collection, definition)
            if newer is None:
                return written.checked()
        return (await self._settled(partial(take, newer))).checked()

    async def _renewed(self, collection: CollectionInfo | str, definition: CollectionInfo) -> CollectionInfo | None:
        return await asyncio.to_thread(self.producer.renewed, definition) if isinstance(collection, str) else None

    async def _settled(self, take: Callable[[], Future[Written]]) -> Written:
        return await asyncio.wrap_future(await self._taken(take))

    async def _taken(self, take: Callable[[], Future[Written]]) -> Future[Written]:
        """Start an append once there is room, in the order of the calls."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._batch.limits.deadline
        async with self._order:
            while True:
                try:
                    return take()
                except BufferFull:
                    if loop.time() >= end:
                        raise
                room = loop.create_future()
                self._batch.on_capacity(partial(_wake, loop, room))
                try:
                    await asyncio.wait_for(room, timeout=max(0.001, end - loop.time()))
                except TimeoutError:
                    pass  # try once more, which raises BufferFull


def _wake(loop: asyncio.AbstractEventLoop, room: asyncio.Future[None]) -> None:
    loop.call_soon_threadsafe(_set, room)


def _set(room: asyncio.Future[None]) -> None:
    if not room.done():
        room.set_result(None)
