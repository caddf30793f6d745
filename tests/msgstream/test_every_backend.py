"""One run through the whole API on every backend, brokers included."""

from __future__ import annotations

from millrace.log.protocol import LogService
from millrace.msgstream.channels import (
    CreateChannelRequest,
    DescribeChannelRequest,
    DestroyChannelRequest,
    OwnerDescription,
)
from millrace.msgstream.factory import LogMsgStreamFactory
from millrace.msgstream.messages import TimeTickMsg
from millrace.msgstream.pack import MsgPack
from tests.msgstream.messages import append, consumed, ids, message


def test_channels_streams_groups_and_positions_are_the_same_on_every_backend(any_service: LogService) -> None:
    factory = LogMsgStreamFactory(any_service)
    factory.set_params({"timeout": 30.0, "auto_ack": False})
    owner = OwnerDescription("proxy")
    names = factory.channels.create_channels(CreateChannelRequest(owner, 2)).channel_names
    with factory.new_tt_msg_stream() as stream:
        stream.as_producer(names)
        stream.as_consumer(names, "g")
        for tick in (10, 20, 30):
            msgs = [message(tick - number, tick + number, key=number) for number in range(1, 6)]
            stream.produce(MsgPack(msgs=[*msgs, message(tick + 5, tick, key=1)]))
            stream.broadcast(MsgPack(msgs=[TimeTickMsg(begin_ts=tick)]))
        append(any_service, names[0], ["?", "3#99", "t40"])
        append(any_service, names[1], ["t40"])
        packs = consumed(stream, 4)
        assert ids(packs) == [15, 14, 13, 12, 11, 10, 25, 24, 23, 22, 21, 20, 35, 34, 33, 32, 31, 30]
        assert [[each.reason for each in pack.refused] for pack in packs] == [[], [], [], ["malformed", "late"]]
        stream.ack(packs[1])
        for number in (1, 3, 0):
            stream.seek(packs[number].start_positions)
            assert stream.consume() == packs[number]
    with factory.new_tt_msg_stream() as stream:
        stream.as_consumer(names, "g")
        assert consumed(stream, 2) == packs[2:]
    described = factory.channels.describe_channels(DescribeChannelRequest(names)).descriptions
    assert [each.owner for each in described] == [owner, owner]
    factory.channels.destroy_channels(DestroyChannelRequest(names))
    assert factory.channels.describe_channels().descriptions == []
