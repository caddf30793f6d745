"""Message streams for asyncio: the same streams, with their calls in threads.

    async with AsyncMsgStream(factory.new_tt_msg_stream()) as stream:
        stream.stream.as_consumer(["c"], "group")
        async for pack in stream: ...

A cancelled consume loses nothing: the next consume returns its pack.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

from millrace.base.closeable import AsyncCloseable
from millrace.base.errors import DeadlineExceeded, StreamClosed
from millrace.message.ids import LogId
from millrace.msgstream.pack import MsgPack, MsgPosition
from millrace.msgstream.protocol import MsgStream

_T = TypeVar("_T")


class AsyncMsgStream(AsyncCloseable):
    """A MsgStream with coroutines for produce, broadcast, consume, ack and seek. Configure ``stream`` before you enter
    it.

    One thread consumes and one produces. Calls of one kind run in order, one after another.
    """

    def __init__(self, stream: MsgStream) -> None:
        self.stream = stream
        self._consuming = ThreadPoolExecutor(1, thread_name_prefix="msgstream-consume")
        self._producing = ThreadPoolExecutor(1, thread_name_prefix="msgstream-produce")
        self._coming: Future[MsgPack] | None = None
        self._turn = asyncio.Lock()

    async def produce(
        self, pack: MsgPack, *, timeout: float | None = None, trace_ctx: Mapping[str, str] | None = None
    ) -> dict[str, Sequence[LogId]]:
        """See MsgStream.produce. Cancellation does not undo an append."""
        return await self._run(
            self._producing, partial(self.stream.produce, pack, timeout=timeout, trace_ctx=trace_ctx)
        )

    async def broadcast(
        self, pack: MsgPack, *, timeout: float | None = None, trace_ctx: Mapping[str, str] | None = None
    ) -> dict[str, Sequence[LogId]]:
        """See MsgStream.broadcast."""
        return await self._run(
            self._producing, partial(self.stream.broadcast, pack, timeout=timeout, trace_ctx=trace_ctx)
        )

    async def consume(self, *, timeout: float | None = None) -> MsgPack:
        """See MsgStream.consume."""
        async with self._turn:
            # The pack of a cancelled call comes next: wait for it first, under its own deadline.
            if self._coming is None:
                self._coming = self._consuming.submit(partial(self.stream.consume, timeout=timeout))
            try:
                pack = await asyncio.shield(asyncio.wrap_future(self._coming))
            except asyncio.CancelledError:
                raise
            except BaseException:
                self._coming = None
                raise
            self._coming = None
            return pack

    async def ack(self, pack: MsgPack) -> None:
        """See MsgStream.ack."""
        await self._run(self._producing, partial(self.stream.ack, pack))

    async def seek(self, offset: MsgPosition | Sequence[MsgPosition]) -> None:
        """See MsgStream.seek. Discards the pack of a cancelled consume."""
        await self._run(self._consuming, partial(self.stream.seek, offset))
        self._coming = None

    async def chan(self, *, idle_timeout: float | None = None) -> AsyncIterator[MsgPack]:
        """See MsgStream.chan."""
        while True:
            try:
                pack = await self.consume(timeout=idle_timeout)
            except DeadlineExceeded:
                if idle_timeout is not None:
                    return
                continue
            except StreamClosed:
                return
            yield pack

    def __aiter__(self) -> AsyncIterator[MsgPack]:
        return self.chan()

    async def close(self) -> None:
        """Close the stream and its threads. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self.stream.close)
        self._consuming.shutdown(wait=False)
        self._producing.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        self.stream.start()
        return self

    @staticmethod
    async def _run(pool: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call)
