"""Documents in many indices of OpenSearch: by date and field, behind an alias that rolls over, in a data stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from opensearchpy import OpenSearch

from millrace.base.errors import PipelineInvalid, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.documents import Refused
from millrace.flows.records import Action, Record
from millrace.flows.registry import sink_of
from millrace.flows.sinks.opensearch import sink as under_test
from millrace.flows.sinks.opensearch.index import client_of, remove
from millrace.flows.sinks.opensearch.model import OpenSearchSink as Declared
from millrace.flows.sinks.opensearch.naming import IndexNames, pattern_of
from millrace.flows.sinks.sink import Sink
from millrace.pipelines.declaration import pipeline_of
from tests import running_brokers
from tests.flows.sinks.batches import put

SOURCE = {"kind": "kafka", "bootstrap": ["127.0.0.1:1"], "topics": ["in"]}
DAY = int(datetime(2026, 11, 26, 23, 30, tzinfo=UTC).timestamp() * 1000)


def _declared(**more: Any) -> dict[str, Any]:
    return {
        "kind": "opensearch",
        "hosts": ["http://127.0.0.1:1"],
        "index_base": "flights",
        "create_index": True,
        **more,
    }


def _action(number: int, document: Any, *, at: int = DAY) -> Action:
    record = Record("in", 0, number, b"k", b"{}", at)
    return Action(record, record.position, json.dumps(document).encode(), None)


@pytest.fixture
def base() -> Iterator[str]:
    name = f"m-{uuid.uuid4().hex[:8]}"
    yield name
    client = OpenSearch(running_brokers.opensearch().url)
    client.indices.delete(index=f"{name}*", ignore_unavailable=True)


def _sink(base: str, **more: Any) -> tuple[Sink, Declared]:
    declared = _declared(hosts=[running_brokers.opensearch().url], index_base=base, **more)
    pipeline = pipeline_of({"id": "x", "source": SOURCE, "sink": declared})
    assert isinstance(pipeline.sink, Declared)
    return sink_of(pipeline.sink, Settings(), flow=pipeline.name, flush=pipeline.flush), pipeline.sink


def _found(index: str) -> dict[str, list[Any]]:
    """Documents by the index that they are in."""
    client = OpenSearch(running_brokers.opensearch().url)
    client.indices.refresh(index=index)
    hits = client.search(index=index, body={"size": 1000, "sort": ["_seq_no"]})["hits"]["hits"]
    found: dict[str, list[Any]] = {}
    for hit in hits:
        found.setdefault(hit["_index"], []).append(hit["_source"])
    return found


@pytest.mark.parametrize(
    ("suffix", "document", "name"),
    [
        ("-{origin}-{+YYYY.MM.dd}", {"origin": "JFK"}, "flights-jfk-2026.11.26"),
        ("-{+yyyyMMdd'HH}", {}, None),
        ("-{+yyyy-MM-dd-HH}", {}, "flights-2026-11-26-23"),
        ("-{a.b}-x", {"a": {"b": 12345678901234567890.25}}, "flights-12345678901234567890.25-x"),
        ("-{a\\.b}", {"a.b": True}, "flights-true"),
    ],
)
def test_an_index_has_a_name_of_date_and_fields(suffix: str, document: Any, name: str | None) -> None:
    names = IndexNames(Declared.model_validate(_declared(index_suffix=suffix)))
    raw = b'{"a":{"b":12345678901234567890.25}}' if "a" in document else json.dumps(document).encode()
    action = _action(1, document)._replace(body=raw)
    assert names.of(action) == (name or "flights-20261126'23")


@pytest.mark.parametrize("document", [{}, {"origin": None}, {"origin": {}}, {"origin": "a b"}, {"origin": "x" * 300}])
def test_a_document_that_names_no_index_is_its_own_failure(document: Any) -> None:
    names = IndexNames(Declared.model_validate(_declared(index_suffix="-{origin}")))
    with pytest.raises(Refused):
        names.of(_action(1, document))


def test_the_template_covers_the_names_and_few_others() -> None:
    assert pattern_of(Declared.model_validate(_declared(index_suffix="-{origin}-{+YYYY}-v1"))) == "flights-*-*-v1"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"index_suffix": "-{+week}"}, "a date consists of"),
        ({"index_suffix": "-{"}, "brace"),
        ({"index_suffix": "-constant"}, "every document would get the same"),
        ({"index_suffix": "-{+YYYY}", "create_index": False}, "create_index"),
        ({"index_suffix": "-{+YYYY}", "data_stream": True}, "one of them"),
        ({"rollover": {}}, "docs, age or size"),
        ({"rollover": {"docs": 1}, "ids": "key"}, "ids to position"),
        ({"data_stream": True, "ids": "key", "versions": False}, "tombstones"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], word: str) -> None:
    with pytest.raises(PipelineInvalid, match=word):
        pipeline_of({"id": "x", "source": SOURCE, "sink": _declared(**more)})


def test_documents_go_into_indices_by_date_and_field_that_a_template_makes(base: str) -> None:
    sink, declared = _sink(
        base, index_suffix="-{origin}-{+YYYY.MM}", index_body={"mappings": {"properties": {"n": {"type": "long"}}}}
    )
    actions = [_action(n, {"origin": "JFK" if n % 2 else "EWR", "n": n}) for n in range(4)]
    actions += [
        _action(4, {"origin": "JFK", "n": 4}, at=0),
        _action(5, {"n": 5}),
        _action(6, {"origin": "JFK", "n": "x"}),
    ]
    for _ in range(2):  # again, without effect
        done = put(sink, actions)
        assert done.acknowledged == 5
        assert sorted(each.kind for each in done.failures) == ["INDEX_NAME", "mapper_parsing_exception"]
    assert {index: [each["n"] for each in rows] for index, rows in _found(f"{base}-*").items()} == {
        f"{base}-jfk-2026.11": [1, 3],
        f"{base}-ewr-2026.11": [0, 2],
        f"{base}-jfk-1970.01": [4],
    }
    sink.close()
    client = client_of(declared)
    remove(client, declared, base)
    assert not client.indices.exists_index_template(name=base)
    client.close()


def test_a_data_stream_gets_each_document_once_with_a_time(base: str) -> None:
    sink, declared = _sink(base, data_stream=True)
    actions = [
        _action(0, {}),
        _action(1, {"n": 1}),
        _action(2, {"@timestamp": 5, "n": 2}),
        _action(3, {"a": "@timestamp"}),
    ]
    assert put(sink, actions).repeated == 0
    again = put(sink, actions)
    assert (again.acknowledged, again.repeated, again.failures) == (4, 4, [])
    ((_, rows),) = _found(base).items()
    assert rows == [
        {"@timestamp": DAY},
        {"@timestamp": DAY, "n": 1},
        {"@timestamp": 5, "n": 2},
        {"@timestamp": DAY, "a": "@timestamp"},
    ]
    sink.close()
    client = client_of(declared)
    plain, _ = _sink(base)
    with pytest.raises(SinkRefused, match=r"set sink\.data_stream"):
        plain.open()
    remove(client, declared, base)
    client.close()


def test_behind_an_alias_a_new_index_begins(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_ROLLOVER_SECONDS", 0.0)
    sink, _ = _sink(base, rollover={"docs": 2}, index_body={"mappings": {"properties": {"n": {"type": "keyword"}}}})
    for part in ([0, 1, 2], [3], [4, 5]):
        assert put(sink, [_action(n, {"n": n}) for n in part]).acknowledged == len(part)
        _found(base)  # refreshed: what rolls over is counted
    sink.close()
    assert {index: [each["n"] for each in rows] for index, rows in _found(base).items()} == {
        f"{base}-000001": [0, 1, 2],
        f"{base}-000002": [3, 4, 5],
    }
    mapped = OpenSearch(running_brokers.opensearch().url).indices.get_mapping(index=f"{base}-000002")
    assert mapped[f"{base}-000002"]["mappings"]["properties"]["n"]["type"] == "keyword"
