"""One model of a flow: declared in any spelling it is the same, comes back from JSON as it was, and has one host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import millrace.testing
from millrace.base.errors import InvalidStream, PipelineInvalid, StreamNotFound
from millrace.base.settings import Settings
from millrace.flows.declare import spellings
from millrace.flows.declare.checks import check
from millrace.flows.declare.discovery import declared_flow, declared_flows
from millrace.flows.declare.file import flow_of_file
from millrace.flows.declare.flow import Flow, Transform
from millrace.flows.declare.stream import From, Into, Stream, stream_of
from millrace.flows.directory import declared_file, find_flow, flow_statuses
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sources.collection.model import CollectionSource
from millrace.pipelines.declaration import as_pipeline
from tests.flows.declare.test_pipeline import SINK as INDEX
from tests.flows.declare.test_pipeline import SOURCE as TOPIC
from tests.flows.declare.test_pipeline import STEPS

GOLDEN = json.loads((Path(__file__).parent / "golden_streams.json").read_text(encoding="utf-8"))
DEMO = {
    "name": "one",
    "source": {"kind": "collection", "collection": "c"},
    "sink": {"kind": "collection", "collection": "d"},
}
KEY = {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i", "key": "id"}
MARKED = {"column": "at", "delay": "1 hour"}
RISING = {"pattern": {"match_recognize": "ORDER BY at MEASURES A.id AS id PATTERN (A B) DEFINE B AS id > A.id"}}


def flow(**fields: Any) -> Flow:
    return Flow.of({**DEMO, **fields})


# --- spellings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN, ids=[each["what"] for each in GOLDEN])
def test_a_stream_is_shown_as_a_flow_of_the_same_fingerprint(golden: dict[str, Any]) -> None:
    made = stream_of(golden["declared"])
    shown = json.loads(json.dumps(made.to_json()))
    again = Flow.parse(shown, secrets=made.secrets())
    assert (made.host, shown["host"], again.to_json()) == ("spark", "spark", shown)
    if golden["what"] != "kafka spaces":  # the addresses are shown as a list
        assert again == made
        assert again.fingerprint() == golden["fingerprint"]


_TEXT = st.text("abcäö 1", max_size=8)
_PART = {
    "source": st.sampled_from(
        [TOPIC, {**TOPIC, "assignment": "group"}, {"kind": "kafka", "bootstrap": ["h:1"], "topics_regex": "a.*"},
         {"kind": "collection", "collection": "c", "start": "latest"}]
    ),
    "sink": st.sampled_from(
        [INDEX | {"ids": "key"}, {"kind": "collection", "collection": "d"},
         {"kind": "kafka", "bootstrap": ["o:1"], "topic": "out", "transactional": True},
         INDEX | {"ids": "key", "username": "u", "password": "hidden"}]
    ),
    "steps": st.lists(st.sampled_from(STEPS), max_size=4),
    "errors": st.sampled_from([{"collection": "letters"}, {"cluster": {"bootstrap": ["e:1"]}, "topic": "late"}]),
    "name": _TEXT, "description": _TEXT, "account": _TEXT, "labels": st.dictionaries(_TEXT, _TEXT, max_size=2),
    "flush": st.fixed_dictionaries({"items": st.integers(1, 99)}), "failure_threshold": st.integers(1, 20),
    "recovery": st.sampled_from([{}, {"attempts": 3}]), "resources": st.sampled_from([{}, {"memory_mib": 512}]),
    "deployment": st.just("service"),
}  # fmt: skip
_PIPELINES = st.fixed_dictionaries(
    {
        "id": st.from_regex(r"\A[a-z0-9][a-z0-9-]{0,8}\Z"),
        **{each: _PART[each] for each in ("source", "sink", "errors")},
    },
    optional={name: each for name, each in _PART.items() if name not in ("source", "sink", "errors")},
)


@given(_PIPELINES)
def test_a_pipeline_is_a_flow_and_comes_back_as_the_same_json(declared: dict[str, Any]) -> None:
    made = Flow.parse(declared, spelling="pipeline")
    written, secrets = as_pipeline(made), made.secrets()
    assert "hidden" not in json.dumps(written) + json.dumps(made.to_json())
    assert Flow.parse(written, spelling="pipeline", secrets=secrets) == made
    assert json.dumps(as_pipeline(Flow.parse(written, spelling="pipeline", secrets=secrets))) == json.dumps(written)
    assert (made.host, written["id"], written["name"]) == ("range", declared["id"], declared.get("name", ""))
    for unset in (True, False):
        assert Flow.parse(json.loads(json.dumps(made.to_json(unset=unset))), secrets=secrets) == made
    assert as_pipeline(Flow.parse(made.to_json(), secrets=secrets)) == written


_ROWS = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"\A[a-z][a-z0-9_]{0,8}\Z"),
        "source": st.sampled_from([
            {"kind": "collection", "collection": "c", "watermark": MARKED},
            {**TOPIC, "columns": {"id": "int64", "at": "timestamp"}, "watermark": MARKED},
        ]),
        "transform": st.sampled_from([
            {"sql": "select id from c", "tables": {"t": {"collection": "t", "at": "now"}}},
            {"function": "pkg.mod:f", "output_mode": "update"}, {"operator": RISING},
            {"sql": "select 1", "operator": {"distinct": {"keys": ["id"]}, "shards": 4}},
        ]),
        "sink": st.sampled_from([
            KEY, {"kind": "collection", "collection": "d", "mode": "upsert", "create": True, "key": "id"},
            {"kind": "delta", "path": "/t"}, {"kind": "function", "function": "pkg.mod:g"},
            {"kind": "kafka", "bootstrap": ["h:1", "i:2"], "topic": "out", "compression": "none"},
        ]),
    },
    optional={"version": st.integers(1, 5), "seconds": st.floats(0, 9), "group": st.just("g"),
              "description": _TEXT},
)  # fmt: skip


@given(_ROWS)
def test_a_stream_and_a_flow_of_the_same_fields_are_equal(declared: dict[str, Any]) -> None:
    made = Flow.of(declared)
    transform = dict(declared["transform"])
    stream = {name: each for name, each in declared.items() if name not in ("transform", "description")}
    if "function" in transform:
        transform["transform"] = transform.pop("function")
    if "description" in declared:
        stream["words"] = declared["description"]
    plain = {**stream, **transform, "sink": spellings.stream_sink(made.sink)}
    assert stream_of(plain) == made
    assert stream_of(plain).fingerprint() == made.fingerprint()
    assert Flow.parse(json.loads(json.dumps(made.to_json()))) == made
    assert made.host == "spark"


def test_python_and_yaml_declare_the_same() -> None:
    made = Flow(
        name="one",
        source=CollectionSource(collection="c"),
        transform=Transform(function=spellings.plain, output_mode="update"),
        sink=CollectionSink(collection="d", mode="upsert"),
    )
    function = "millrace.flows.declare.spellings:plain"
    sink = {**DEMO["sink"], "mode": "upsert"}
    assert made == flow(transform={"function": function, "output_mode": "update"}, sink=sink)
    assert Flow(**{**DEMO, "transform": spellings.plain}) == flow(transform=function)
    assert Flow(**{**DEMO, "transform": STEPS[:2], "errors": {"collection": "e"}}).transform.steps[0].kind == "rename"
    as_stream = Stream(
        name="one", source=From(collection="c"), transform=spellings.plain, output_mode="update",
        sink=Into(collection="d", mode="upsert"),
    )  # fmt: skip
    assert (as_stream, as_stream.fingerprint()) == (made, made.fingerprint())
    with pytest.raises(ValidationError):
        Flow(name="No", **{name: each for name, each in DEMO.items() if name != "name"})


# --- the host ---------------------------------------------------------------------------------------------------------

LETTERS = {"errors": {"collection": "letters"}}
TABLE = {"kind": "mariadb", "host": "h", "user": "u", "database": "d", "table": "t"}


@pytest.mark.parametrize(
    ("fields", "host"),
    [
        ({**LETTERS}, "range"),
        ({"transform": STEPS[:1], **LETTERS}, "range"),
        ({"source": TOPIC, "sink": INDEX}, "range"),
        ({"transform": {"sql": "select 1"}}, "spark"),
        ({"transform": "a:b"}, "spark"),
        ({"host": "spark"}, "spark"),
        ({"source": {**TOPIC, "columns": {"id": "int64"}}}, "spark"),
        ({"sink": {"kind": "function", "function": "a:b"}}, "spark"),
        ({"sink": {**DEMO["sink"], "mode": "upsert"}}, "spark"),
        ({"sink": {**DEMO["sink"], "create": True}}, "spark"),
        ({"source": TABLE, "sink": {**DEMO["sink"], "create": True}, **LETTERS}, "range"),
    ],
)
def test_the_host_is_computed_from_what_is_declared(fields: dict[str, Any], host: str) -> None:
    assert flow(**fields).host == host


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"transform": {"steps": STEPS[:1], "operator": RISING}}, "transform: steps are for documents, but a Spark"),
        ({"transform": {"steps": STEPS[:1], "sql": "select 1"}}, "transform: steps are for documents"),
        ({"host": "range", "transform": {"sql": "select 1"}}, "transform: sql is for rows, but the range loop"),
        ({"host": "range", "sink": {"kind": "function", "function": "os:system"}}, "sink: a function is for rows"),
        ({"transform": "a:b", "recovery": {"attempts": 1}}, "recovery: recovery is for documents"),
        ({"transform": "a:b", "errors": {"topic": "t"}}, "errors.cluster: the source has no brokers"),
        ({"transform": "a:b", "sink": INDEX}, "ids from columns: set 'key'"),
        ({"host": "spark", "source": TABLE}, "source: a mariadb is for documents"),
        ({"transform": STEPS[:1], "sink": {**DEMO["sink"], "create": True}, **LETTERS}, "records are unknown"),
        ({"sink": {**DEMO["sink"], "on_schema_change": "alter"}, **LETTERS}, "the columns of a collection's records"),
        ({"host": "range", "sink": {**DEMO["sink"], "create": True}, **LETTERS}, "sink: create is for rows"),
        ({"source": TABLE, "transform": STEPS[:1], "sink": {**DEMO["sink"], "create": True}, **LETTERS},
            "the collection has the table's columns, and steps may change them"),
        ({"guarantee": "exactly once", **LETTERS}, "guarantee: from a collection to this collection it is effectively"),
        ({"schedule": "every day"}, "schedule: is continuous, one of @hourly"),
        ({"schedule": "@daily", "transform": "a:b", "group": "light"}, "group: flows of a group share a driver"),
        ({"transform": 7}, "transform: "),
        ({"transform": [{"kind": "cast", "fields": {"a": "nothing"}}]}, "transform.0.fields.a: is one of"),
        ({"transform": {"steps": [{"kind": "cast", "fields": {"a": "no"}}]}}, "transform.steps.0.fields.a: is one"),
    ],
)  # fmt: skip
def test_what_fits_no_host_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidStream, match=words):
        flow(**fields)


def test_a_pipeline_of_the_api_runs_no_function_and_has_no_fields_of_flows() -> None:
    declared = {"id": "p", "source": TOPIC, "sink": INDEX}
    for more, field in (
        ({"sink": {"kind": "function", "function": "os:system"}}, "sink"),
        ({"transform": {"function": "os:system"}}, "transform"),
        ({"host": "spark"}, "host"),
        ({"late": {"kind": "function", "function": "os:system"}}, "late"),
        ({"steps": [{"kind": "cast", "fields": {"a": "nothing"}}]}, "steps.0.fields.a"),
        ({"id": "No"}, "id"),
        ({"name": 7}, "name"),
        ({"schedule": "@daily"}, "schedule"),
        ({"version": 2}, "version"),
    ):
        with pytest.raises(PipelineInvalid) as caught:
            Flow.parse({**declared, **more}, spelling="pipeline")
        assert [each["field"] for each in caught.value.problems] == [field]


def test_a_schedule_changes_no_rows_and_so_no_checkpoint() -> None:
    always, nightly = flow(transform="a:b"), flow(transform="a:b", schedule="0 2 * * *")
    assert (always.scheduled, nightly.scheduled) == (False, True)
    assert always.fingerprint() == nightly.fingerprint()
    assert Flow.parse(nightly.to_json()) == nightly
    assert always.restarts(nightly) == ["schedule"]


def test_letters_of_rows_go_where_the_flow_says_unless_a_part_says_otherwise() -> None:
    made = flow(source={**TOPIC, "columns": {"id": "int64"}}, sink={**KEY, "dead_letters": "own"}, **LETTERS)
    assert made.source.kind == "kafka"
    assert made.sink.kind == "opensearch"
    assert (made.source.dead_letters, made.sink.dead_letters) == ("letters", "own")
    assert Flow.parse(made.to_json()) == made


# --- declared ---------------------------------------------------------------------------------------------------------

PAGE = """
flows:
  - name: by-origin
    source: {kind: collection, collection: flights, watermark: {column: at, delay: 1 day}}
    transform: {sql: "select origin, count(*) as n from flights group by origin, window(at, '1 hour')"}
    sink: {kind: delta, path: /tables/by_origin}
  - name: late_flights
    description: Late ones.
    source: {kind: collection, collection: flights}
    transform:
      - {kind: filter, keep: doc.delay > 15}
    sink: {kind: kafka, bootstrap: ["k:1"], topic: late}
    errors:
      cluster:
        bootstrap: ["k:1"]
        security: {protocol: SASL_SSL, mechanism: PLAIN, username: u, password: "${env:KAFKA_PASSWORD}"}
