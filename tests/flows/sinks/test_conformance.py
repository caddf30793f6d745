"""What every sink promises, on real servers.

Repeated without effect, larger versions win, one document's trouble is its own.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deltalake
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.cimpl import NewTopic
from opensearchpy import OpenSearch

import millrace.testing
from millrace.base.errors import SinkBusy, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.declare.errors import Errors
from millrace.flows.isolation import Attempts, Isolation
from millrace.flows.records import Action, Record
from millrace.flows.registry import sink_of
from millrace.flows.sinks.kafka.sink import KafkaSink
from millrace.flows.sinks.opensearch.sink import OpenSearchSink
from millrace.flows.sinks.sink import Sink, Verdicts
from millrace.pipelines.declaration import pipeline_of
from millrace.testing import Deployment
from tests import running_brokers
from tests.flows.faulty import Faulty, cut_off, html, in_part, refused, trips_over
from tests.flows.sinks.batches import put

SOURCE = {"kind": "kafka", "bootstrap": ["127.0.0.1:1"], "topics": ["in"]}


def _sink(declared: dict[str, Any], settings: Settings | None = None) -> Sink:
    pipeline = pipeline_of({"id": "x", "source": SOURCE, "sink": declared})
    return sink_of(pipeline.sink, settings or Settings(), flow=pipeline.name, flush=pipeline.flush)


def _action(
    number: int, *, key: str | None = None, version: int | None = None, body: Any = None, delete: bool = False
) -> Action:
    record = Record("in", 0, number, (key or str(number)).encode(), b"{}", 0)
    made = None if delete else json.dumps({"number": number} if body is None else body).encode()
    return Action(record, record.position if key is None else key, made, version)


@dataclass
class Place:
    """A sink, and what is in it by id, as somebody else reads it."""

    sink: Sink
    look: Callable[[], dict[str, Any]]
    elsewhere: dict[str, Any] = field(default_factory=dict)
    """The declaration of a place that is not there."""
    fits: Callable[[Action], Action] = lambda action: action
    """Makes an action one that this kind takes: a collection's documents contain its key."""

    def put(self, actions: Sequence[Action]) -> Verdicts:
        return put(self.sink, [self.fits(each) for each in actions])


def _opensearch(**more: Any) -> Place:
    server = running_brokers.opensearch()
    index = f"c-{uuid.uuid4().hex[:8]}"
    declared = {
        "kind": "opensearch",
        "hosts": [server.url],
        "index_base": index,
        "create_index": True,
        "ids": "key",
        **more,
    }
    client = OpenSearch(server.url)

    def look() -> dict[str, Any]:
        client.indices.refresh(index=index)
        hits = client.search(index=index, body={"size": 10_000, "query": {"match_all": {}}})["hits"]["hits"]
        return {hit["_id"]: hit["_source"] for hit in hits}

    return Place(_sink(declared), look, {**declared, "create_index": False, "index_base": "not-there"})


def _kafka(**more: Any) -> Place:
    address = running_brokers.kafka().address
    topic = f"c-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    declared = {"kind": "kafka", "bootstrap": [address], "topic": topic, **more}

    def look() -> dict[str, Any]:
        consumer = Consumer({"bootstrap.servers": address, "group.id": "look", "enable.partition.eof": True})
        consumer.assign([TopicPartition(topic, 0, 0)])
        found: dict[str, Any] = {}
        try:
            while (message := consumer.poll(20.0)) is not None and message.error() is None:
                value, key = message.value(), (message.key() or b"").decode()
                if value is None:
                    found.pop(key, None)
                else:
                    found[key] = json.loads(value)
        finally:
            consumer.close()
        return found

    return Place(_sink(declared), look, {**declared, "topic": "not-there"})


def _collection(db: Deployment) -> Place:
    name = f"c{uuid.uuid4().hex[:8]}"
    rows = db.create_collection(name, {"key": "string", "number": "int64"}, key="key")
    declared = {"kind": "collection", "collection": name}

    def fits(action: Action) -> Action:
        body = action.body and json.dumps({**json.loads(action.body), "key": action.id}).encode()
        return action._replace(body=body)

    def look() -> dict[str, Any]:
        return {row.pop("key"): row for row in rows.read().to_pylist()}

    return Place(_sink(declared, db.settings), look, {**declared, "collection": "not_there"}, fits)


