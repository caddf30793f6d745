"""Streams in memory: the streams of every log, on objects that are handed over.

Bounded, and gone with their process.
"""

from __future__ import annotations

import threading

import pytest

from millrace.base.errors import BufferFull, DeadlineExceeded, InvalidArgument, LogUnavailable, PositionTruncated
from millrace.message.ids import LogId
from millrace.msgstream.channels import CreateChannelRequest, OwnerDescription
from millrace.msgstream.factory import MemMsgStreamFactory
from millrace.msgstream.memory import MemoryLogService
from millrace.msgstream.messages import GenericMsg, TimeTickMsg
from millrace.msgstream.pack import MsgPack
from tests.msgstream.messages import consumed, ids, message


def channels(factory: MemMsgStreamFactory, count: int) -> list[str]:
    return factory.channels.create_channels(CreateChannelRequest(OwnerDescription("proxy"), count)).channel_names


def test_a_consumer_gets_the_object_that_was_produced_and_a_position_of_its_own() -> None:
    with MemMsgStreamFactory() as factory, factory.new_tt_msg_stream() as stream, factory.new_msg_stream() as plain:
        names = channels(factory, 2)
        stream.as_producer(names)
        stream.as_consumer(names, "g")
        plain.as_consumer(names)
        payload = bytes(1000)
        sent = GenericMsg(id=1, begin_ts=5, hash_keys=(1,), msg_type=message(1).type, payload=payload)
        stream.produce(MsgPack(msgs=[sent, message(4, 4, key=2)]))
        stream.broadcast(MsgPack(msgs=[TimeTickMsg(begin_ts=10)]))
        [pack] = consumed(stream, 1)
        assert ids([pack]) == [4, 1]
        got = pack.msgs[1]
        assert got.payload is payload, "nothing was marshalled"
        assert sent.position is None
        assert got.position is not None
        seen: list[tuple[int, str]] = []
        while len(seen) < 4:
            for each in plain.consume(timeout=5.0).msgs:
                assert each.position is not None
                seen.append((each.end_ts, each.position.channel_name))
        assert sorted(each for each in seen if each[0] == 10) == [(10, name) for name in sorted(names)], "each its own"


def test_groups_and_seeks_work_as_on_every_log() -> None:
    with MemMsgStreamFactory() as factory:
        [name] = channels(factory, 1)
        with factory.new_tt_msg_stream() as stream:
            stream.as_producer([name])
            stream.as_consumer([name], "g")
            for tick in (10, 20, 30):
                stream.produce(MsgPack(msgs=[message(tick - 1, tick, key=1), TimeTickMsg(begin_ts=tick)]))
            first, second, _ = consumed(stream, 3)
            stream.seek(second.start_positions)
            assert stream.consume() == second
            stream.seek(first.start_positions)
            assert stream.consume() == first
            stream.ack(second)
        with factory.new_tt_msg_stream() as again:
            again.as_consumer([name], "g")
            assert ids(consumed(again, 1)) == [30]
            with pytest.raises(DeadlineExceeded):
                again.consume(timeout=0.01)


def test_a_consumer_that_waits_is_woken_by_what_is_produced() -> None:
    with MemMsgStreamFactory() as factory, factory.new_msg_stream() as stream, factory.new_msg_stream() as other:
        [name] = channels(factory, 1)
        stream.as_consumer([name])
        other.as_producer([name])
        sending = threading.Thread(target=lambda: other.produce(MsgPack(msgs=[message(1, 7, key=1)])))
        sending.start()
        assert ids([stream.consume(timeout=10.0)]) == [7]
        sending.join()


def test_a_channel_is_bounded_and_what_is_trimmed_or_refused_is_let_go() -> None:
    with MemMsgStreamFactory(max_messages=4) as factory, factory.new_msg_stream() as stream:
        names = channels(factory, 2)
        service = factory.service
        assert isinstance(service, MemoryLogService)
        stream.as_producer(names)
        stream.broadcast(MsgPack(msgs=[message(1, each) for each in range(4)]))
        assert len(service.message_table) == 4
        with pytest.raises(BufferFull, match="trim what its groups are done with"):
            stream.produce(MsgPack(msgs=[message(9, 9, key=0)]))
        assert len(service.message_table) == 4, "what was refused is not kept"
        stream.as_consumer(names, "g")
        while stream.consume(timeout=5.0).end_positions[1].log_id != LogId(0, 4):
            pass
        service.open(names[0]).truncate(LogId(0, 4))
        assert len(service.message_table) == 4, "the other channel has them still"
        service.open(names[1]).truncate(LogId(0, 2))
        assert len(service.message_table) == 2
        with pytest.raises(PositionTruncated) as caught:
            service.open(names[1]).read(LogId(0, 1))
        assert caught.value.earliest == (0, 2)
        with pytest.raises(InvalidArgument):
            service.open(names[1]).truncate(LogId(0, 9))
        service.drop(names[1])
        assert len(service.message_table) == 0
        stream.produce(MsgPack(msgs=[message(9, 9, key=0)]))


def test_what_no_stream_in_memory_produced_is_refused_and_not_lost_in_silence() -> None:
    with MemMsgStreamFactory() as factory, factory.new_msg_stream() as stream:
        [name] = channels(factory, 1)
        factory.service.open(name).append([message(1).marshal()])
        stream.as_consumer([name])
        [refused] = stream.consume(timeout=5.0).refused
        assert refused.reason == "malformed"
    with pytest.raises(LogUnavailable, match="were closed"):
        factory.service.open(name)