streams:
  - {name: plain, source: flights, sink: copies}
pipelines:
  - id: old
    source: {kind: collection, collection: flights}
    sink: {kind: collection, collection: c}
    errors: {collection: l}
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("KAFKA_PASSWORD", "hidden")
    (tmp_path / "flows.yaml").write_text(PAGE, encoding="utf-8")
    return Settings(data_dir=tmp_path / "data", flow_declarations=str(tmp_path / "flows.yaml"))


def test_a_file_declares_flows_of_either_host_in_each_spelling(settings: Settings) -> None:
    found = declared_flows(settings, shipped=False)
    hosts = {"by-origin": "spark", "late_flights": "range", "plain": "spark", "old": "range"}
    assert {name: each.host for name, each in found.items()} == hosts
    assert sorted(declared_flows(settings, shipped=False, host="range")) == ["late_flights", "old"]
    with pytest.raises(StreamNotFound, match="no flow 'gone' is declared; there are late_flights, old"):
        declared_flow(settings, "gone", host="range")
    statuses = {each.name: each for each in flow_statuses(settings) if each.name in hosts}
    assert {name: each.host for name, each in statuses.items()} == hosts
    late = statuses["late_flights"]
    assert (late.state, late.words, late.source, late.sink) == ("new", "Late ones.", "collection:flights", "kafka:late")


