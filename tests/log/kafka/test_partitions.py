"""PChannels as partitions of one topic (kafka.partitions), beside what the conformance suite checks of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient

from millrace.base.errors import ChannelExists, ChannelNotFound, InvalidArgument, InvalidSettings
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.log.kafka.service import Kafka, open_location
from millrace.log.kafka.settings import KafkaPartition, KafkaSettings
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.ingest.log_connection import LogConnection
from tests import running_brokers
from tests.conformance.backends import deployment_name
from tests.conformance.reading import read_all

DEADLINE = 30.0


@pytest.fixture
def location(tmp_path: Path) -> str:
    return f"{running_brokers.kafka().address}/{deployment_name(tmp_path)}"


def shared(location: str, partitions: int) -> Kafka:
    return open_location(location, {"partitions": partitions})


@pytest.mark.parametrize("partitions", ["-1", "10001", "some"])
def test_a_number_that_cannot_be_is_refused(partitions: str) -> None:
    with pytest.raises(InvalidSettings, match=r"kafka\.partitions"):
        KafkaSettings.of("host:1/orders", {"partitions": partitions})


def test_numbered_pchannels_are_partitions_and_all_others_have_topics() -> None:
    settings = KafkaSettings.of("host:1/orders", {"partitions": "2"})
    assert [settings.partition_of(name) for name in ("dml_0", "dml_1")] == [
        KafkaPartition("orders", 0),
        KafkaPartition("orders", 1),
    ]
    for name in ("dml_2", "dml_01", "dml_", "dml_-1", "dml_0_1v0", "events"):
        assert settings.partition_of(name) == KafkaPartition(settings.topic(name))
        assert not settings.is_shared(settings.partition_of(name))


def test_the_first_one_made_makes_all_of_them_and_each_is_a_log_of_its_own(location: str) -> None:
    with shared(location, 3) as service:
        service.create("dml_1")
        service.create("events")
        assert service.names() == ["dml_0", "dml_1", "dml_2", "events"]
        for name in ("dml_0", "dml_1", "dml_2"):
            with pytest.raises(ChannelExists):
                service.create(name)
        described = AdminClient({"bootstrap.servers": service.settings.brokers}).list_topics(
            service.settings.prefix, timeout=DEADLINE
        )
        assert sorted(described.topics[service.settings.prefix].partitions) == [0, 1, 2]

        def append(number: int) -> None:
            log = service.open(f"dml_{number}")
            for step in range(20):
                log.append([b"%d %d %d" % (number, step, each) for each in range(50)])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(append, range(3)))
        for number in range(3):
            found = read_all(service.open(f"dml_{number}"))
            assert [value for _, value in found] == [
                b"%d %d %d" % (number, step, each) for step in range(20) for each in range(50)
            ]
            assert [each.entry for each, _ in found] == list(range(1000))


def test_truncation_sizes_and_groups_are_each_partitions_own(location: str) -> None:
    with shared(location, 2) as service:
        service.create("dml_0")
        first, second = service.open("dml_0"), service.open("dml_1")
        ids = first.append([b"x" * 10_000] * 10)
        second.append([b"y"])
        assert first.describe().bytes > 100_000 > second.describe().bytes > 0
        first.truncate(ids[5])
        assert (first.describe().begin, second.describe().begin.entry) == (ids[5], 0)
        service.move_group("g", "dml_0", ids[7])
        assert service.group_position("g", "dml_1") is None
        assert service.group_position("g", "dml_0") == ids[7]


def test_a_greater_number_adds_partitions_and_leaves_what_is_there(location: str) -> None:
    with shared(location, 1) as service:
        service.create("dml_0")
        ids = service.open("dml_0").append([b"kept"])
    with shared(location, 3) as service:
        assert service.names() == ["dml_0"]
        with pytest.raises(ChannelNotFound):
            service.open("dml_2")
        service.create("dml_2")
        assert service.names() == ["dml_0", "dml_1", "dml_2"]
        service.open("dml_2").append([b"new"])
        assert read_all(service.open("dml_0")) == [(ids[0], b"kept")]


def test_a_log_that_has_a_topic_of_its_own_is_not_looked_for_there_any_more(location: str) -> None:
    """Nobody's log changes its place unnoticed by a change of the setting: it is not found."""
    with open_location(location, {}) as service:
        service.create("dml_0")
        service.open("dml_0").append([b"elsewhere"])
    with shared(location, 1) as service:
        assert service.names() == []
        with pytest.raises(ChannelNotFound):
            service.open("dml_0")


def test_a_partition_is_not_destroyed(location: str) -> None:
    with shared(location, 2) as service:
        with pytest.raises(ChannelNotFound):
            service.drop("dml_0")
        service.create("dml_0")
        service.open("dml_0").append([b"kept"])
        with pytest.raises(InvalidArgument, match="removes no partition"):
            service.drop("dml_0")
        assert [value for _, value in read_all(service.open("dml_0"))] == [b"kept"]


@pytest.mark.slow
def test_a_deployment_lies_on_one_topic(location: str, tmp_path: Path) -> None:
    url = f"kafka://{location}?partitions=2"
    settings = Settings(data_dir=tmp_path / "data", log=url, append_deadline=DEADLINE)
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(2)
        schema = CollectionSchema((FieldSpec("id", "int64", False),), "id")
        collection = client.catalog.create_collection("numbers", schema, vchannels=4)
        client.new_producer().insert(collection, pa.table({"id": range(1000)}))
        with LogConnection(settings).service() as direct:
            ingest_to_end(settings, direct)
        assert sorted(client.collection("numbers").read(deadline=DEADLINE)["id"].to_pylist()) == list(range(1000))
        client.connection.service.shutdown()
    topics = AdminClient({"bootstrap.servers": running_brokers.kafka().address}).list_topics(timeout=DEADLINE).topics
    prefix = location.rpartition("/")[2]
    assert [name for name in topics if name.startswith(prefix)] == [prefix]
