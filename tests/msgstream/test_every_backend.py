"""One run through the whole API on every backend, brokers included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.log.protocol import LogService
from millrace.msgstream.channels import (
    CreateChannelRequest,
    DescribeChannelRequest,
    DestroyChannelRequest,
    OwnerDescription,
)
from millrace.msgstream.factory import (
    KafkaMsgStreamFactory,
    LogMsgStreamFactory,
    PulsarMsgStreamFactory,
    RmqMsgStreamFactory,
)
from millrace.msgstream.messages import TimeTickMsg
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.stream import LogMsgStream
from millrace.msgstream.tick_stream import LogTtMsgStream
from tests import running_brokers
from tests.conformance.backends import deployment_name
from tests.msgstream.messages import append, consumed, ids, message


@pytest.mark.quick_cases(2)
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


def rocksmq(folder: Path) -> RmqMsgStreamFactory:
    return RmqMsgStreamFactory(str(folder))


def kafka(folder: Path) -> KafkaMsgStreamFactory:
    return KafkaMsgStreamFactory(f"{running_brokers.kafka().address}/{deployment_name(folder)}")


def pulsar(folder: Path) -> PulsarMsgStreamFactory:
    broker = running_brokers.pulsar()
    location = broker.namespace_url.partition("://")[2]
    return PulsarMsgStreamFactory(f"{location}/{deployment_name(folder)}", settings={"admin": broker.admin_url})


@pytest.mark.parametrize("opened", [rocksmq, kafka, pytest.param(pulsar, marks=pytest.mark.slow)])
def test_each_backends_factory_makes_streams_on_that_backend(
    opened: Callable[[Path], LogMsgStreamFactory], tmp_path: Path
) -> None:
    with opened(tmp_path / "log") as factory:
        assert opened.__name__ == factory.SCHEME
        assert type(factory.service).__module__.startswith(f"millrace.log.{opened.__name__}")
        factory.set_params({"timeout": 29.0})
        names = factory.channels.create_channels(CreateChannelRequest(OwnerDescription("proxy"), 2)).channel_names
        with factory.new_msg_stream() as plain, factory.new_tt_msg_stream() as ticked:
            assert (type(plain), type(ticked)) == (LogMsgStream, LogTtMsgStream)
            for stream, group in ((plain, "plain"), (ticked, "ticked")):
                stream.as_consumer(names, group)
            plain.as_producer(names)
            plain.produce(MsgPack(msgs=[message(number, number, key=number) for number in range(1, 5)]))
            plain.broadcast(MsgPack(msgs=[TimeTickMsg(begin_ts=9)]))
            assert ids([ticked.consume()]) == [1, 2, 3, 4], "between two ticks, over both channels"
            arrived: list[MsgPack] = []
            while sum(len(pack.msgs) for pack in arrived) < 6:
                arrived.append(plain.consume())
            assert sorted(msg.end_ts for pack in arrived for msg in pack.msgs) == [1, 2, 3, 4, 9, 9], "as it arrived"
    with opened(tmp_path / "log") as again, again.new_tt_msg_stream() as stream:
        assert stream.settings.timeout != 29.0, "parameters are those of one factory"
        stream.as_consumer(names, "ticked")
        stream.as_producer(names)
        stream.broadcast(MsgPack(msgs=[message(12, 12, key=1), TimeTickMsg(begin_ts=20)]))
        assert ids(consumed(stream, 2)) == [1, 2, 3, 4, 12, 12], "the streams lie where the factory was told"
