"""The channels of a deployment: created with an owner, described, destroyed, and still known after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.base.errors import ChannelNotFound, InvalidArgument, InvalidSettings, LogUnavailable, Malformed
from millrace.log.protocol import LogService
from millrace.log.rocksmq.service import RocksMQ
from millrace.meta.memory import MemoryStore
from millrace.msgstream import channels as module
from millrace.msgstream import registry
from millrace.msgstream.channels import (
    CreateChannelRequest,
    DescribeChannelRequest,
    DestroyChannelRequest,
    MsgChannels,
    OwnerDescription,
)
from millrace.msgstream.factory import (
    KafkaMsgStreamFactory,
    LogMsgStreamFactory,
    MemMsgStreamFactory,
    RmqMsgStreamFactory,
)
from millrace.msgstream.meta_registry import MetaStoreRegistry
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.registry import REGISTRY
from millrace.rpc.remote_log import RemoteLogService
from tests.msgstream.messages import append, consumed, ids, message

OWNER = OwnerDescription("proxy", "10.0.0.1:19530", "inserts of ä")
Channels = Callable[[LogService], MsgChannels]


@pytest.fixture(params=["log", "store"])
def of(request: pytest.FixtureRequest) -> Channels:
    """The channels of a log, by either registry, as another process has them."""
    if request.param == "log":
        return MsgChannels
    store = MemoryStore(lambda: 0.0)
    return lambda service: MsgChannels(service, MetaStoreRegistry(service, store))


def test_channels_are_created_with_owner_and_attributes_and_described(service: LogService, of: Channels) -> None:
    channels = of(service)
    assert channels.describe_channels().descriptions == []
    first = channels.create_channels(CreateChannelRequest(OWNER, 2, {"retention": "1d"})).channel_names
    second = channels.create_channels(CreateChannelRequest(OwnerDescription("loader"), 1)).channel_names
    assert len(set(first + second)) == 3
    found = of(service).describe_channels(DescribeChannelRequest([second[0], first[1]])).descriptions
    assert [(each.channel_name, each.owner, each.attributes) for each in found] == [
        (second[0], OwnerDescription("loader"), {}),
        (first[1], OWNER, {"retention": "1d"}),
    ]
    assert sorted(first + second) == [each.channel_name for each in channels.describe_channels().descriptions]
    service.open(first[0]).append([b"it is a log"])


def test_destroyed_channels_are_gone_and_only_what_was_created_is_destroyed(service: LogService, of: Channels) -> None:
    channels = of(service)
    kept, gone = channels.create_channels(CreateChannelRequest(OWNER, 2)).channel_names
    service.create("dml_0")
    for wrong in ("dml_0", "nowhere", REGISTRY):
        with pytest.raises(ChannelNotFound):
            channels.destroy_channels(DestroyChannelRequest([gone, wrong]))
    channels.destroy_channels(DestroyChannelRequest([gone]))
    assert gone not in service.names()
    assert [each.channel_name for each in channels.describe_channels().descriptions] == [kept]
    for call in (channels.destroy_channels, channels.describe_channels):
        with pytest.raises(ChannelNotFound):
            call(DestroyChannelRequest([gone]))  # type: ignore[operator]


def test_channels_are_known_after_a_restart_and_to_other_processes(tmp_path: Path) -> None:
    with RocksMQ(tmp_path) as service:
        names = MsgChannels(service).create_channels(CreateChannelRequest(OWNER, 3)).channel_names
    with RocksMQ(tmp_path) as service:
        assert [
            each.owner for each in MsgChannels(service).describe_channels(DescribeChannelRequest(names)).descriptions
        ]


def test_trimming_gives_up_what_all_groups_are_done_with_and_nothing_else(service: LogService) -> None:
    channels = MsgChannels(service)
    with_groups, without = channels.create_channels(CreateChannelRequest(OWNER, 2)).channel_names
    append(service, with_groups, ["1#1", "t10", "11#2", "t20", "21#3", "t30"])
    append(service, without, ["1#1"])
    for group, packs in (("fast", 3), ("slow", 2)):
        with LogMsgStreamFactory(service).new_tt_msg_stream() as stream:
            stream.as_consumer([with_groups], group)
            stream.ack(consumed(stream, packs)[-1])
    channels.trim_channels([with_groups, without])
    with LogMsgStreamFactory(service).new_tt_msg_stream() as stream:
        stream.as_consumer([with_groups], "slow")
        assert ids([stream.consume(timeout=20.0)]) == [3]
    begin = service.open(with_groups).describe().begin
    assert begin == service.group_position("slow", with_groups)
    first = service.open(without).read(service.open(without).describe().begin)
    assert first.batch.num_rows == 1


class FailsToCreate(RocksMQ):
    """A log that is lost in the middle of a creation or a destruction."""

    creations = 1

    def create(self, pchannel: str) -> None:
        if pchannel != REGISTRY:
            self.creations -= 1
            if self.creations < 0:
                raise LogUnavailable("gone")
        super().create(pchannel)


def test_a_creation_that_was_cut_short_leaves_only_channels_that_can_be_named_and_destroyed(
    tmp_path: Path, of: Channels
) -> None:
    with FailsToCreate(tmp_path) as service:
        channels = of(service)
        with pytest.raises(LogUnavailable):
            channels.create_channels(CreateChannelRequest(OWNER, 2))
        (made,) = [name for name in service.names() if name != REGISTRY]
        assert [each.channel_name for each in channels.describe_channels().descriptions] == [made]
        service.drop(made)  # as a destruction does that is cut short before its event
        channels.destroy_channels(DestroyChannelRequest([made]))
        with pytest.raises(ChannelNotFound):
            channels.destroy_channels(DestroyChannelRequest([made]))


def test_of_creations_that_broke_off_the_newest_names_are_kept(
    tmp_path: Path, of: Channels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ABSENT", 6)
    with FailsToCreate(tmp_path) as service:
        channels = of(service)
        (made,) = channels.create_channels(CreateChannelRequest(OWNER, 1)).channel_names
        for _ in range(10):
            with pytest.raises(LogUnavailable):
                channels.create_channels(CreateChannelRequest(OWNER, 2))
        names = [name for each in channels._registry.known() for name in each.channels]
        assert names[0] == made
        assert len(names) == 1 + 6 + 2, "and of the last creation, which may be just about to get its logs"


def test_the_log_of_the_registry_is_written_anew_and_its_begin_given_up(
    service: LogService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MIN_EVENTS", 8)
    channels = MsgChannels(service)
    kept = channels.create_channels(CreateChannelRequest(OWNER, 2, {"ttl": "1d"})).channel_names
    with registry.open_registry_log(service) as log:
        begin = log.describe().begin
    for _ in range(12):
        channels.destroy_channels(
            DestroyChannelRequest(channels.create_channels(CreateChannelRequest(OWNER, 1)).channel_names)
        )
    with registry.open_registry_log(service) as log:
        assert registry.RegistryEvents.of(log).count <= 9
        assert log.describe().begin > begin
    assert [(each.channel_name, each.attributes) for each in channels.describe_channels().descriptions] == [
        (name, {"ttl": "1d"}) for name in kept
    ]


def test_requests_that_cannot_be_are_refused_and_change_nothing(service: LogService) -> None:
    channels = MsgChannels(service)
    for request in (
        CreateChannelRequest(OWNER, 0),
        CreateChannelRequest(OWNER, 5000),
        CreateChannelRequest(OWNER, 1, {"x": "y" * 300_000}),
        CreateChannelRequest(OWNER, 1, {"x": 1}),  # type: ignore[dict-item]
    ):
        with pytest.raises(InvalidArgument):
            channels.create_channels(request)
    assert [name for name in service.names() if name != REGISTRY] == []


def test_an_entry_that_is_no_event_is_an_error(service: LogService) -> None:
    service.create(REGISTRY)
    service.open(REGISTRY).append([b'{"version": 1, "op": "rename"}'])
    with pytest.raises(Malformed, match="rename"):
        MsgChannels(service).describe_channels()


def test_a_factory_opens_its_backend_by_url_or_location_and_makes_both_kinds_of_stream(tmp_path: Path) -> None:
    for source in (f"rocksmq://{tmp_path / 'log'}", str(tmp_path / "log")):
        with RmqMsgStreamFactory(source) as factory:
            names = factory.channels.create_channels(CreateChannelRequest(OWNER, 1)).channel_names
            factory.set_params({"timeout": 20.0, "read_bytes": 1000})
            with factory.new_msg_stream() as stream, factory.new_tt_msg_stream() as ticking:
                assert stream.settings == ticking.settings
                assert stream.settings.read_bytes == 1000
                stream.as_producer(names)
                stream.as_consumer(names)
                stream.produce(MsgPack(msgs=[message(1, 7)]))
                assert ids([stream.consume()]) == [7]


def test_a_factory_keeps_the_registry_where_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RmqMsgStreamFactory(str(tmp_path / "log")) as factory:
        (first,) = factory.channels.create_channels(CreateChannelRequest(OWNER, 1)).channel_names
    monkeypatch.setenv("MILLRACE_META_STORE", f"sqlite:///{tmp_path}/meta.db")
    for _ in range(2):
        with RmqMsgStreamFactory(str(tmp_path / "log")) as factory:
            assert [each.owner for each in factory.channels.describe_channels().descriptions] == [OWNER]
    with MemMsgStreamFactory() as memory:
        assert memory.channels.describe_channels().descriptions == []
    with RmqMsgStreamFactory(str(tmp_path / "log"), meta_store="") as elsewhere, pytest.raises(InvalidSettings):
        elsewhere.channels.destroy_channels(DestroyChannelRequest([first]))
    with RmqMsgStreamFactory(str(tmp_path / "log")) as factory:
        factory.channels.destroy_channels(DestroyChannelRequest([first]))
        assert factory.service.names() == [REGISTRY]


def test_a_factory_goes_through_the_server_of_a_folder(tmp_path: Path) -> None:
    with (
        RmqMsgStreamFactory.served(str(tmp_path / "log")) as factory,
        RmqMsgStreamFactory.served(str(tmp_path / "log")) as other,
    ):
        names = factory.channels.create_channels(CreateChannelRequest(OWNER, 1)).channel_names
        assert [each.channel_name for each in other.channels.describe_channels().descriptions] == names
        assert isinstance(factory.service, RemoteLogService)
        factory.service.shutdown()


def test_a_factory_refuses_other_backends_and_unknown_settings(service: LogService) -> None:
    with pytest.raises(InvalidSettings, match="kafka"):
        KafkaMsgStreamFactory("rocksmq:///data")
    with pytest.raises(InvalidSettings, match="scheme"):
        LogMsgStreamFactory("data")
    factory = LogMsgStreamFactory(service)
    for params in ({"timeout": -1}, {"read_bytes": 0}, {"unknown": 1}, {"on_refused": "drop"}, {"auto_ack": 1}):
        with pytest.raises(InvalidSettings):
            factory.set_params(params)
    factory.close()
    assert service.names() == []
