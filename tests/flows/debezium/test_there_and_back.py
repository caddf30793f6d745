"""Changes of a collection through a topic into another collection, which ends equal: flows as a worker runs them."""

from __future__ import annotations

import json
import threading
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.base.settings import Settings
from millrace.brokers.kafka import KafkaBroker
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.host import run
from millrace.pipelines.declaration import pipeline_of
from millrace.testing import Deployment, deployment
from tests import running_brokers
from tests.flows.brokers_in_process import brokers
from tests.flows.debezium.samples import MYSQL_SOURCE, event

COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("day", pa.date32(), nullable=False),
        ("total", pa.decimal128(12, 2)),
        ("note", pa.binary()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)


def _to_the_end(settings: Settings, declared: dict[str, Any]) -> None:
    whole = {"flush": {"seconds": 0.2}, **declared}
    run(FlowRun(settings, pipeline_of(whole)), stop=threading.Event(), until_end=True)


def _change(orders: Any, day: int) -> None:
    rows = [
        {"id": each, "day": date(2024, 2, day), "total": Decimal(f"{each}.25"), "note": bytes([0, 255, each % 256])}
        for each in range(day, 200, 3)
    ]
    orders.upsert(rows).checked()
    orders.delete(list(range(day, 200, 10))).checked()


def _there_and_back(settings: Settings, db: Deployment, address: str, topic: str, **sink: Any) -> None:
    orders = db.create_collection("orders", COLUMNS, key="id", vchannels=2)
    copy = db.create_collection("copy", COLUMNS, key="id")
    out = {
        "id": f"out-{topic}",
        "source": {"kind": "collection", "collection": "orders"},
        "sink": {"kind": "kafka", "bootstrap": [address], "topic": topic, "format": "debezium", **sink},
        "errors": {"collection": "letters"},
    }
    back = {
        "id": f"back-{topic}",
        "source": {"kind": "kafka", "bootstrap": [address], "topics": [topic], "format": "debezium"},
        "sink": {"kind": "collection", "collection": "copy"},
        "errors": {"collection": "letters"},
    }
    for day in range(1, 4):
        _change(orders, day)
        _to_the_end(settings, out)
        _to_the_end(settings, back)
        assert _rows(copy) == _rows(orders) != []
    assert db.collection("letters").read().num_rows == 0


def _rows(collection: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = collection.read().to_pylist()
    return sorted(found, key=lambda each: each["id"])


@pytest.mark.slow  # test_writing.py has the law in seconds
@pytest.mark.parametrize("schemas", [False, True])
def test_a_collection_is_equal_after_a_topic(tmp_path: Path, schemas: bool) -> None:
    settings = Settings(data_dir=tmp_path)
    with deployment(settings.data_dir) as db, brokers() as kafka:
        _there_and_back(settings, db, kafka.address, "orders", debezium={"schemas": schemas})


@pytest.mark.slow
@pytest.mark.parametrize("transactional", [False, True])
def test_a_collection_is_equal_after_a_real_topic(tmp_path: Path, transactional: bool) -> None:
    broker: KafkaBroker = running_brokers.kafka()
    topic = f"orders-{tmp_path.name}-{transactional}".lower().replace("_", "-")
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(30)
    settings = Settings(data_dir=tmp_path)
    with deployment(settings.data_dir) as db:
        _there_and_back(settings, db, broker.address, topic, transactional=transactional, debezium={"schemas": True})


def test_events_that_are_none_are_letters_and_the_others_go_on(tmp_path: Path) -> None:
    """Also a truncation amid a batch: what came before it is gone, what comes after it stays."""

    def sent(number: int, op: str = "c", **more: Any) -> tuple[bytes, bytes, list[Any]]:
        row = {"id": number, "day": "2024-02-29"}
        source = {**MYSQL_SOURCE, "pos": number}
        value = {**event(op, None, None if op == "d" else row, source), **more}
        return json.dumps({"id": number}).encode(), json.dumps(value).encode(), []

    settings = Settings(data_dir=tmp_path)
    with deployment(settings.data_dir) as db, brokers() as kafka:
        copy = db.create_collection("copy", COLUMNS, key="id")
        declared = {
            "id": "back",
            "source": {
                "kind": "kafka",
                "bootstrap": [kafka.address],
                "topics": ["orders"],
                "format": "debezium",
                "debezium": {"truncates": "ignore"},
            },
            "sink": {"kind": "collection", "collection": "copy"},
            "errors": {"collection": "letters"},
        }
        kafka.producer.list_topics("orders", timeout=20)
        good = [sent(number) for number in range(30, 60)]
        wrong = [sent(1, "x"), sent(2, after=None), sent(3, after={"id": 3, "day": "soon"}), (b"k", b"{", [])]
        kafka.send("orders", [*good[:10], *wrong, *good[10:], sent(31, "d"), sent(4, "t")])
        kafka.send("orders", [sent(32, "d"), (json.dumps({"id": 32}).encode(), None, [])], partition=1)
        _to_the_end(settings, declared)
        assert [each["id"] for each in _rows(copy)] == [30, *range(33, 60)]
        letters = db.collection("letters").read().to_pylist()
        told = {json.loads(each["row"])["kind"]: json.loads(each["row"]) for each in letters}
        assert sorted(told) == ["NO_AFTER", "NO_JSON", "ROW", "UNKNOWN_OP"]
        assert told["ROW"]["key"] == '{"id": 3}', "the record as it came"
