"""The flows of examples/ between topics, collections and OpenSearch, over real flights, each under a kill.

Content is compared with the same question asked at once, over all rows, by another program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch

import millrace
import millrace.testing
from millrace.base.failpoint import VARIABLE
from millrace.base.package import ROOT
from millrace.brokers.kafka import KafkaBroker
from millrace.demo.flights import flights, flights_schema
from millrace.flows.declare.checks import check
from millrace.flows.declare.discovery import declared_flow, declared_flows
from millrace.flows.directory import write_declared
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.runtime.child_processes import ChildProcess
from millrace.testing import Deployment
from tests import running_brokers

FLOWS = ROOT.parent / "examples" / "mixed_flows.yaml"
COLUMNS = ["tailnum", "time_hour", "dep_delay", "flight", "origin"]
NOON = datetime(2013, 1, 4, 12, tzinfo=UTC)


def test_the_examples_are_declarations_that_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA", "127.0.0.1:9092")
    monkeypatch.setenv("OPENSEARCH", "http://127.0.0.1:9200")
    with millrace.testing.deployment(tmp_path / "data", flow_declarations=str(FLOWS)) as db:
        found = declared_flows(db.settings, shipped=False)
        streams = {name: flow for name, flow in found.items() if flow.host == "spark"}
        said = {name: [str(each) for each in check(db.settings, flow)] for name, flow in streams.items()}
    assert {name: (flow.host, flow.chosen_guarantee) for name, flow in found.items()} == {
        "rising_delays": ("spark", "effectively once"),
        "flights_by_origin": ("spark", "exactly once"),
        "late-flights": ("range", "at least once"),
    }
    assert all("there is no collection 'undecoded'" in words for each in said.values() for words in each)
    assert all(said.values())


@pytest.fixture(scope="module")
def kafka() -> KafkaBroker:
    return running_brokers.kafka()


@pytest.fixture(scope="module")
def db(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with (
        millrace.testing.deployment(tmp_path_factory.mktemp("mixed") / "data", flow_declarations=str(FLOWS)) as made,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("KAFKA", kafka.address)
        environment.setenv("OPENSEARCH", running_brokers.opensearch().url)
        yield made


@pytest.fixture(scope="module")
def some_flights() -> pa.Table:
    """Those of the first three and a half days."""
    every = flights()
    return every.filter(pc.less(every["time_hour"], pa.scalar(NOON, every["time_hour"].type)))


class Topic:
    """The topic of flights; a record's key is the aircraft, so that its flights are in one partition, in order."""

    def __init__(self, kafka: KafkaBroker) -> None:
        admin = AdminClient({"bootstrap.servers": kafka.address})
        admin.create_topics([NewTopic("flights", 3, 1)])["flights"].result(30)
        self._producer = Producer({"bootstrap.servers": kafka.address, "acks": "all"})

    def send(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self._producer.produce("flights", json.dumps(row, default=str), row["tailnum"])
            self._producer.poll(0)
        assert self._producer.flush(60) == 0

    def send_bytes(self, value: bytes) -> None:
        self._producer.produce("flights", value)
        assert self._producer.flush(60) == 0

    def end_of_time(self, days: int) -> None:
        """A flight far behind all others, so that the watermark passes them."""
        at = NOON + timedelta(days=days)
        self.send([{"tailnum": "END", "time_hour": at, "dep_delay": 0, "flight": 0, "origin": "END"}])


def run(db: Deployment, folder: Path, command: list[str], *, failpoint: str = "") -> None:
    """A process of its own, which dies at the failpoint, or ends well."""
    db.settle()
    env = db.settings.environment() | ({VARIABLE: failpoint} if failpoint else {})
    job = ChildProcess([sys.executable, *command], log_file=folder / "job.log", env=env)
    try:
        code = job.wait(deadline=240)
    finally:
        job.kill()
    assert code == (-9 if failpoint else 0), job.tail()
    db.settle()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_topics_go_through_a_pattern_into_an_index_and_through_windows_into_a_collection(
    db: Deployment, kafka: KafkaBroker, some_flights: pa.Table, tmp_path: Path
) -> None:
    from millrace.flows.sinks.collection.poison import LETTERS

    db.catalog.create_collection("undecoded", LETTERS)
    topic = Topic(kafka)
    topic.send(some_flights.select(COLUMNS).to_pylist())
    topic.send_bytes(b"no json")
    stream = ["-m", "millrace", "flows", "run", "--available-now"]

    run(db, tmp_path, [*stream, "flights_by_origin"], failpoint="sink.journaled")
    run(db, tmp_path, [*stream, "flights_by_origin"])
    by_origin = db.collection("flights_by_origin").read(columns="origin, hour, flights, worst")
    asked = (
        duckdb.connect()
        .from_arrow(some_flights)
        .query("f", "select origin, date_trunc('hour', time_hour), count(*), max(dep_delay) from f group by 1, 2")
    )
    assert sorted(tuple(row.values()) for row in by_origin.to_pylist()) == sorted(asked.fetchall())

    run(db, tmp_path, [*stream, "rising_delays"])
    for days in (8, 9):
        topic.end_of_time(days)
        run(db, tmp_path, [*stream, "rising_delays"], failpoint="into.operated")
        run(db, tmp_path, [*stream, "rising_delays"])
    declared = declared_flows(db.settings)["rising_delays"]
    operator = declared.transform.operator
    assert operator is not None
    assert operator.pattern is not None
    known = some_flights.select(COLUMNS).filter(
        pc.and_(pc.is_valid(some_flights["tailnum"]), pc.is_valid(some_flights["dep_delay"]))
    )
    matches = millrace.match_recognize(known, operator.pattern.match_recognize).to_pylist()
    assert len(matches) > 20
    client = OpenSearch(running_brokers.opensearch().url, timeout=60)
    client.indices.refresh(index="rising-delays")
    hits = client.search(index="rising-delays", body={"size": 10_000})["hits"]["hits"]

    def said(each: dict[str, Any]) -> tuple[Any, ...]:
        since = each["since"] if isinstance(each["since"], datetime) else datetime.fromisoformat(each["since"])
        return each["tailnum"], since, each["before"], each["worst"], each["flight"]

    assert sorted(said(hit["_source"]) for hit in hits) == sorted(said(each) for each in matches)
    letters = db.collection("undecoded").read().to_pylist()
    assert sorted(each["stream"] for each in letters) == ["flights_by_origin/source", "rising_delays/source"]
    assert Incarnations(db.settings, "rising_delays").state.handed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_collection_goes_through_steps_into_a_topic(
    kafka: KafkaBroker, some_flights: pa.Table, tmp_path: Path
) -> None:
    columns = {name: f"{kind}?" if nullable else kind for name, kind, nullable in flights_schema()}
    rows = some_flights.slice(0, 800)
    admin = AdminClient({"bootstrap.servers": kafka.address})
    admin.create_topics([NewTopic("late_flights", 2, 1)])["late_flights"].result(30)
    with (
        millrace.testing.deployment(tmp_path / "data", flow_declarations=str(FLOWS)) as db,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("KAFKA", kafka.address)
        declared = write_declared(db.settings, declared_flow(db.settings, "late-flights"))
        worker = ["-m", "millrace.flows.range_host", str(declared), "--until-end"]
        source = db.create_collection("flights", columns, key="id", vchannels=2)
        source.upsert(rows.slice(0, 500))
        run(db, tmp_path, worker, failpoint="pipeline.written")
        run(db, tmp_path, worker)
        source.upsert(rows.slice(500))
        gone = rows["id"].to_pylist()[:100]
        source.delete(gone)
        run(db, tmp_path, worker, failpoint="pipeline.commit")
        run(db, tmp_path, worker)
        found: dict[str, float] = {}
        for key, value in records(kafka.address, "late_flights"):
            if value is None:
                found.pop(key, None)
            else:
                found[key] = json.loads(value)["hours_late"]
    wanted = {
        row["id"]: row["dep_delay"] / 60
        for row in rows.to_pylist()
        if row["id"] not in gone and row["dep_delay"] is not None and row["dep_delay"] >= 15
    }
    assert len(wanted) > 50
    assert found == pytest.approx(wanted)


def records(address: str, topic: str) -> Iterator[tuple[str, bytes | None]]:
    """Keys and values of a topic, each partition in order."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": "look", "enable.partition.eof": True})
    try:
        for partition in consumer.list_topics(topic, timeout=20).topics[topic].partitions:
            consumer.assign([TopicPartition(topic, partition, 0)])
            while (message := consumer.poll(20.0)) is not None and message.error() is None:
                yield message.key().decode(), message.value()
    finally:
        consumer.close()