def _delta(folder: Path) -> Place:
    settings = Settings(data_dir=folder)
    declared = {"kind": "delta", "table": "out"}

    def look() -> dict[str, Any]:
        found = deltalake.DeltaTable(settings.table_uri("pipelines-out/out")).to_pyarrow_table().to_pylist()
        assert len({row["id"] for row in found}) == len(found), "each record once"
        return {row["id"]: json.loads(row["document"]) for row in found}

    return Place(_sink(declared, settings), look)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("sinks") / "data") as made:
        yield made


NOT_ONLY_ADDED = ["opensearch", "kafka", "kafka transactions", "collection"]
"""A Delta table has all documents, and is created when it is missing."""


@pytest.fixture(params=[*NOT_ONLY_ADDED, "delta"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    match request.param:
        case "collection":
            made = _collection(request.getfixturevalue("db"))
        case "delta":
            made = _delta(tmp_path)
        case "kafka transactions":
            made = _kafka(transactional=True)
        case kind:
            made = _opensearch() if kind == "opensearch" else _kafka()
    made.sink.open()
    yield made
    made.sink.close()


@pytest.mark.quick_cases(1)
def test_all_are_acknowledged_and_there_and_again_without_effect(place: Place) -> None:
    actions = [_action(number) for number in range(500)]
    done = place.put(actions)
    assert (done.acknowledged, done.failures) == (500, [])
    expected = {f"in-0-{number}": {"number": number} for number in range(500)}
    assert place.look() == expected
    place.sink.open()
    assert place.put(actions).acknowledged == 500
    assert place.put(actions[100:200]).acknowledged == 100
    assert place.look() == expected
    assert place.put([]).acknowledged == 0
    # A sink stores the position after the last range, of its own lanes, or none.
    assert place.sink.standing(["in-0", "other-0"]) in ({}, {"in-0": 500})
    place.sink.close()
    place.sink.close()


@pytest.mark.parametrize("place", NOT_ONLY_ADDED, indirect=True)
def test_of_one_key_the_last_wins_and_a_delete_deletes(place: Place) -> None:
    rounds = 20
    told = [
        _action(turn * 7 + number, key=f"k{number}", version=turn * 7 + number)
        for turn in range(rounds)
        for number in range(7)
    ]
    told.append(_action(10_000, key="k3", version=10_000, delete=True))
    assert place.put(told).acknowledged == len(told)
    assert place.look() == {f"k{number}": {"number": (rounds - 1) * 7 + number} for number in range(7) if number != 3}


@pytest.mark.parametrize("place", NOT_ONLY_ADDED, indirect=True)
def test_what_is_not_there_is_refused_and_nothing_answers_is_busy(place: Place, request: pytest.FixtureRequest) -> None:
    kind = place.elsewhere["kind"]
    other = _sink(place.elsewhere, request.getfixturevalue("db").settings if kind == "collection" else None)
    with pytest.raises(SinkRefused):
        other.open()
    other.close()
    if kind == "collection":
        return
    nowhere = dict(place.elsewhere)
    for name, value in (("hosts", ["http://127.0.0.1:9"]), ("bootstrap", ["127.0.0.1:9"])):
        if name in nowhere:
            nowhere[name] = value
    if nowhere["kind"] == "kafka":
        nowhere["socket_timeout_ms"] = 500
    silent = _sink(nowhere)
    with pytest.raises(SinkBusy) as caught:
        silent.open()
    assert caught.value.retriable
    assert caught.value.retry_after > 0
    silent.close()


@pytest.mark.parametrize("seed", range(5))
def test_versions_never_go_back_in_whatever_order_they_are_told(seed: int) -> None:
    dice = random.Random(seed)
    place = _opensearch()
    place.sink.open()
    told = [_action(v, key=f"k{dice.randrange(10)}", version=v, delete=dice.random() < 0.2) for v in range(1, 400)]
    mixed = [*told, *dice.sample(told, 200)]
    dice.shuffle(mixed)
    expected: dict[str, Any] = {}
    for action in told:
        expected[action.id] = None if action.body is None else json.loads(action.body)
    for start in range(0, len(mixed), 97):
        part = mixed[start : start + 97]
        assert put(place.sink, part).acknowledged == len(part)
    assert place.look() == {key: value for key, value in expected.items() if value is not None}
    place.sink.close()


def _faulty(**more: Any) -> tuple[Place, Faulty, OpenSearchSink, list[float]]:
    """A place behind a proxy, its sink, and how long that slept."""
    proxy = Faulty(running_brokers.opensearch().address)
    place = _opensearch(hosts=[proxy.url], requests=1, **more)
    slept: list[float] = []
    sink = place.sink
    assert isinstance(sink, OpenSearchSink)
    sink._sleep = slept.append
    sink.open()
    return place, proxy, sink, slept


@pytest.mark.parametrize(
    "fault",
    [
        refused(429, "circuit_breaking_exception"),
        refused(503, "unavailable"),
        refused(403, "cluster_block_exception"),
        cut_off,
        in_part,
    ],
    ids=["429", "503", "read-only", "cut off", "in part"],
)
def test_what_may_pass_is_sent_again_until_all_is_there(fault: Any) -> None:
    place, proxy, sink, slept = _faulty()
    proxy.faults += [fault, fault, fault]
    told = [_action(number, key=f"k{number % 40}", version=number) for number in range(100)]
    done = put(sink, told)
    assert (done.acknowledged, done.failures) == (100, [])
    assert done.retries > 0
    assert len(slept) == 3
    assert place.look() == {f"k{number % 40}": {"number": number} for number in range(60, 100)}
    sink.close()
    proxy.close()


def test_bulks_shrink_when_refused_and_grow_again() -> None:
    _, proxy, sink, _ = _faulty()
    sink._window.items = 400
    proxy.faults += [refused(429, "busy")] * 3
    put(sink, [_action(number) for number in range(400)])
    assert proxy.bulks[:4] == [400, 200, 100, 50]
    assert proxy.bulks[4:6] == [63, 79]
    sink.close()
    proxy.close()


def test_patience_ends_with_when_to_come_back() -> None:
    _, proxy, sink, _ = _faulty(patience_ms=0)
    proxy.faults += [refused(429, "busy")]
    with pytest.raises(SinkBusy) as caught:
        put(sink, [_action(1)])
    assert caught.value.retry_after > 0
    sink.close()
    proxy.close()


def test_rights_that_are_missing_are_nobody_s_document() -> None:
    _, proxy, sink, _ = _faulty()
    proxy.faults += [refused(403, "security_exception")]
    with pytest.raises(SinkRefused):
        put(sink, [_action(1)])
    sink.close()
    proxy.close()


def test_a_document_that_does_not_fit_is_its_own_failure() -> None:
    place = _opensearch(index_body={"mappings": {"dynamic": "strict", "properties": {"number": {"type": "long"}}}})
    place.sink.open()
    bad: Sequence[Action] = [
        _action(1, key="text", body={"number": "many"}),
        _action(2, key="unknown", body={"other": 1}),
        _action(3, key="k" * 600),
        _action(4, key="object", body={"number": {"a": 1}}),
    ]
    good = [_action(number, key=f"g{number}") for number in range(10, 20)]
    done = put(place.sink, [bad[0], *good[:5], bad[1], bad[2], *good[5:], bad[3]])
    assert done.acknowledged == 10
    assert {failure.record.offset for failure in done.failures} == {1, 2, 3, 4}
    assert all(failure.kind and failure.reason for failure in done.failures)
    assert place.look() == {f"g{number}": {"number": number} for number in range(10, 20)}
    place.sink.close()


def test_without_versions_an_older_document_never_comes_behind_a_newer_of_its_id() -> None:
    place, proxy, sink, _ = _faulty(versions=False)
    proxy.faults += [in_part, in_part, in_part]
    told = [_action(number, key=f"k{number % 5}") for number in range(50)]
    assert put(sink, told).acknowledged == 50
    assert place.look() == {f"k{number}": {"number": 45 + number} for number in range(5)}
    assert max(proxy.bulks) <= 5
    sink.close()
    proxy.close()


@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactions"])
def test_a_message_that_is_too_large_for_the_topic_is_the_only_one_put_aside(transactional: bool) -> None:
    """It takes those with it that share its request."""
    place = _kafka(transactional=transactional, compression="none")
    sink = place.sink
    assert isinstance(sink, KafkaSink)
    topic = sink._declared.topic
    admin = AdminClient({"bootstrap.servers": running_brokers.kafka().address})
    limit = AlterConfigOpType.SET
    entry = ConfigEntry("max.message.bytes", "20000", incremental_operation=limit)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(30)
    sink.open()
    large = {300, 301, 777}
    told = [
        _action(number, key=f"k{number % 50}", body={"number": number, "x": "x" * (30_000 if number in large else 10)})
        for number in range(1000)
    ]
    way = Isolation(sink.write, Errors(tries=1))
    found = way.run(Batch("in-0", 0, 1000, documents=told), Attempts())
    assert found.error is None
    assert {each.record.offset: each.kind for each in found.verdicts.failures} == dict.fromkeys(
        large, "MSG_SIZE_TOO_LARGE"
    )
    assert found.verdicts.acknowledged == 997
    last = {f"k{number % 50}": number for number in range(1000) if number not in large}
    assert {key: value["number"] for key, value in place.look().items()} == last, "of each key the last"
    sink.close()


def _closed(client: OpenSearch, index: str) -> None:
    client.indices.close(index=index)


def _without_write_index(client: OpenSearch, index: str) -> None:
    client.indices.delete(index=index)
    for name in (f"{index}-1", f"{index}-2"):
        client.indices.create(index=name, body={"aliases": {index: {}}})


def _data_stream(client: OpenSearch, index: str) -> None:
    client.indices.delete(index=index)
    client.indices.put_index_template(name=index, body={"index_patterns": [index], "data_stream": {}, "priority": 500})
    client.transport.perform_request("PUT", f"/_data_stream/{index}")


@pytest.mark.parametrize("befalls", [_closed, _without_write_index, _data_stream])
def test_what_takes_no_documents_stops_the_sink_and_says_why(befalls: Callable[[OpenSearch, str], None]) -> None:
    place = _opensearch(requests=1)
    sink, client = place.sink, OpenSearch(running_brokers.opensearch().url)
    assert isinstance(sink, OpenSearchSink)
    sink.open()
    assert put(sink, [_action(1)]).acknowledged == 1
    befalls(client, sink._declared.index_base)
    with pytest.raises(SinkRefused, match=r"closed|write index|data stream|anew"):
        put(sink, [_action(2)])
    with pytest.raises(SinkRefused, match=r"closed|write index|data stream"):
        sink.open()
    sink.close()


def test_an_alias_with_a_write_index_takes_documents_and_one_that_is_gone_is_not_made_an_index() -> None:
    place = _opensearch(requests=1, create_index=False)
    sink, client = place.sink, OpenSearch(running_brokers.opensearch().url)
    assert isinstance(sink, OpenSearchSink)
    name = sink._declared.index_base
    client.indices.create(index=f"{name}-1", body={"aliases": {name: {}}})
    client.indices.create(index=f"{name}-2", body={"aliases": {name: {"is_write_index": True}}})
    sink.open()
    assert put(sink, [_action(1), _action(2)]).acknowledged == 2
    assert len(place.look()) == 2
    for number in (1, 2):
        client.indices.delete_alias(index=f"{name}-{number}", name=name)
    with pytest.raises(SinkRefused):
        put(sink, [_action(3)])
    assert not client.indices.exists(index=name)
    sink.close()


def test_an_index_that_is_deleted_while_it_runs_is_made_as_it_was_declared_or_not_at_all() -> None:
    body = {"mappings": {"dynamic": "strict", "properties": {"number": {"type": "long"}}}}
    place = _opensearch(requests=1, index_body=body)
    sink, client = place.sink, OpenSearch(running_brokers.opensearch().url)
    assert isinstance(sink, OpenSearchSink)
    name, now = sink._declared.index_base, [0.0]
    sink._clock = lambda: now[0]
    sink.open()
    put(sink, [_action(1)])
    client.indices.delete(index=name)
    now[0] += 5
    with pytest.raises(SinkRefused, match="does not exist any more"):
        put(sink, [_action(2)])
    assert not client.indices.exists(index=name)
    sink.open()
    assert client.indices.get_mapping(index=name)[name]["mappings"]["dynamic"] == "strict"
    # In the moment between a look and a bulk: what the bulk makes is seen before anything of it counts as done.
    client.indices.delete(index=name)
    with pytest.raises(SinkRefused, match="replaced during the run"):
        put(sink, [_action(3)])
    sink.close()


def test_an_answer_that_is_no_opensearch_s_is_nobody_s_document() -> None:
    _, proxy, sink, _ = _faulty()
    proxy.lasting.append(html)
    with pytest.raises(SinkRefused, match="not by OpenSearch"):
        put(sink, [_action(number) for number in range(8)])
    sink.close()
    proxy.close()


@pytest.mark.parametrize("whole", [True, False], ids=["the request", "the item"])
@pytest.mark.parametrize("others", [50, 0])
def test_a_document_that_opensearch_fails_on_is_put_aside_by_name(whole: bool, others: int) -> None:
    place, proxy, sink, _ = _faulty(patience_ms=0)
    proxy.lasting.append(trips_over("in-0-7", whole=whole))
    told = [_action(number) for number in range(100, 100 + others)]
    told.insert(others // 2, _action(7))
    if whole and others:  # found by halves, each with its time
        sink._declared = sink._declared.model_copy(update={"patience_ms": 100})
        now = [0.0]
        sink._sleep, sink._clock = lambda _: now.__setitem__(0, now[0] + 0.02), lambda: now[0]
    done = put(sink, told)
    (failure,) = done.failures
    assert (done.acknowledged, failure.kind, failure.record.offset) == (others, "HTTP_500", 7)
    assert "'in-0-7' (in-0-7)" in failure.reason
    assert len(place.look()) == others
    sink.close()
    proxy.close()


def test_a_cluster_that_fails_on_everything_is_busy_and_names_what_it_was_told() -> None:
    _, proxy, sink, _ = _faulty(patience_ms=0)
    proxy.lasting.append(refused(503, "unavailable"))
    with pytest.raises(SinkBusy, match="in-0-1"):
        put(sink, [_action(1)])
    sink.close()
    proxy.close()


def test_where_every_document_is_refused_the_sink_stops_and_of_few_each_is_its_own_failure() -> None:
    place = _opensearch(index_body={"mappings": {"dynamic": "strict", "properties": {"number": {"type": "long"}}}})
    place.sink.open()
    wrong = [_action(number, body={"other": 1}) for number in range(100)]
    assert len(put(place.sink, wrong[:5]).failures) == 5
    with pytest.raises(SinkRefused, match=r"none of 100 documents.*in-0-.*strict_dynamic_mapping_exception"):
        put(place.sink, wrong)
    done = put(place.sink, [*wrong, _action(1000)])
    assert (done.acknowledged, len(done.failures)) == (1, 100)
    place.sink.close()


def test_what_is_older_than_the_index_is_stale_and_what_is_told_again_is_not() -> None:
    place = _opensearch()
    place.sink.open()
    put(place.sink, [_action(10, key="k", version=10)])
    older = put(place.sink, [_action(3, key="k", version=3)])
    again = put(place.sink, [_action(10, key="k", version=10)])
    gone = put(place.sink, [_action(12, key="k", version=12, delete=True), _action(11, key="k", version=11)])
    assert (older.acknowledged, older.stale, older.repeated) == (1, 1, 0)
    assert (again.acknowledged, again.stale, again.repeated) == (1, 0, 1)
    assert (gone.acknowledged, gone.stale) == (2, 1)
    place.sink.close()


def test_by_a_field_the_larger_version_wins_and_of_equal_ones_the_later() -> None:
    place = _opensearch(version_field="number", tombstones="error")
    place.sink.open()
    told = [_action(1, key="k", version=5, body={"n": "a"}), _action(2, key="k", version=5, body={"n": "b"})]
    done = put(place.sink, [*told, _action(3, key="k", version=4, body={"n": "c"})])
    assert (done.acknowledged, done.stale) == (3, 1)
    assert place.look() == {"k": {"n": "b"}}
    place.sink.close()
