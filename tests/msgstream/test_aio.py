"""Streams under asyncio: the same packs, and nothing lost to a cancelled wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from millrace.base.errors import DeadlineExceeded, StreamClosed
from millrace.log.protocol import LogService
from millrace.msgstream.aio import AsyncMsgStream
from millrace.msgstream.messages import TimeTickMsg
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.stream import LogMsgStream
from millrace.msgstream.tick_stream import LogTtMsgStream
from tests.msgstream.messages import ids, message

Make = Callable[[int], list[str]]
SETTINGS = StreamSettings(timeout=20.0)


def plain(service: LogService, names: list[str]) -> AsyncMsgStream:
    stream = LogMsgStream(service, settings=SETTINGS)
    stream.as_producer(names)
    stream.as_consumer(names, "g")
    return AsyncMsgStream(stream)


def test_a_producer_and_a_consumer_run_side_by_side(service: LogService, channels: Make) -> None:
    names = channels(2)

    async def main() -> list[int]:
        ticking = LogTtMsgStream(service, settings=SETTINGS)
        ticking.as_producer(names)
        ticking.as_consumer(names, "g")
        async with AsyncMsgStream(ticking) as stream:

            async def produce() -> None:
                for number in range(1, 11):
                    await stream.produce(MsgPack(msgs=[message(number, number, key=number)]))
                    await stream.broadcast(MsgPack(msgs=[TimeTickMsg(begin_ts=number)]))

            producing = asyncio.create_task(produce())
            packs = []
            async for pack in stream:
                packs.append(pack)
                await stream.ack(pack)
                if pack.end_ts == 10:
                    break
            await producing
            await stream.seek(packs[3].start_positions)
            assert await stream.consume() == packs[3]
            return ids(packs)

    assert asyncio.run(main()) == list(range(1, 11))


def test_the_pack_of_a_cancelled_consume_is_the_next_ones(service: LogService, channels: Make) -> None:
    names = channels(1)

    async def main() -> list[int]:
        async with plain(service, names) as stream:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.consume(), 0.05)
            await stream.produce(MsgPack(msgs=[message(1, 1)]))
            first = await stream.consume()
            await stream.produce(MsgPack(msgs=[message(1, 2)]))
            return ids([first, await stream.consume()])

    assert asyncio.run(main()) == [1, 2]


def test_a_wait_has_its_deadline_and_ends_with_the_stream(service: LogService, channels: Make) -> None:
    names = channels(1)

    async def main() -> None:
        stream = plain(service, names)
        async with stream:
            with pytest.raises(DeadlineExceeded):
                await stream.consume(timeout=0.02)
            assert [pack async for pack in stream.chan(idle_timeout=0.02)] == []
            waiting = asyncio.create_task(stream.consume())
            await asyncio.sleep(0)
        with pytest.raises(StreamClosed):
            await waiting

    asyncio.run(main())