def test_a_declared_flow_is_handed_to_its_worker_with_its_secrets_sealed(settings: Settings, tmp_path: Path) -> None:
    from millrace.flows.declare.configuration import Configuration
    from millrace.flows.declare.keys import Keys

    named = find_flow(settings, "late_flights")
    assert not declared_file(settings, "late_flights").exists(), "who looks at it writes nothing"
    assert named.stream is None
    file = named.worker_file(settings)
    assert "hidden" not in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o077 == 0
    defaults = Configuration.parse({"server": {"flushItems": 7}})
    read = flow_of_file(file, defaults, keys=Keys(settings.data_dir))
    assert (read.flush.items, read.failure_threshold) == (7, 10)
    assert read.secrets() == {"errors.cluster.security.password": "hidden"}
    assert find_flow(settings, "by-origin").stream is not None


def test_a_module_declares_flows_in_a_list_or_as_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = (
        "from millrace.flows.declare.flow import Flow\n"
        "from millrace.flows.declare.stream import Stream\n"
        f"one = Flow(**{DEMO!r} | {{'host': 'spark'}})\n"
    )
    (tmp_path / "alone_flows.py").write_text(begin, encoding="utf-8")
    both = (
        begin + "FLOWS = [one]\n"
        "STREAMS = [Stream(name='two', source='a', sink='b'), dict(name='three', source='a', sink='b')]\n"
    )
    (tmp_path / "both_flows.py").write_text(both, encoding="utf-8")
    (tmp_path / "wrong_flows.py").write_text(begin + "Flow(name='x')\n", encoding="utf-8")
    (tmp_path / "no_flows.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def names(modules: str) -> list[str]:
        return list(declared_flows(Settings(data_dir=tmp_path, flow_declarations=modules), shipped=False))

    assert names("alone_flows") == ["one"]
    assert names("both_flows,both_flows") == ["one", "two", "three"]
    for module, words in (
        ("wrong_flows", "cannot be imported: 2 validation"),
        ("no_flows", "has no list 'FLOWS'"),
    ):
        with pytest.raises(InvalidStream, match=words):
            names(module)


def test_what_a_check_finds_is_at_the_path_that_was_written(tmp_path: Path) -> None:
    with millrace.testing.deployment(tmp_path / "data") as db:
        db.create_collection("c", {"id": "int64"}, key="id")
        db.create_collection("d", {"id": "int64"}, key="id")
        asked = "select id from other"
        for made, path in (
            (flow(transform={"sql": asked}), "transform.sql"),
            (stream_of({**DEMO, "sql": asked}), "sql"),
        ):
            assert [each.field for each in check(db.settings, made)] == [path, path]
        gone = flow(transform="pkg.gone:f")
        assert "transform.function" in [each.field for each in check(db.settings, gone)]
