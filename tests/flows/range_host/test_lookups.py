"""A lookup in a real collection.

Its rows by key, read again when they are old, kept when the collection is away, one copy for all tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import millrace.testing
from millrace.base.errors import CollectionNotFound, InvalidSettings, LogUnavailable
from millrace.flows.declare.steps import Lookup
from millrace.flows.range_host import lookups
from millrace.flows.range_host.definition import FlowRun
from millrace.flows.range_host.lookups import CollectionRows
from millrace.flows.records import Record
from millrace.flows.transform.transform import Transform
from millrace.pipelines.declaration import pipeline_of

SOURCE = {"kind": "kafka", "bootstrap": ["127.0.0.1:9"], "topics": ["flights"]}
SINK = {"kind": "kafka", "bootstrap": ["127.0.0.1:9"], "topic": "out"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[millrace.testing.Deployment]:
    with millrace.testing.deployment(tmp_path_factory.mktemp("lookups") / "data") as made:
        airlines = made.create_collection(
            "airlines", {"carrier": "string", "name": "string", "size": "int64?"}, key="carrier"
        )
        airlines.insert([{"carrier": "UA", "name": "United", "size": 3}, {"carrier": "DL", "name": "Delta"}])
        numbers = made.create_collection("numbers", {"id": "int64", "word": "string"}, key="id")
        numbers.insert([{"id": 7, "word": "seven"}])
        made.create_collection("pairs", {"a": "string", "b": "string"}, key=["a", "b"])
        yield made


def _step(**more: Any) -> dict[str, Any]:
    return {"kind": "lookup", "collection": "airlines", "key": "carrier", "into": "airline", **more}


def _run(deployment: millrace.testing.Deployment, document: bytes, *steps: dict[str, Any]) -> Any:
    pipeline = pipeline_of({"id": "x", "source": SOURCE, "steps": steps, "sink": SINK})
    definition = FlowRun(deployment.settings, pipeline)
    done = Transform(pipeline, open_rows=definition.rows_of).run([Record("flights", 0, 0, b"k", document, 0)])
    return done.failures[0].kind if done.failures else done.actions[0].body


@pytest.mark.slow
def test_the_row_of_a_document_s_key_goes_where_it_was_declared_to(deployment: millrace.testing.Deployment) -> None:
    assert _run(deployment, b'{"carrier":"UA"}', _step(take=["name", "size"])) == (
        b'{"carrier":"UA","airline":{"name":"United","size":3}}'
    )
    assert _run(deployment, b'{"carrier":"DL"}', _step()) == (
        b'{"carrier":"DL","airline":{"carrier":"DL","name":"Delta","size":null}}'
    )
    assert (
        _run(deployment, b'{"n":7}', _step(collection="numbers", key="n", take=["word"], into="n"))
        == b'{"n":{"word":"seven"}}'
    )
    assert _run(deployment, b'{"carrier":"XX"}', _step()) == "NO_ROW"
    assert _run(deployment, b'{"carrier":"XX"}', _step(missing="null")) == b'{"carrier":"XX","airline":null}'
    assert _run(deployment, b'{"carrier":"XX"}', _step(missing="skip")) == b'{"carrier":"XX"}'


def test_what_is_no_lookup_s_collection_stops_the_task_and_no_document(deployment: millrace.testing.Deployment) -> None:
    with pytest.raises(CollectionNotFound):
        _run(deployment, b'{"carrier":"UA"}', _step(collection="nowhere"))
    with pytest.raises(InvalidSettings, match="primary key of one field"):
        _run(deployment, b'{"carrier":"UA"}', _step(collection="pairs"))


def test_rows_are_read_again_when_they_are_old_and_kept_while_the_collection_is_away(
    deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = CollectionRows(deployment.settings, Lookup.model_validate(_step(refresh_seconds=3600)))
    assert rows.get("B6") is None
    deployment["airlines"].insert([{"carrier": "B6", "name": "JetBlue"}])
    assert rows.get("B6") is None, "they are young"
    rows._read_at -= 3600
    found = rows.get("B6")
    assert found is not None
    assert found["name"] == "JetBlue"

    def away() -> Any:
        raise LogUnavailable("no answer")

    monkeypatch.setattr(rows, "_read", away)
    rows._read_at -= 3600
    assert rows.get("B6") == found
    other = CollectionRows(deployment.settings, Lookup.model_validate(_step()))
    monkeypatch.setattr(other, "_read", away)
    with pytest.raises(LogUnavailable):
        other.get("B6")


def test_what_is_too_large_for_memory_is_said(
    deployment: millrace.testing.Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MAX_ROWS", 1)
    with pytest.raises(InvalidSettings, match="more than 1 rows"):
        CollectionRows(deployment.settings, Lookup.model_validate(_step())).get("UA")


def test_the_tasks_of_a_process_share_the_rows(deployment: millrace.testing.Deployment) -> None:
    pipeline = pipeline_of({"id": "x", "source": SOURCE, "steps": [_step()], "sink": SINK})
    definition = FlowRun(deployment.settings, pipeline)
    (step,) = pipeline.transform.steps
    assert isinstance(step, Lookup)
    assert definition.rows_of(step) is definition.rows_of(step)
