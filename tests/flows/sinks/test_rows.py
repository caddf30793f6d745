"""What every sink that takes Arrow batches promises, on the real thing.

A collection of a deployment, a Delta table, a topic of a real Kafka.

A sink is killed by leaving it as it is and making another over its memory; processes that are killed are in
tests/crash/test_sink_kills.py and, of Kafka, below.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch

import millrace.testing
from millrace.base.errors import InvalidArgument, SinkBusy
from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.flows.batch import Batch
from millrace.flows.guarantee import Guarantee
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.delta.sink import DeltaSink
from millrace.flows.sinks.kafka.sink import KafkaSink
from millrace.flows.sinks.opensearch.model import OpenSearchSink as Declared
from millrace.flows.sinks.opensearch.sink import OpenSearchSink
from millrace.flows.sinks.sink import Sink
from millrace.testing import Deployment
from tests import running_brokers

PARTITIONS = 3


class Place(ABC):
    """Where rows go, and what arrived there."""

    offered: tuple[Guarantee, ...]

    @abstractmethod
    def sink(self, folder: Path, guarantee: Guarantee) -> Sink:
        """A sink over the memory in `folder`."""

    @abstractmethod
    def rows(self) -> Counter[tuple[int, str | None]]:
        """All that arrived."""

    @abstractmethod
    def once(self) -> Counter[tuple[int, str | None]]:
        """The same as its reader sees it who leaves out repeats, as the page says."""


class Into(Place):
    """A collection."""

    offered = ("exactly once", "at least once")

    def __init__(self, db: Deployment) -> None:
        self._db = db
        self.name = f"c{uuid.uuid4().hex}"
        db.create_collection(self.name, {"id": "int64", "name": "string?"}, key="id", vchannels=2)

    def sink(self, folder: Path, guarantee: Guarantee) -> Sink:
        return CollectionSink(self._db.settings, self.name, memory=folder, guarantee=guarantee)

    def rows(self) -> Counter[tuple[int, str | None]]:
        self._db.settle()
        return Counter((row["id"], row["name"]) for row in self._db.collection(self.name).read().to_pylist())

    def once(self) -> Counter[tuple[int, str | None]]:
        return Counter(set(self.rows()))


class DeltaTable(Place):
    """A Delta table."""

    offered = ("exactly once", "at least once")

    def __init__(self, path: Path) -> None:
        self.path = path

    def sink(self, folder: Path, guarantee: Guarantee) -> Sink:
        return DeltaSink(str(self.path), memory=folder, guarantee=guarantee)

    def rows(self) -> Counter[tuple[int, str | None]]:
        found = deltalake.DeltaTable(str(self.path)).to_pyarrow_table()
        return Counter((row["id"], row["name"]) for row in found.to_pylist())

    def once(self) -> Counter[tuple[int, str | None]]:
        return Counter(set(self.rows()))


class Index(Place):
    """An index of OpenSearch, with ids by key: what is sent again replaces itself."""

    offered = ("at least once",)

    def __init__(self) -> None:
        server = running_brokers.opensearch()
        self.client, self.name = OpenSearch(server.url), f"r-{uuid.uuid4().hex[:8]}"
        self.declared = Declared(hosts=(server.url,), index_base=self.name, create_index=True, ids="key")

    def sink(self, folder: Path, guarantee: Guarantee) -> Sink:
        return OpenSearchSink(self.declared, flush_items=10, flush_bytes=1 << 20, memory=folder, key=("id",))

    def rows(self) -> Counter[tuple[int, str | None]]:
        self.client.indices.refresh(index=self.name)
        hits = self.client.search(index=self.name, body={"size": 10_000, "query": {"match_all": {}}})["hits"]["hits"]
        assert all(hit["_id"] == str(hit["_source"]["id"]) for hit in hits)
        return Counter((hit["_source"]["id"], hit["_source"]["name"]) for hit in hits)

    def once(self) -> Counter[tuple[int, str | None]]:
        return self.rows()


class Topic(Place):
    """A topic; `key` is the column of its messages' keys."""

    offered = ("at least once",)

    def __init__(self, address: str, key: str | None, name: str = "") -> None:
        self.address, self.key, self.name = address, key, name or f"t{uuid.uuid4().hex}"
        admin = AdminClient({"bootstrap.servers": address})
        admin.create_topics([NewTopic(self.name, PARTITIONS, 1)])[self.name].result(30)

    def sink(self, folder: Path, guarantee: Guarantee) -> Sink:
        return KafkaSink.of_rows(folder, self.name, self.address, key=self.key, guarantee=guarantee)

    def messages(self) -> list[Any]:
        """All messages, by partition in their order."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "none",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        found = []
        try:
            for number in range(PARTITIONS):
                consumer.assign([TopicPartition(self.name, number, 0)])
                while (message := consumer.poll(30)) is not None and message.error() is None:
                    found.append(message)
                assert message is not None, "the partition's end"
        finally:
            consumer.close()
        return found

    def rows(self) -> Counter[tuple[int, str | None]]:
        return Counter(_row(each) for each in self.messages())

    def once(self) -> Counter[tuple[int, str | None]]:
        return Counter(_row(each) for each in self.first_of_each())

    def first_of_each(self) -> list[Any]:
        """The messages without repeats, as docs/sinks.md says.

        The greatest (batch, row) of each stream and partition is kept.
        """
        newest: dict[tuple[str, int], tuple[int, int]] = {}
        found: list[Any] = []
        for message in self.messages():
            headers = {name: value.decode() for name, value in message.headers()}
            place = (headers["millrace-stream"], message.partition())
            number = (int(headers["millrace-batch"]), int(headers["millrace-row"]))
            if number > newest.get(place, (-1, -1)):
                newest[place] = number
                found.append(message)
        return found


class CommittedTopic(Topic):
    """A topic as a reader of committed messages sees it: exactly once."""

    offered = ("exactly once",)

    def once(self) -> Counter[tuple[int, str | None]]:
        return self.rows()


def _row(message: Any) -> tuple[int, str | None]:
    value = json.loads(message.value())
    return value["id"], value["name"]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("sinks") / "data") as made:
        yield made


@pytest.fixture(params=["collection", "delta", "index", "topic", "topic with keys", "topic in transactions"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "index":
        return Index()
    if request.param == "delta":
        return DeltaTable(tmp_path / "table")
    if request.param == "collection":
        return Into(request.getfixturevalue("db"))
    if request.param == "topic in transactions":
        return CommittedTopic(running_brokers.kafka().address, "name")
    return Topic(running_brokers.kafka().address, "name" if request.param == "topic with keys" else None)


def batch(number: int, count: int = 40) -> list[pa.RecordBatch]:
    """Of a key in three, null."""
    ids = range(number * count, (number + 1) * count)
    names = [None if each % 3 == 0 else f"n{each % 7}" for each in ids]
    return pa.table({"id": pa.array(ids, pa.int64()), "name": names}).to_batches(max_chunksize=17)


def given(number: int, rows: Iterable[pa.RecordBatch]) -> Batch:
    return Batch.of_rows("query", number, rows)


def rows_of(*numbers: int, count: int = 40) -> Counter[tuple[int, str | None]]:
    return Counter(
        (row["id"], row["name"]) for each in numbers for part in batch(each, count) for row in part.to_pylist()
    )


@pytest.mark.quick_cases(1)
def test_each_row_arrives_and_is_counted(place: Place, tmp_path: Path) -> None:
    for guarantee in place.offered:
        sink = place.sink(tmp_path / guarantee, guarantee)
        sink.check(batch(0)[0].schema)
        first = 100 * place.offered.index(guarantee)
        assert [sink.write(given(each, batch(first + each))).acknowledged for each in range(3)] == [
            40,
            40,
            40,
        ]
        sink.close()
        sink.close()
    assert place.rows() == rows_of(*(100 * each + number for each in range(len(place.offered)) for number in range(3)))


@pytest.mark.quick_cases(1)
def test_a_batch_that_is_repeated_is_there_as_the_guarantee_says(place: Place, tmp_path: Path) -> None:
    for guarantee in place.offered:
        first = 100 * place.offered.index(guarantee)
        for numbers in ((0, 1), (1, 2), (2,)):
            sink = place.sink(tmp_path / guarantee, guarantee)
            for each in numbers:
                sink.write(given(each, batch(first + each)))
            sink.close()
    repeated = 100 * (len(place.offered) - 1)  # at least once is the weaker one, and the last
    whole = rows_of(*(100 * each + number for each in range(len(place.offered)) for number in range(3)))
    repeats = Counter() if isinstance(place, Index | CommittedTopic) else rows_of(repeated + 1, repeated + 2)
    assert place.rows() == whole + repeats
    assert place.once() == whole


@pytest.mark.quick_cases(1)
def test_a_stream_that_begins_anew_is_another_stream(place: Place, tmp_path: Path) -> None:
    for guarantee in place.offered[:1]:
        for number in range(2):
            sink = place.sink(tmp_path / str(number), guarantee)
            sink.write(given(0, batch(number)))
            sink.close()
    assert place.once() == rows_of(0, 1)


def test_rows_without_the_keys_column_and_guarantees_that_are_not_offered_are_refused(tmp_path: Path) -> None:
    sink = KafkaSink.of_rows(tmp_path, "none", "127.0.0.1:1", key="other")
    with pytest.raises(InvalidArgument, match="other"):
        sink.check(batch(0)[0].schema)
    with pytest.raises(InvalidArgument, match="at least once"):
        KafkaSink.of_rows(tmp_path, "none", "127.0.0.1:1", guarantee="at most once")


@pytest.mark.slow
def test_messages_of_a_key_keep_their_order(tmp_path: Path) -> None:
    topic = Topic(running_brokers.kafka().address, "name")
    sink = topic.sink(tmp_path, "at least once")
    for number in range(3):
        sink.write(given(number, batch(number, 400)))
    sink.close()
    by_key: dict[bytes | None, list[int]] = {}
    for message in topic.messages():
        if message.key() is not None:
            by_key.setdefault(message.key(), []).append(_row(message)[0])
    assert len(by_key) == 7
    assert all(ids == sorted(ids) for ids in by_key.values())


KILLED = """
import sys
from pathlib import Path
from tests.flows.sinks.test_rows import batch, given
from millrace.flows.sinks.kafka.sink import KafkaSink
folder, topic, address = sys.argv[1:]
sink = KafkaSink.of_rows(Path(folder), topic, address, options={"linger.ms": "0", "batch.num.messages": "50"})
sink.write(given(0, batch(0)))
def told(batches):
    for number, each in enumerate(batches):
        yield each
        sink._producer.flush(30)
        print(number, flush=True)
