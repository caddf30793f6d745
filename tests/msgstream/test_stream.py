"""The plain stream: what is produced comes, channel by channel in order, and positions lead back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from millrace.base.errors import ChannelNotFound, DeadlineExceeded, EntryTooLarge, InvalidArgument, StreamClosed
from millrace.log.protocol import LogService
from millrace.message.types import MessageType
from millrace.msgstream.messages import GenericMsg, TimeTickMsg
from millrace.msgstream.pack import MsgPack, MsgPosition, common_trace_ctx
from millrace.msgstream.protocol import TsMsg
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.stream import LogMsgStream
from tests.conformance.backends import MAX_ENTRY_BYTES
from tests.msgstream.messages import append, ids, message

Make = Callable[[int], list[str]]
DEADLINE = 20.0


def opened(service: LogService, names: list[str], **settings: object) -> LogMsgStream:
    stream = LogMsgStream(service, settings=StreamSettings(timeout=DEADLINE).with_(settings))
    stream.as_producer(names)
    stream.as_consumer(names)
    stream.start()
    return stream


def test_what_is_produced_is_consumed_with_its_trace_and_its_position(service: LogService, channels: Make) -> None:
    names = channels(2)
    with opened(service, names) as stream:
        own = message(1, 1, key=0)
        own.trace_ctx = {"traceparent": "own"}
        produced = stream.produce(
            MsgPack(msgs=[own, message(2, 2, key=1), TimeTickMsg(begin_ts=3, hash_keys=(0,))]),
            trace_ctx={"traceparent": "given"},
        )
        pack = stream.consume()
    assert [msg.type for msg in pack.msgs] == [MessageType.SEARCH, MessageType.TIME_TICK, MessageType.SEARCH]
    assert [msg.trace_ctx["traceparent"] for msg in pack.msgs] == ["own", "given", "given"]
    assert [msg.position.log_id for msg in pack.msgs if msg.position] == produced[names[0]] + produced[names[1]]
    assert (pack.begin_ts, pack.end_ts) == (1, 3)


def test_a_pack_has_a_trace_of_its_own(service: LogService, channels: Make) -> None:
    mine, own = {"traceparent": "pack", "tracestate": "a"}, {"traceparent": "own", "tracestate": "a"}
    sent = [message(1, 1), message(1, 2), message(1, 3)]
    sent[1].trace_ctx = own
    with opened(service, channels(1)) as stream:
        stream.produce(MsgPack(msgs=list(sent), trace_ctx=mine), trace_ctx={"traceparent": "the call's"})
        found: list[TsMsg] = []
        while len(found) < 3:
            pack = stream.consume()
            assert pack.trace_ctx == common_trace_ctx(pack.msgs)
            found += pack.msgs
    assert [msg.trace_ctx for msg in found] == [mine, own, mine]
    assert common_trace_ctx(found) == {"tracestate": "a"}, "what all have"
    assert common_trace_ctx([found[0], found[2]]) == mine
    assert common_trace_ctx([found[0], message(1, 4)]) == common_trace_ctx([message(1, 4), found[0]]) == {}
    assert common_trace_ctx([]) == {}


def test_a_broadcast_reaches_every_channel(service: LogService, channels: Make) -> None:
    names = channels(3)
    with opened(service, names) as stream:
        assert list(stream.broadcast(MsgPack(msgs=[message(1, 1), message(2, 2)]))) == names
        pack = stream.consume()
    found = [(msg.position.channel_name, msg.id) for msg in pack.msgs if msg.position]
    assert found == [(name, number) for name in names for number in (1, 2)]


def test_packs_are_bounded_and_go_on_without_a_gap(service: LogService, channels: Make) -> None:
    names = channels(1)
    with opened(service, names, read_bytes=400) as stream:
        stream.produce(MsgPack(msgs=[message(1, number) for number in range(100)]))
        packs = [stream.consume()]
        while len(ids(packs)) < 100:
            packs.append(stream.consume())
            assert packs[-1].start_positions == packs[-2].end_positions
    assert len(packs) > 5
    assert ids(packs) == list(range(100))


def test_seek_takes_start_and_end_positions_and_those_of_messages(service: LogService, channels: Make) -> None:
    names = channels(2)
    with opened(service, names) as stream:
        stream.produce(MsgPack(msgs=[message(1, number, key=number) for number in range(6)]))
        pack = stream.consume()
        stream.seek(pack.start_positions)
        assert stream.consume() == pack
        fourth = next(msg for msg in pack.msgs if msg.id == 4)
        assert fourth.position is not None
        stream.seek(pack.end_positions)
        stream.seek(MsgPosition.from_json(fourth.position.to_json()))
        assert ids([stream.consume()]) == [4]
        with pytest.raises(DeadlineExceeded):
            stream.consume(timeout=0.02)


def test_a_message_on_any_channel_wakes_a_consumer(service: LogService, channels: Make) -> None:
    names = channels(3)
    with opened(service, names) as stream:
        for number in range(6):
            thread = threading.Thread(target=append, args=(service, names[number % 3], [f"1#{number}"]))
            thread.start()
            assert ids([stream.consume()]) == [number]
            thread.join(DEADLINE)


def test_bytes_that_are_no_message_are_in_the_pack_with_the_reason(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1#1", "?", "2#2"])
    with opened(service, names) as stream:
        pack = stream.consume()
    assert ids([pack]) == [1, 2]
    assert [(each.reason, each.payload) for each in pack.refused] == [("malformed", b"no message at all")]


def test_iteration_ends_with_the_stream_or_where_nothing_comes(service: LogService, channels: Make) -> None:
    names = channels(1)
    with opened(service, names) as stream:
        stream.produce(MsgPack(msgs=[message(1, 1)]))
        assert ids(list(stream.chan(idle_timeout=0.05))) == [1]
        stream.produce(MsgPack(msgs=[message(1, 2)]))
        seen = []
        for pack in stream:
            seen += ids([pack])
            threading.Thread(target=stream.close).start()
    assert seen == [2]


def test_a_pack_with_a_message_that_cannot_be_sent_is_refused_as_a_whole(service: LogService, channels: Make) -> None:
    names = channels(2)
    with opened(service, names) as stream:
        with pytest.raises(InvalidArgument):
            stream.produce(MsgPack(msgs=[message(1, 1, key=0), message(1, 1 << 70, key=1)]))
        large = GenericMsg(id=3, begin_ts=1, hash_keys=(1,), payload=bytes(MAX_ENTRY_BYTES))
        with pytest.raises(EntryTooLarge) as raised:
            stream.produce(MsgPack(msgs=[message(1, 2, key=0), large]))
        assert names[0] in str(raised.value.__notes__)
        assert ids([stream.consume()]) == [2]


def test_a_stream_says_what_was_not_set_up(service: LogService, channels: Make) -> None:
    names = channels(1)
    stream = LogMsgStream(service)
    for wrong in (lambda: stream.as_producer(["nowhere"]), lambda: stream.as_consumer(["nowhere"])):
        with pytest.raises(ChannelNotFound):
            wrong()
    with pytest.raises(InvalidArgument, match="start"):
        stream.consume()
    stream.start()
    with pytest.raises(InvalidArgument, match="as_consumer"):
        stream.consume()
    with pytest.raises(InvalidArgument, match="as_producer"):
        stream.produce(MsgPack(msgs=[message(1)]))
    stream.as_consumer(names)
    with pytest.raises(InvalidArgument, match="twice"):
        stream.as_consumer(names)
    with pytest.raises(ChannelNotFound):
        stream.seek(MsgPosition("nowhere", bytes(16)))
    with pytest.raises(InvalidArgument):
        stream.seek(MsgPosition(names[0], b"short"))
    stream.close()
    stream.close()
    with pytest.raises(StreamClosed):
        stream.produce(MsgPack(msgs=[message(1)]))
