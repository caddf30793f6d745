"""Flows of documents in the tasks of Spark workers that share nothing with the driver, which goes with its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch

from millrace.base.deadline import Deadline, poll_until
from millrace.base.settings import Settings
from millrace.brokers.opensearch import OpenSearchServer
from millrace.client.database import connect
from millrace.flows.range_host.positions import positions_of
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.rpc.wire import TOKEN_VARIABLE
from millrace.runtime.child_processes import ChildProcess
from tests.spark_cluster import Cluster, Drivers, cluster, command_of, tasks_run_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

FLIGHTS = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("tail", "string", False),
        FieldSpec("model", "string", True),
    ),
    "id",
)
PLANES = CollectionSchema((FieldSpec("tail", "string", False), FieldSpec("model", "string", False)), "tail")
TAILS = 5
BAD = 7
"""One document in so many is no JSON."""
PARTITIONS = 4
ROWS = 5000


def declared(spark: Cluster, name: str, sink: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "deployment": "airflow",
        "source": {"kind": "kafka", "bootstrap": [spark.kafka.address], "topics": ["flights"]},
        "transform": {
            "steps": [
                {"kind": "lookup", "collection": "planes", "key": "tail", "take": ["model"], "into": "plane"},
                {"kind": "compute", "fields": {"model": "doc.plane.model"}},
                {"kind": "drop", "fields": ["plane"]},
            ]
        },
        "sink": sink,
        "errors": {"collection": "letters"},
        "failure_threshold": 1000,
    }


def test_documents_reach_a_collection_and_an_index_once_through_lost_executors_and_drivers(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-all-machines-have")
    with cluster(tmp_path, settings, monkeypatch) as (spark, _), ExitStack() as stack:
        anywhere = {"network.host": "0.0.0.0"}
        index = stack.enter_context(OpenSearchServer(tmp_path / "opensearch", settings=settings, properties=anywhere))
        rig = Drivers(spark, tmp_path, stack)
        db = stack.enter_context(connect(settings=rig.plain))
        db.catalog.ensure_pchannels(2)
        db.catalog.create_collection("flights", FLIGHTS, vchannels=2)
        db.catalog.create_collection("planes", PLANES)
        db.catalog.create_collection("letters", LETTERS)
        db["planes"].insert([{"tail": f"N{n}", "model": f"m{n}"} for n in range(TAILS)])
        admin = AdminClient({"bootstrap.servers": spark.kafka.address})
        admin.create_topics([NewTopic("flights", PARTITIONS, 1)])["flights"].result(30)
        files = {}
        for name, sink in {
            "rows": {"kind": "collection", "collection": "flights"},
            "index": {
                "kind": "opensearch",
                "hosts": [f"http://{spark.host}:{index.port['client']}"],
                "index_base": "flights",
                "create_index": True,
                "ids": "key",
            },
        }.items():
            files[name] = tmp_path / f"{name}.yaml"
            files[name].write_text(yaml.safe_dump(declared(spark, name, sink)))

        def arguments(name: str, *more: str) -> list[str]:
            return ["--declaration", str(files[name]), *more]

        def reach(name: str, records: int, process: ChildProcess) -> None:
            """Wait until the positions of a flow are after so many records."""

            def reached() -> bool:
                assert process.running(), process.tail()
                return sum(each.position for each in positions_of(rig.plain, name).values()) >= records

            assert poll_until(reached, Deadline.after(400), interval=0.5), process.tail()

        send, sent = _sender(spark), 2000
        send(range(sent))
        for name in files:
            with rig.driver(f"{name}1", "pipeline", *arguments(name)) as process:
                reach(name, sent, process)
                commands = [command_of(each) for each in psutil.process_iter()]
                assert not any(os.environ["AWS_SECRET_ACCESS_KEY"] in each for each in commands)
                spark.kill_executor(0)
                send(range(sent, sent + 1000))
                sent += 1000
                reach(name, sent, process)
        send(range(sent, ROWS))
        for name in files:
            with rig.driver(f"{name}2", "pipeline", *arguments(name, "--available-now")) as process:
                assert process.wait(deadline=400) == 0, process.tail()
        wanted = {n: {"id": n, "tail": f"N{n % TAILS}", "model": f"m{n % TAILS}"} for n in range(ROWS) if n % BAD}
        found = db["flights"].read(columns="id, tail, model").to_pylist()
        assert sorted(each["id"] for each in found) == sorted(wanted)
        assert {each["id"]: each for each in found} == wanted
        assert _documents(index) == wanted
        letters = db["letters"].read(columns="id")["id"].to_pylist()
        assert len(letters) == len(set(letters)) == 2 * (ROWS - len(wanted))
        assert all(tasks_run_in(folder) for folder in spark.folders)


def _sender(spark: Cluster) -> Callable[[range], None]:
    producer = Producer({"bootstrap.servers": spark.kafka.address, "acks": "all"})

    def send(ids: range) -> None:
        for n in ids:
            text = json.dumps({"id": n, "tail": f"N{n % TAILS}"}) if n % BAD else "no json"
            producer.produce("flights", text.encode(), str(n).encode())
            producer.poll(0)
        assert producer.flush(60) == 0

    return send


def _documents(server: OpenSearchServer) -> dict[int, dict[str, Any]]:
    client = OpenSearch(server.url, timeout=60)
    client.indices.refresh(index="flights")
    hits = client.search(index="flights", body={"size": 10_000, "query": {"match_all": {}}})["hits"]["hits"]
    return {int(each["_id"]): each["_source"] for each in hits}
