"""A declaration says what is wrong with it field by field, comes back from JSON as it was,
and keeps its secrets to itself.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import PipelineInvalid
from millrace.flows.declare.paths import joined, split, template
from millrace.pipelines.declaration import as_pipeline, pipeline_of, restarts_of

SOURCE = {"kind": "kafka", "bootstrap": ["127.0.0.1:9092"], "topics": ["flights"]}
SINK = {"kind": "opensearch", "hosts": ["http://127.0.0.1:9200"], "index_base": "flights"}
STEPS = [
    {"kind": "rename", "fields": {"dep_delay": "delay.departure"}},
    {"kind": "cast", "fields": {"flight": "string", "time_hour": "timestamp"}},
    {"kind": "drop", "fields": ["tailnum"]},
    {"kind": "constant", "fields": {"year": 2013, "tags": ["nyc", {"a": None}]}},
    {"kind": "template_id", "template": "{carrier}-{flight}-{{x}}"},
    {"kind": "lookup", "collection": "airlines", "key": "carrier", "into": "airline"},
    {"kind": "flatten", "separator": "_"},
    {"kind": "filter", "keep": "doc.distance > 100 && record.offset >= 0"},
    {"kind": "json_schema", "schema": {"type": "object", "required": ["carrier"]}},
    {"kind": "compute", "fields": {"speed": "double(doc.distance) / double(doc.air_time)"}},
]


def _declared(**fields: Any) -> dict[str, Any]:
    return {"id": "flights", "source": SOURCE, "steps": STEPS, "sink": SINK, **fields}


def _problems(value: Any) -> dict[str, str]:
    with pytest.raises(PipelineInvalid) as caught:
        pipeline_of(value)
    return {each["field"]: each["message"] for each in caught.value.problems}


def test_the_defaults_are_the_reference_document_s() -> None:
    made = pipeline_of({"id": "flights", "source": SOURCE, "sink": SINK})
    assert (made.flush.mib, made.flush.items, made.flush.seconds) == (5, 10_000, 3)
    assert (made.failure_threshold, made.recovery.interval_minutes) == (10, 5)
    source = made.source
    assert source.kind == "kafka"
    assert (source.session_timeout_ms, source.socket_timeout_ms, source.max_poll_interval_ms) == (
        45_000,
        60_000,
        300_000,
    )
    assert source.offset_reset == "earliest"
    assert made.topics() == {"input": ("flights",), "output": (), "error": ("flights.errors",)}
    assert made.consumer_group == "millrace-flights"


def test_it_comes_back_from_json_as_it_was() -> None:
    made = pipeline_of(_declared())
    text = json.dumps(as_pipeline(made))
    again = pipeline_of(json.loads(text))
    assert again == made
    assert json.dumps(as_pipeline(again)) == text
    assert json.loads(text)["version"] == 1


def test_secrets_are_written_once_and_never_shown() -> None:
    security = {"protocol": "SASL_SSL", "mechanism": "PLAIN", "username": "u", "password": "hidden-1"}
    made = pipeline_of(
        _declared(
            source={**SOURCE, "security": security},
            sink={**SINK, "username": "admin", "password": "hidden-2"},
            errors={"cluster": {"bootstrap": ["other:9092"], "security": {**security, "password": "hidden-3"}}},
        )
    )
    shown = json.dumps(as_pipeline(made)) + repr(made) + str(made)
    assert "hidden" not in shown
    assert made.secrets() == {
        "source.security.password": "hidden-1",
        "sink.password": "hidden-2",
        "errors.cluster.security.password": "hidden-3",
    }
    assert pipeline_of(as_pipeline(made), secrets=made.secrets()) == made
    assert "source.security" in _problems(as_pipeline(made))
    # A secret that is given anew wins over the one that was kept; one of a part that is gone is dropped.
    changed = as_pipeline(made) | {"sink": {**SINK, "username": "admin", "password": "newer"}}
    assert pipeline_of(changed, secrets=made.secrets()).secrets()["sink.password"] == "newer"
    assert not pipeline_of(_declared(), secrets={"nowhere.password": "x"}).secrets()


def test_what_is_wrong_is_told_by_the_field_that_its_writer_knows() -> None:
    found = _problems(
        {
            "id": "Not This",
            "source": {"kind": "kafka", "topics": ["a b"], "session": 1},
            "sink": {**SINK, "index_base": "Upper", "hosts": ["ftp://x"]},
            "steps": [
                {"kind": "filter", "keep": "carrier == 'UA'"},
                {"kind": "json_schema", "schema": {"type": "nothing"}},
                {"kind": "magic"},
                {"kind": "template_id", "template": "fixed"},
                {"kind": "compute", "fields": {"x": "1 +"}},
                {"kind": "drop", "fields": ["a..b"]},
            ],
            "flush": {"items": 0},
            "typo": 1,
        }
    )
    assert set(found) == {
        "id",
        "source.bootstrap",
        "source.topics.0",
        "source.session",
        "sink.index_base",
        "sink.hosts.0",
        "steps.0.keep",
        "steps.1.schema",
        "steps.2",
        "steps.3.template",
        "steps.4.fields.x",
        "steps.5.fields.0",
        "flush.items",
        "typo",
    }
    assert "doc.carrier" in found["steps.0.keep"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sink": {**SINK, "ids": "template"}, "steps": []}, ""),
        ({"errors": {"topic": "flights"}}, ""),
        ({"sink": {"kind": "kafka", "bootstrap": SOURCE["bootstrap"], "topic": "flights"}}, ""),
        ({"source": {"kind": "collection", "collection": "c"}}, ""),
        ({"source": {**SOURCE, "topics": ["flights", "flights"]}}, "source"),
        ({"source": {**SOURCE, "security": {"protocol": "SSL", "username": "u"}}}, "source.security"),
        ({"source": {**SOURCE, "bootstrap": ["nowhere"]}}, "source.bootstrap.0"),
        ({"sink": {**SINK, "index_body": {"settings": {}}}}, "sink"),
        ({"steps": [{"kind": "filter", "keep": "true || " * 400 + "true"}]}, "steps.0.keep"),
        ({"steps": [{"kind": "filter", "keep": "[1].all(a, [1].all(b, [1].all(c, [1].all(d, true))))"}]},
            "steps.0.keep"),
        ({"steps": [{"kind": "json_schema", "schema": {"$ref": "http://127.0.0.1:9/secret"}}]}, "steps.0.schema"),
        ({"steps": [{"kind": "constant", "fields": {"x": float("nan")}}]}, "steps.0.fields.x"),
        ({"version": 2}, "version"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(change: dict[str, Any], field: str) -> None:
    assert set(_problems(_declared(**change))) == {field}


@pytest.mark.parametrize("value", [None, [], "x", 3, {}, {"id": 1, "source": [], "sink": "x", "steps": {}}])
def test_what_is_no_declaration_is_refused(value: Any) -> None:
    assert _problems(value)


def test_a_value_nested_without_end_is_refused() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert _problems(_declared(steps=[{"kind": "constant", "fields": {"x": deep}}]))


def test_a_change_says_whether_it_needs_a_restart() -> None:
    made = pipeline_of(_declared())
    assert restarts_of(made, pipeline_of(_declared(name="Flights", labels={"a": "b"}))) == []
    assert restarts_of(made, pipeline_of(_declared(flush={"items": 5}, steps=[]))) == ["flush", "steps"]


_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)


@given(st.lists(_NAMES, min_size=1, max_size=6))
def test_any_names_make_a_path(parts: list[str]) -> None:
    assert split(joined(parts)) == tuple(parts)


@given(
    st.lists(
        st.tuples(_NAMES, st.lists(_NAMES.filter(lambda t: not set(t) & set("{}")), min_size=1, max_size=3)),
        min_size=1,
        max_size=4,
    ),
    _NAMES,
)
def test_any_texts_and_paths_make_a_template(holes: list[tuple[str, list[str]]], end: str) -> None:
    def told(text: str) -> str:
        return text.replace("{", "{{").replace("}", "}}")

    made = template("".join(f"{told(text)}{{{joined(path)}}}" for text, path in holes) + told(end))
    assert made.texts == (*(text for text, _ in holes), end)
    assert made.paths == tuple(tuple(path) for _, path in holes)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["kind", "id", "source", "kafka", "steps", "sink", "x"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(["id", "source", "sink", "steps", "errors", "flush", "recovery", "version"]), _JSON, max_size=5
    )
)
def test_nonsense_is_told_and_never_breaks(changes: dict[str, Any]) -> None:
    try:
        made = pipeline_of(_declared(**changes))
    except PipelineInvalid as error:
        problems = error.problems
    else:
        assert pipeline_of(as_pipeline(made)) == made
        return
    assert problems
    assert all(isinstance(each["field"], str) and each["message"] for each in problems)


def test_what_is_nested_too_deep_is_said_with_secrets_too() -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    with pytest.raises(PipelineInvalid, match="deep"):
        pipeline_of({"id": "x", "steps": deep}, secrets={"sink.password": "p"})


def test_versions_that_cannot_order_documents_are_told_with_the_reason() -> None:
    two = {"kind": "kafka", "bootstrap": ["h:1"], "topics": ["a", "b"]}
    sink = {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i", "ids": "key"}
    made = lambda source=two, **more: pipeline_of({"id": "x", "source": source, "sink": {**sink, **more}})  # noqa: E731
    problem = made().unordered()
    assert problem is not None
    assert (problem.field, problem.kind) == ("sink.version_field", "versions")
    for ordered in (
        made(versions=False),
        made(ids="position"),
        made(version_field="at", tombstones="ignore"),
        made({**two, "topics": ["a"]}),
    ):
        assert ordered.unordered() is None
    with pytest.raises(PipelineInvalid, match="set tombstones to ignore or error"):
        made(version_field="at")
    with pytest.raises(PipelineInvalid, match="version_field needs versions"):
        made(version_field="at", versions=False, tombstones="error")
