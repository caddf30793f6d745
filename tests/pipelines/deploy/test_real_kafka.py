"""The service on a real Kafka: topics made and unmade, a worker that carries documents, what a failed create leaves."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millrace.access.grants import MACHINE
from millrace.base.deadline import Deadline, until
from millrace.base.errors import InvalidArgument, PipelineNotFound
from millrace.base.settings import Settings
from millrace.pipelines.api.management import Management
from millrace.pipelines.store.store import open_pipelines
from tests import running_brokers

pytestmark = pytest.mark.slow


@pytest.fixture
def management(settings: Settings) -> Iterator[Management]:
    with open_pipelines(settings, env={}) as store:
        made = Management(settings, store)
        yield made
        for record in store.all():
            made.deployment.stop(record.id)


def topics() -> set[str]:
    return set(AdminClient({"bootstrap.servers": running_brokers.kafka().address}).list_topics(timeout=20).topics)


def declared(name: str) -> dict[str, Any]:
    brokers = [running_brokers.kafka().address]
    return {
        "source": {"kind": "kafka", "bootstrap": brokers, "topics": [f"{name}-in"]},
        "steps": [{"kind": "constant", "fields": {"by": "us"}}],
        "sink": {"kind": "kafka", "bootstrap": brokers, "topic": f"{name}-out"},
    }


def test_documents_go_through_and_a_delete_takes_what_was_made(management: Management) -> None:
    name = f"p{uuid.uuid4().hex[:10]}"
    address = running_brokers.kafka().address
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(f"{name}-in", num_partitions=2)])[f"{name}-in"].result(20)
    management.create(MACHINE, name, declared(name))
    assert {f"{name}-in", f"{name}-out", f"{name}.errors"} <= topics()
    producer = Producer({"bootstrap.servers": address})
    for number in range(20):
        producer.produce(f"{name}-in", json.dumps({"n": number}), key=str(number))
    producer.produce(f"{name}-in", b"no json", key="x")
    assert producer.flush(20) == 0
    management.resume(MACHINE, name)
    end = Deadline.after(60)
    assert until(lambda: sum(task.position for task in management.status(name).tasks) == 21, end, every=0.2), (
        management.status(name)
    )
    status = management.status(name)
    assert sum(task.records_out for task in status.tasks) == 20
    assert sum(task.records_error for task in status.tasks) == 1
    reader = Consumer({"bootstrap.servers": address, "group.id": name, "auto.offset.reset": "earliest"})
    reader.subscribe([f"{name}-out"])
    found: list[dict[str, Any]] = []
    while len(found) < 20 and not end.over():
        message = reader.poll(1.0)
        if message is not None and message.error() is None:
            found.append(json.loads(message.value()))
    reader.close()
    assert sorted(each["n"] for each in found) == list(range(20))
    assert {each["by"] for each in found} == {"us"}
    management.stop(MACHINE, name)
    assert management.status(name).state == "STOPPED"
    assert sum(management.offsets(name).values()) == 21
    management.delete(MACHINE, name)
    left = Deadline.after(20)
    assert until(lambda: not {f"{name}-out", f"{name}.errors"} & topics(), left, every=0.2)
    assert f"{name}-in" in topics(), "it was there before"
    with pytest.raises(PipelineNotFound):
        management.get(name)


def test_a_create_that_fails_behind_its_topics_takes_them_away(
    management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise InvalidArgument("no room for the declaration")

    name = f"p{uuid.uuid4().hex[:10]}"
    monkeypatch.setattr(management.deployment, "write", full)
    with pytest.raises(InvalidArgument, match="no room"):
        management.create(MACHINE, name, declared(name))
    assert until(lambda: not any(each.startswith(name) for each in topics()), Deadline.after(20), every=0.2)
