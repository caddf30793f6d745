"""The service on a real Kafka: topics made and unmade, a worker that carries documents, what a failed create leaves."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millrace.access.grants import LOCAL_ADMIN
from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import InvalidArgument, PipelineNotFound
from millrace.base.settings import Settings
from millrace.flows.errors.selection import EVERYTHING, Selection
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
    management.create(LOCAL_ADMIN, name, declared(name))
    assert {f"{name}-in", f"{name}-out", f"{name}.errors"} <= topics()
    producer = Producer({"bootstrap.servers": address})
    for number in range(20):
        producer.produce(f"{name}-in", json.dumps({"n": number}), key=str(number))
    producer.produce(f"{name}-in", b"no json", key="x")
    assert producer.flush(20) == 0
    management.resume(LOCAL_ADMIN, name)
    end = Deadline.after(60)
    assert poll_until(lambda: sum(task.position for task in management.status(name).tasks) == 21, end, interval=0.2), (
        management.status(name)
    )
    status = management.status(name)
    assert sum(task.records_out for task in status.tasks) == 20
    assert sum(task.records_error for task in status.tasks) == 1
    reader = Consumer({"bootstrap.servers": address, "group.id": name, "auto.offset.reset": "earliest"})
    reader.subscribe([f"{name}-out"])
    found: list[dict[str, Any]] = []
    while len(found) < 20 and not end.expired():
        message = reader.poll(1.0)
        if message is not None and message.error() is None:
            found.append(json.loads(message.value()))
    reader.close()
    assert sorted(each["n"] for each in found) == list(range(20))
    assert {each["by"] for each in found} == {"us"}
    elsewhere = {**declared("absent"), "steps": [{"kind": "rename", "fields": {"n": "m"}}]}
    shown = management.dry_run(LOCAL_ADMIN, name, [], elsewhere, newest=20)
    made = [each for each in shown if each["outcome"] == "index"]
    assert len(shown) == 20, "of the topic that it has, whatever is declared"
    assert [json.loads(each["value"])["n"] for each in made] == [each["steps"][-1]["document"]["m"] for each in made]
    assert len({each["place"] for each in made}) == len(made) >= 19
    management.stop(LOCAL_ADMIN, name)
    assert management.status(name).state == "STOPPED"
    assert sum(management.offsets(name).values()) == 21
    management.delete(LOCAL_ADMIN, name)
    left = Deadline.after(20)
    assert poll_until(lambda: not {f"{name}-out", f"{name}.errors"} & topics(), left, interval=0.2)
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
        management.create(LOCAL_ADMIN, name, declared(name))
    assert poll_until(lambda: not any(each.startswith(name) for each in topics()), Deadline.after(20), interval=0.2)


def test_errors_are_listed_and_a_redrive_that_is_killed_goes_on_where_it_was(
    management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"p{uuid.uuid4().hex[:10]}"
    broken = {**declared(name), "steps": [{"kind": "cast", "fields": {"n": "int"}, "name": "number"}]}
    management.create(LOCAL_ADMIN, name, broken)
    producer = Producer({"bootstrap.servers": running_brokers.kafka().address})
    for number in range(12_000):
        producer.produce(f"{name}-in", json.dumps({"n": f"{number}x" if number % 2 else number}), key=str(number))
        producer.poll(0)
    producer.produce(f"{name}-in", b"no json <script>", key="odd")
    assert producer.flush(20) == 0
    management.resume(LOCAL_ADMIN, name)
    assert poll_until(
        lambda: sum(task.position for task in management.status(name).tasks) == 12_001, Deadline.after(90), interval=0.2
    ), management.status(name)
    management.stop(LOCAL_ADMIN, name)

    page = management.errors(name, EVERYTHING, limit=3)
    assert (page.total, page.complete, [each.id for each in page.errors]) == (
        6001,
        True,
        ["0-6000", "0-5999", "0-5998"],
    )
    newest, older = page.errors[:2]
    assert (newest.step, newest.kind, newest.stage, newest.value) == (
        "json",
        "NO_JSON",
        "VALUE_CONVERTER",
        "no json <script>",
    )
    assert (older.topic, older.partition, older.offset, older.key) == (f"{name}-in", 0, 11_999, "11999")
    assert older.headers["__connect.errors.class.name"] == "number"
    assert older.headers["__connect.errors.exception.message"] == older.reason
    seen, before = [], ""
    while before is not None:
        page = management.errors(name, Selection(kind="CAST"), before=before, limit=200)
        seen += [each.id for each in page.errors]
        before = page.next
    assert seen == [f"0-{place}" for place in reversed(range(6000))]
    found = management.errors(name, Selection(kind="NO_JSON", first="0-10"))
    assert [each.id for each in found.errors] == ["0-6000"]
    assert not management.errors(name, Selection(reason="nothing like it")).complete, "it looks at so many at most"

    mended = {**broken, "steps": [{"kind": "compute", "fields": {"n": "size(string(doc.n))"}}]}
    management.update(LOCAL_ADMIN, name, mended, version=1)
    one = management.redrive(LOCAL_ADMIN, name, Selection(ids=("0-0", "0-6000")))
    told = _redriven(management, name)
    assert (told.id, told.state, told.counts["selected"], told.counts["written"]) == (one.id, "DONE", 2, 1)
    monkeypatch.setenv("MILLRACE_TEST_FAILPOINTS", "redrive.written@2")  # behind its second batch: not noted
    management.redrive(LOCAL_ADMIN, name, EVERYTHING)
    told = _redriven(management, name)
    assert (told.state, told.code, told.done, told.of) == ("WAITING", "JOB_LOST", 5_000, 6_001)
    monkeypatch.delenv("MILLRACE_TEST_FAILPOINTS")
    due = told.retry_at
    monkeypatch.setattr(management.redrives, "_clock", lambda: due)
    management.tend()
    told = _redriven(management, name)
    assert (told.state, told.counts["looked_at"], told.counts["written"]) == ("DONE", 6_001, 6_000)
    assert (told.counts["failed_again"], told.done) == (1, told.of)
    management.redrive(LOCAL_ADMIN, name, EVERYTHING)
    assert _redriven(management, name).counts["looked_at"] == 0, "all of it was redriven"
    assert management.reset_offsets(LOCAL_ADMIN, name, "latest") == {f"{name}-in-0": 12_001}
    assert management.reset_offsets(LOCAL_ADMIN, name, "2001-01-01") == {f"{name}-in-0": 0}
    assert management.reset_offsets(LOCAL_ADMIN, name, "2100-01-01") == {f"{name}-in-0": 12_001}
    place = TopicPartition(f"{name}-in", 0, 500)
    admin = AdminClient({"bootstrap.servers": running_brokers.kafka().address})
    admin.delete_records([place])[place].result(20)
    assert management.reset_offsets(LOCAL_ADMIN, name) == {f"{name}-in-0": 500}, "what retention took is not begun with"
    management.delete(LOCAL_ADMIN, name)


def _redriven(management: Management, name: str) -> Any:
    assert poll_until(lambda: management.redrive_status(name).state != "RUNNING", Deadline.after(60), interval=0.1)
    return management.redrive_status(name)


def test_what_has_the_same_name_in_another_cluster_is_left(management: Management) -> None:
    name = f"p{uuid.uuid4().hex[:10]}"
    record = management.create(LOCAL_ADMIN, name, declared(name))
    made = [f"input:{name}-in", f"output:{name}-out", f"error:{name}.errors"]
    planned = record.saga["planned"]
    assert [each.partition(" ")[0] for each in planned["topics"]] == made
    # As if it had been made in another Kafka, and sent here since: what lies here by these names is not its own.
    elsewhere = {**planned, "topics": [f"{each} elsewhere" for each in made]}
    management._store.move(record, phase=record.phase, saga={**record.saga, "planned": elsewhere})
    management.delete(LOCAL_ADMIN, name)
    assert {f"{name}-in", f"{name}-out", f"{name}.errors"} <= topics()
    told = {each["what"]: each["detail"] for each in management.audit(before=None, limit=10)}
    assert told["left"]["things"] == elsewhere["topics"]
