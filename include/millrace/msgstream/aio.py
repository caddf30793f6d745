"""Message streams for asyncio: the same streams, with their calls in a thread.

    async with AsyncMsgStream(factory.new_tt_msg_stream()) as stream:
        stream.stream.as_consumer(["c"], "group")
        async for pack in stream: ...

A consume that was cancelled loses nothing: the pack that it would have had is what the next consume gives.
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
    """A MsgStream whose produce, broadcast, consume, ack and seek are coroutines. Set ``stream`` up before it is entered.

    One thread consumes, one produces: calls of one kind run one after another, in the order in which they were made.
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
        """See MsgStream.produce. Cancelling does not take back what was sent."""
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
            # What a cancelled call left behind is the next pack: it is waited for first, under its own deadline.
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
        """See MsgStream.seek. A pack that a cancelled consume left behind is given up."""
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
        """End the stream and its threads. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self.stream.close)
        self._consuming.shutdown(wait=False)
        self._producing.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        self.stream.start()
        return self

    @staticmethod
    async def _run(pool: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool, call)