sink.write(given(1, told(batch(1, 4000))))
"""


@pytest.mark.slow
def test_a_process_that_was_killed_amid_a_batch_loses_nothing_and_its_reader_sees_each_row_once(tmp_path: Path) -> None:
    topic = Topic(running_brokers.kafka().address, None)
    command = [sys.executable, "-c", KILLED, str(tmp_path), topic.name, topic.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        while (line := killed.stdout.readline()) and int(line) < 20:
            pass
        killed.send_signal(signal.SIGKILL)
    assert rows_of(0) <= topic.rows() < rows_of(0) + rows_of(1, count=4000)
    sink = topic.sink(tmp_path, "at least once")
    sink.write(given(1, batch(1, 4000)))
    sink.close()
    whole = rows_of(0) + rows_of(1, count=4000)
    assert topic.rows() > whole
    assert topic.once() == whole


@pytest.mark.slow
def test_a_broker_that_is_gone_is_an_error_to_retry_and_the_batch_goes_in_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.flows.sinks.kafka.sink.SECONDS", 4.0)
    with KafkaBroker(tmp_path / "kafka", settings=Settings()).start() as broker:
        topic = Topic(broker.address, "name")
        sink = topic.sink(tmp_path / "sink", "at least once")
        sink.write(given(0, batch(0)))
        broker.kill()
        with pytest.raises(SinkBusy) as refused:
            sink.write(given(1, batch(1)))
        assert refused.value.retriable
        sink.close()
        broker.start()
        sink = topic.sink(tmp_path / "sink", "at least once")
        sink.write(given(1, batch(1)))
        sink.close()
        assert topic.once() == rows_of(0, 1)
