"""A flow whose source has Debezium's events: steps see rows, letters have the records as they came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace.base.errors import PipelineInvalid
from millrace.flows.batch import Batch, parts_at_truncations
from millrace.flows.declare.flow import Flow
from millrace.flows.records import OPERATION, Action, Failure, Record
from millrace.flows.transform.transform import Rules, Transform
from millrace.pipelines.declaration import as_pipeline, pipeline_of
from tests.flows.debezium.samples import event, record

ANNE = {"id": 1004, "first_name": "Anne"}


def _pipeline(*steps: Any, sink: Any = None, **debezium: Any) -> Flow:
    source = {"kind": "kafka", "bootstrap": ["127.0.0.1:9092"], "topics": ["shop.t"], "format": "debezium"}
    into = {"kind": "opensearch", "hosts": ["http://127.0.0.1:9200"], "index_base": "t", "ids": "key", **(sink or {})}
    return pipeline_of({"id": "x", "source": {**source, "debezium": debezium}, "steps": steps, "sink": into})


def test_a_row_goes_through_the_steps_and_a_delete_to_its_key() -> None:
    done = Transform(_pipeline({"kind": "constant", "fields": {"from": "shop"}})).run(
        [
            record(event("c", None, ANNE), {"id": 1004}, offset=5),
            record(event("d", ANNE), {"id": 1004}, offset=6),
            record(None, {"id": 1004}, offset=7),
        ]
    )
    here, gone = done.actions
    assert (here.id, json.loads(here.body or b""), here.version) == ("1004", {**ANNE, "from": "shop"}, 5)
    assert (gone.id, gone.body, gone.version) == ("1004", None, 6)
    assert (done.filtered, done.failures) == (1, [])


def test_versions_may_be_positions_of_the_database() -> None:
    done = Transform(_pipeline(version="position")).run(
        [record(event("c", None, ANNE), {"id": 1004}), record(event("d", ANNE, ts_ms=2), {"id": 1004}, offset=8)]
    )
    assert [each.version for each in done.actions] == [24_023_128, 24_023_128]


def test_a_poison_event_is_a_letter_with_the_record_as_it_came() -> None:
    wrong = [record(event("x", None, ANNE), {"id": 1}, offset=1), record(b"{", {"id": 1}, offset=2)]
    done = Transform(_pipeline()).run([*wrong, record(event("c", None, ANNE), {"id": 1004}, offset=3)])
    assert [(each.record, each.stage, each.step, each.kind) for each in done.failures] == [
        (wrong[0], "VALUE_CONVERTER", "debezium", "UNKNOWN_OP"),
        (wrong[1], "VALUE_CONVERTER", "debezium", "NO_JSON"),
    ]
    assert len(done.actions) == 1


def test_a_failure_of_a_step_or_of_the_sink_has_the_record_as_it_came() -> None:
    came = record(event("c", None, ANNE), {"id": 1004})
    done = Transform(_pipeline({"kind": "compute", "fields": {"a": "doc.none"}})).run([came])
    assert [each.record for each in done.failures] == [came]
    (action,) = Transform(_pipeline()).run([came]).actions
    assert action.record != came
    assert Failure(action.record, "TASK_PUT", "sink", "K", "why").as_received().record == came
    assert Failure(came, "TASK_PUT", "sink", "K", "why").as_received().record == came


def test_a_sample_shows_its_row() -> None:
    transform = Transform(Rules.of(_pipeline()))
    shown = transform.show(record(event("c", None, ANNE), {"id": 1004}))
    assert (shown.outcome, shown.id, shown.document) == ("index", "1004", ANNE)
    assert transform.show(record(event("d", ANNE), {"id": 1004}, offset=8)).outcome == "delete"
    assert transform.show(record({"ts_ms": 1}, {"serverName": "shop"}, offset=9)).outcome == "ignored"
    wrong = transform.show(record(event("x", None, ANNE), {"id": 1004}))
    assert (wrong.outcome, wrong.steps[0].step) == ("error", "debezium")


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"format": "json", "debezium": {"unwrapped": True}}, "source"),
        ({"debezium": {"unwrapped": True, "version": "position"}}, "source"),
        ({"debezium": {"types": {"a": "Moment"}}}, "source"),
        ({"debezium": {"key": ["a", "a"]}}, "source"),
        ({"topics": ["a", "b"], "debezium": {"truncates": "apply"}}, "source"),
        ({"debezium": {"registry": {"url": "http://169.254.169.254:80:1"}}}, "source"),
        ({"debezium": {"registry": {"url": "ftp://registry"}}}, "source"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(source: dict[str, Any], field: str) -> None:
    whole: Any = {"kind": "kafka", "bootstrap": ["127.0.0.1:9092"], "topics": ["t"], "format": "debezium", **source}
    with pytest.raises(PipelineInvalid) as error:
        pipeline_of({"id": "x", "source": whole, "sink": {"kind": "collection", "collection": "c"}})
    assert all(each["field"].startswith(field) for each in error.value.problems)


def test_a_registrys_password_is_a_secret() -> None:
    pipeline = _pipeline(registry={"url": "https://registry:8081", "user": "me", "password": "hush"})
    assert "hush" not in json.dumps(as_pipeline(pipeline))
    assert pipeline.secrets() == {"source.debezium.registry.password": "hush"}
    assert pipeline_of(as_pipeline(pipeline), secrets=pipeline.secrets()) == pipeline


def test_a_batch_is_parted_so_that_each_truncation_is_first() -> None:
    def action(offset: int, *, truncates: bool = False) -> Action:
        headers = [(OPERATION, b"t")] if truncates else []
        made = Record("t", 0, offset, None if truncates else b"k", None if truncates else b"{}", 0, headers)
        return Action(made, "", made.value, None)

    documents = [action(3), action(4, truncates=True), action(5), action(8, truncates=True), action(9, truncates=True)]
    parts = list(parts_at_truncations(Batch("t-0", 2, 12, documents=documents, generation=3)))
    assert [(each.start, each.end, len(each.documents or ()), each.generation) for each in parts] == [
        (2, 4, 1, 3),
        (4, 8, 2, 3),
        (8, 9, 1, 3),
        (9, 12, 1, 3),
    ]
    whole = Batch("t-0", 2, 12, documents=documents[1:3])
    assert list(parts_at_truncations(whole)) == [whole]
    assert list(parts_at_truncations(Batch("t-0", 2, 2, documents=[]))) != []
