"""The sinks of this deployment's own tables.

A collection, in which the last document of a key counts, and a Delta table of all, each once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

import millrace.testing
from millrace.base.errors import InvalidSettings, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.records import Action, Record
from millrace.flows.registry import sink_kinds, sink_of
from millrace.flows.sinks.sink import Sink
from millrace.pipelines.declaration import pipeline_of
from tests.flows.sinks.batches import put

SOURCE = {"kind": "kafka", "bootstrap": ["127.0.0.1:1"], "topics": ["in"]}


def _sink(settings: Settings, declared: dict[str, Any]) -> Sink:
    pipeline = pipeline_of({"id": "x", "source": SOURCE, "sink": declared})
    return sink_of(pipeline.sink, settings, flow=pipeline.name, flush=pipeline.flush)


def _action(offset: int, key: str, body: Any, *, partition: int = 0) -> Action:
    record = Record("in", partition, offset, key.encode(), b"{}", 1_700_000_000_000)
    return Action(record, key, None if body is None else json.dumps(body).encode(), None)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[millrace.testing.Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("sinks") / "data") as made:
        yield made


@pytest.mark.slow
def test_documents_become_rows_and_what_does_not_fit_is_its_own_failure(
    deployment: millrace.testing.Deployment,
) -> None:
    schema = {"id": "int64", "name": "string?", "at": "timestamp?", "day": "date?"}
    collection = deployment.create_collection("people", schema, key="id")
    sink = _sink(deployment.settings, {"kind": "collection", "collection": "people"})
    sink.open()
    told = [
        _action(0, "1", {"id": 1, "name": "a", "at": "2013-01-01T05:00:00Z", "day": "2013-01-01"}),
        _action(1, "2", {"id": 2, "name": "b"}),
        _action(2, "3", {"id": 3, "name": ["no", "text"]}),
        _action(3, "4", {"name": "no key"}),
        _action(4, "1", {"id": 1, "name": "newer"}),
        _action(5, "2", {"id": 2, "name": 5.5, "at": "never"}),
        _action(6, "5", {"id": 5, "other": 1}),
        _action(7, "6", {"id": 6, "name": "gone"}),
        _action(8, "6", None),
        _action(9, "no number", None),
    ]
    done = put(sink, told)
    assert {failure.record.offset for failure in done.failures} == {2, 3, 5, 6, 9}
    assert done.acknowledged == 5
    assert all(failure.reason for failure in done.failures)
    rows = {row["id"]: row["name"] for row in collection.read().to_pylist()}
    assert rows == {1: "newer", 2: "b"}
    again = put(sink, told)
    assert (again.acknowledged, len(again.failures)) == (5, 5)
    assert {row["id"]: row["name"] for row in collection.read().to_pylist()} == rows
    sink.close()
    sink.close()
    missing = _sink(deployment.settings, {"kind": "collection", "collection": "nobody"})
    with pytest.raises(SinkRefused, match="nobody"):
        missing.open()
    missing.close()


def _table(settings: Settings, name: str) -> list[tuple[Any, ...]]:
    uri = settings.table_uri(f"pipelines-out/{name}")
    from deltalake import DeltaTable

    rows = DeltaTable(uri).to_pyarrow_table()
    assert rows.num_rows >= 0
    return duckdb.sql('select partition, "offset", id, document from rows order by 1, 2').fetchall()


def test_a_delta_table_has_each_record_once_whatever_is_repeated(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    first, second = (_sink(settings, {"kind": "delta", "table": "out"}) for _ in range(2))
    told = [_action(offset, f"k{offset}", {"n": offset}, partition=offset % 2) for offset in range(20) if offset != 7]
    first.open()
    assert put(first, told[:10]).acknowledged == 10
    second.open()
    done = put(second, told)
    assert (done.acknowledged, done.repeated) == (19, 10)
    assert put(first, told[5:]).repeated == 14
    # What failed once and comes later, by a redrive, is before the mark and comes in all the same, once.
    late = _action(7, "k7", {"n": 7}, partition=1)
    assert put(first, [late]).repeated == 0
    assert put(second, [late, told[0]]).repeated == 2
    expected = [(offset % 2, offset, f"k{offset}", f'{{"n": {offset}}}') for offset in range(20)]
    assert _table(settings, "out") == sorted(expected)
    first.close()
    second.close()


def test_every_kind_that_can_be_declared_has_a_sink_and_no_other() -> None:
    assert set(sink_kinds()) == {"opensearch", "kafka", "collection", "delta"}
    unknown = pipeline_of({"id": "x", "source": SOURCE, "sink": {"kind": "delta", "table": "out"}})
    object.__setattr__(unknown.sink, "kind", "elsewhere")
    with pytest.raises(InvalidSettings, match="elsewhere"):
        sink_of(unknown.sink, Settings(), flow=unknown.name, flush=unknown.flush)


def test_a_document_stays_where_a_later_one_of_its_key_is_refused(deployment: millrace.testing.Deployment) -> None:
    collection = deployment.create_collection("visitors", {"id": "int64", "name": "string?"}, key="id")
    sink = _sink(deployment.settings, {"kind": "collection", "collection": "visitors"})
    sink.open()
    told = [
        _action(0, "1", {"id": 1, "name": "first"}),
        _action(1, "1", {"id": 1, "name": "good"}),
        _action(2, "1", {"id": 1, "name": ["refused", "by the collection"]}),
        _action(3, "1", {"id": 1, "name": {"again": 1}}),
        _action(4, "2", {"id": 2, "name": "other"}),
    ]
    done = put(sink, told)
    assert [each.record.offset for each in sorted(done.failures, key=lambda each: each.record.offset)] == [2, 3]
    assert done.acknowledged == 3
    assert {row["id"]: row["name"] for row in collection.read().to_pylist()} == {1: "good", 2: "other"}
    sink.close()


def test_a_collection_that_takes_no_document_stops_the_sink_and_says_why(
    deployment: millrace.testing.Deployment,
) -> None:
    collection = deployment.create_collection("strict", {"id": "int64", "name": "string"}, key="id")
    sink = _sink(deployment.settings, {"kind": "collection", "collection": "strict"})
    sink.open()
    wrong = [_action(number, str(number), {"id": number, "other": 1}) for number in range(30)]
    with pytest.raises(SinkRefused, match=r"strict accepted none of 30 documents, the last of them in-0-"):
        put(sink, wrong)
    assert len(put(sink, wrong[:5]).failures) == 5
    mixed = put(sink, [*wrong, _action(99, "99", {"id": 99, "name": "good"})])
    assert (mixed.acknowledged, len(mixed.failures)) == (1, 30)
    assert [row["id"] for row in collection.read().to_pylist()] == [99]
    sink.close()
