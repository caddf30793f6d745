"""Declared streams are checked field by field, in Python and YAML alike, without running anything."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millrace.testing
from millrace.base.errors import InvalidArgument, InvalidStream, StreamNotFound
from millrace.base.settings import Settings
from millrace.demo.streams import flights_hourly
from millrace.flows.declare.checks import check, require_runnable
from millrace.flows.declare.discovery import declared_flow, declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.stream import From, Into, Stream, stream_of
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.operations.backfill.derived import of_stream
from tests.docs.pages import blocks, python_blocks

PAGE = """
streams:
  - name: hourly
    source:
      collection: flights
      columns: [origin, time_hour]
      watermark: {column: time_hour, delay: 1 day}
    sql: select origin, count(*) as n from flights group by origin, window(time_hour, '1 hour')
    sink: {collection: by_hour, mode: upsert}
    output_mode: update
    seconds: 10
"""


FLIGHTS = pa.schema([("id", pa.int64()), ("origin", pa.utf8()), ("time_hour", pa.timestamp("us", "UTC"))])
AT = {"collection": "flights", "columns": ["id", "at", "delay"], "watermark": {"column": "at", "delay": "1 hour"}}
"""A source with an event time."""


def stream(**changes: Any) -> Flow:
    return stream_of({"name": "one", "source": "flights", "sink": "into", **changes})


def test_yaml_and_python_declare_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(PAGE, encoding="utf-8")
    settings = Settings(data_dir=tmp_path, stream_declarations=str(tmp_path / "mine.yaml"))
    found = declared_flow(settings, "hourly")
    assert found.source.watermark is not None
    assert found == Flow.of(found.model_dump())
    assert found.chosen_guarantee == "exactly once"
    assert "flights_hourly" in declared_flows(settings)
    with pytest.raises(StreamNotFound, match="there are flights_hourly, hourly"):
        declared_flow(settings, "other")
    assert stream(transform=flights_hourly).transform.function == "millrace.demo.streams:flights_hourly"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"name": "No"}, "name: "),
        ({"source": {"collection": "a", "kind": "all"}}, "source: its 'kind' is one of"),
        (
            {"source": {"collection": "a", "after": 1, "snapshot": "now"}},
            "after a tick .* or with a snapshot, not both",
        ),
        ({"source": {"collection": "a", "after": "some day"}}, "source.after: "),
        ({"source": {"collection": "a", "watermark": {"column": "t", "delay": "soon"}}}, "source.watermark.delay: "),
        ({"sink": {}}, "a sink is one of collection, delta, kafka, opensearch, function; this has none"),
        ({"sink": {"collection": "a", "delta": "/b"}}, "this has collection, delta"),
        ({"sink": {"delta": "/b", "mode": "upsert"}}, "'mode' is not a field of a delta sink"),
        ({"sink": {"opensearch": {"hosts": ["http://h:1"], "index_base": "i"}}}, "ids from columns: set 'key'"),
        ({"sink": {"opensearch": {"hosts": ["h:1"]}, "key": "id"}}, "sink.opensearch.hosts.0: "),
        ({"sink": {"kafka": "host:1"}}, "needs its servers .* and a topic"),
        ({"transform": "here"}, "not a module:function"),
        ({"transform": lambda frame: frame}, "not a module:function"),
        ({"transform": "a:b", "sql": "select 1"}, "a function or sql, not both"),
        (
            {"guarantee": "exactly once", "sink": {"function": "a:b"}},
            "a function sink offers at least once, at most once",
        ),
        ({"guarantee": "perhaps"}, "guarantee: "),
        ({"seconds": -1}, "seconds: "),
        ({"source": 7}, "source: "),
        ({"tables": {"planes": {"collection": "planes"}}}, "tables need a function or sql"),
        ({"operator": {"distinct": {"keys": ["id"]}}}, "an operator needs source.watermark"),
        ({"late": "late"}, "a sink of late rows needs an operator"),
        (
            {"source": AT | {"watermark": {"column": "at", "max_ahead": "1 day"}}},
            "max_ahead needs an operator",
        ),
        ({"source": AT, "operator": {}}, "one of windows, distinct, pattern, as_of; this has none"),
        (
            {"source": AT, "operator": {"distinct": {"keys": ["id"]}}, "output_mode": "update"},
            "writes each result once",
        ),
        ({"source": AT, "operator": {"distinct": {"keys": ["id"], "within": "soon"}}}, "'soon' is not a duration"),
        (
            {"source": AT, "operator": {"windows": {"size": "1 hour", "aggregates": {"n": "count"}}}},
            "is not an aggregate",
        ),
        ({"source": AT, "operator": {"windows": {"aggregates": {}, "siez": "1 hour"}}}, "operator.windows.siez"),
    ],
)
def test_what_is_wrong_is_said_by_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidStream, match=words):
        stream(**changes)


TOPIC = {"kafka": "h:1, i:2", "topics": ["flights"], "columns": {"id": "int64", "at": "timestamp?"}}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kafka": "nowhere"}, "source.kafka.bootstrap.0: "),
        ({"topics": []}, "source.topics: "),
        ({"topics": ["a", "a"]}, "source: topics: a topic occurs twice"),
        ({"topics": ["a", "b"]}, "several topics form one table: set its 'name'"),
        ({"record": ["_size"]}, "record: '_size' is not one of _key, _value"),
        ({"start": "some day"}, "source.start: "),
        ({"collection": "flights"}, "source.collection: "),
        ({"watermark": {"column": "at", "max_ahead": "1 day"}}, "records do not have"),
    ],
)
def test_what_is_wrong_with_a_source_of_topics_is_said_by_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidStream, match=words):
        stream(source=TOPIC | changes)


def test_a_source_of_topics_is_checked_without_its_brokers(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    page = [block.text for block in blocks("docs/declared-streams.md") if block.language == "yaml"][1]
    (tmp_path / "topics.yaml").write_text(page, encoding="utf-8")
    found = declared_flow(replace(settings, stream_declarations=str(tmp_path / "topics.yaml")), "flights_by_hour")
    assert (found.source.target, found.reads) == ("kafka:flights", ("kafka:flights",))

    def said(**changes: Any) -> list[str]:
        made = stream(sink={"kafka": "h:1", "topic": "out"}, **changes)
        return [f"{each.level} {each}" for each in check(settings, made)]

    assert said(source=TOPIC) == []
    assert said(source=TOPIC, sql="select id from flights") == []
    assert said(source=TOPIC, sql="select id from other")[0] == "error sql: it does not read 'flights'"
    assert said(source=TOPIC | {"watermark": {"column": "_record_time", "delay": "1 hour"}}) == []
    for changes, words in [
        ({"columns": {"id": "number"}}, "error source.columns: field 'id': unknown type 'number'"),
        (
            {"watermark": {"column": "id", "delay": "1 hour"}},
            "error source.watermark.column: 'id' is neither",
        ),
        ({"dead_letters": "gone"}, "error source.dead_letters: there is no collection 'gone'"),
    ]:
        assert any(words in each for each in said(source=TOPIC | changes)), (words, said(source=TOPIC | changes))


def test_secrets_come_from_the_environment_and_are_in_no_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = """
streams:
  - name: into_index
    source: flights
    sink:
      opensearch: {hosts: ["https://h:1"], index_base: i, username: u, password: "${env:INDEX_PASSWORD}"}
      key: id
"""
    (tmp_path / "index.yaml").write_text(page, encoding="utf-8")
    settings = Settings(data_dir=tmp_path, stream_declarations=str(tmp_path / "index.yaml"))
    with pytest.raises(InvalidStream, match="the environment has no INDEX_PASSWORD"):
        declared_flow(settings, "into_index")
    fingerprints = set()
    for password in ("hidden-1", "hidden-2"):
        monkeypatch.setenv("INDEX_PASSWORD", password)
        found = declared_flow(settings, "into_index")
        assert found.sink.kind == "opensearch"
        assert found.sink.password.get_secret_value() == password
        assert (found.sink.target, found.chosen_guarantee) == ("opensearch:i", "effectively once")
        assert password not in repr(found)
        fingerprints.add(found.fingerprint())
    assert len(fingerprints) == 1


def test_the_fingerprint_of_a_topic_s_stream_is_of_its_rows_and_not_of_its_brokers() -> None:
    one = stream(source=TOPIC)
    assert one.fingerprint() == "c1e26909f08e4c97", "checkpoints of earlier builds go on"
    for same in ({"kafka": {"bootstrap": ["other:1"]}}, {"start": "now"}, {"max_bytes": 1}, {"group": "g"}):
        assert stream(source=TOPIC | same).fingerprint() == one.fingerprint()
    for other in ({"columns": {"id": "int64"}}, {"topics": ["b"]}, {"tombstones": "ignore"}, {"record": ["_key"]}):
        assert stream(source=TOPIC | other).fingerprint() != one.fingerprint()


def test_the_brokers_of_a_sink_are_a_cluster_with_its_security_and_their_addresses_alone_mean_what_they_did() -> None:
    plain = {"kafka": "h:1,i:2", "topic": "out"}
    one = stream(source=TOPIC, sink=plain)
    assert one.fingerprint() == "277b1ec2b43cbc90", "checkpoints of earlier builds go on"
    late = stream(
        source=TOPIC | {"watermark": {"column": "at", "delay": "1 hour"}},
        operator={"distinct": {"keys": ["id"]}}, late=plain | {"topic": "late"}, sink=plain,
    )  # fmt: skip
    assert late.fingerprint() == "8c243ae64b68da70"
    known = {"protocol": "SASL_SSL", "mechanism": "PLAIN", "username": "ada", "password": "hidden"}
    guarded = stream(source=TOPIC, sink=plain | {"kafka": {"bootstrap": ["h:1", "i:2"], "security": known}})
    assert guarded.fingerprint() == one.fingerprint(), "how brokers are reached is no part of it"
    assert guarded == Flow.of(guarded.model_dump())
    assert one == Flow.of(json.loads(one.model_dump_json()))
    assert guarded.sink.kind == "kafka"
    assert guarded.sink.client_settings()["sasl.password"] == "hidden"
    assert "hidden" not in repr(guarded) + guarded.model_dump_json()
    with pytest.raises(InvalidStream, match=r"sink\.kafka\.bootstrap\.0: "):
        stream(source=TOPIC, sink=plain | {"kafka": "nowhere"})


def test_a_file_or_module_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    for text, words in (
        ("streams: 7", "no list 'streams'"),
        ("a: [", "cannot be read"),
        ("streams: [{name: x}]", r"stream 0 \(x\): source"),
    ):
        (tmp_path / "bad.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(InvalidStream, match=words):
            declared_flows(Settings(data_dir=tmp_path, stream_declarations=str(tmp_path / "bad.yaml")))
    with pytest.raises(InvalidStream, match=r"no\.such\.module cannot be imported"):
        declared_flows(Settings(data_dir=tmp_path, stream_declarations="no.such.module"))
    with pytest.raises(InvalidStream, match="the name 'flights_hourly' is taken"):
        declared_flows(Settings(data_dir=tmp_path, stream_declarations="millrace.demo.streams"))


def test_declarations_are_read_without_spark(tmp_path: Path) -> None:
    code = (
        "import sys; from millrace.base.settings import Settings; from pathlib import Path\n"
        "from millrace.flows.declare.discovery import declared_flows; from millrace.flows.directory import"
        " flow_statuses\n"
        f"s = Settings(data_dir=Path({str(tmp_path)!r})); declared_flows(s); flow_statuses(s)\n"
        "print([m for m in ('pyspark', 'pandas', 'sqlglot') if m in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": "include"},
    )
    assert said.stdout.strip() == "[]"


@pytest.mark.slow
def test_checks_find_what_cannot_run_without_running_it(tmp_path: Path) -> None:
    with millrace.testing.deployment(tmp_path / "data") as db:
        db.create_collection("flights", {"id": "int64", "at": "timestamp", "delay": "float64?"}, key="id")
        db.create_collection("into", {"id": "int64"}, key="id")
        db.catalog.create_collection("letters", LETTERS)

        def found(**changes: Any) -> list[str]:
            return [f"{each.level} {each}" for each in check(db.settings, stream(**changes))]

        db.create_collection("days", {"id": "date"}, key="id")
        ids = {"collection": "flights", "columns": ["id"]}
        assert found(source=ids, sink="into") == []
        assert found(source=ids, sink={"collection": "into", "dead_letters": "letters"}) == []
        assert found(sink={"collection": "not_yet", "create": True}) == []
        for changes, words in [
            ({"source": "nothing"}, "error source.collection: there is no collection 'nothing'"),
            ({"sink": "nothing"}, "error sink.collection: there is no collection 'nothing'"),
            ({"sink": "flights"}, "error sink.collection: the sink is the stream's own source"),
            ({"source": {"collection": "flights", "columns": ["id", "other"]}}, "error source.columns"),
            (
                {"source": {"collection": "flights", "watermark": {"column": "delay", "delay": "1 day"}}},
                "is not a timestamp column of 'flights'",
            ),
            (
                {"source": {"collection": "flights", "columns": ["id"], "watermark": {"column": "at"}}},
                "not a column of the stream",
            ),
            ({"source": {"collection": "flights", "watermark": {"column": "at"}}}, "warning source.watermark.delay"),
            ({"transform": "millrace.demo.streams:nothing"}, "error transform: the function"),
            ({"transform": flights_hourly}, "warning source.watermark: without a watermark, aggregates"),
            ({"sql": "select from"}, "error sql"),
            ({"sql": "select * from planes"}, "error sql: it does not read 'flights'"),
            ({"sql": "select * from flights join planes using (id)"}, "error sql: it reads 'planes'"),
            ({"output_mode": "update"}, "error sink.mode"),
            ({"sink": {"collection": "into", "mode": "changes"}}, "error source.kinds"),
            ({"sink": {"collection": "into", "partition": "p"}}, "error sink.partition"),
            ({"sink": {"collection": "into", "dead_letters": "into"}}, "does not have the columns of dead letters"),
            ({"sink": {"collection": "into", "dead_letters": "nothing"}}, "millrace flows errors create"),
            ({"sink": "into"}, "error sink: "),
            ({"source": {"collection": "flights", "columns": ["delay"]}, "sink": "into"}, "error sink: "),
            ({"source": {"collection": "flights", "columns": ["id"]}, "sink": "days"}, "error sink: "),
            (
                {
                    "source": {"collection": "flights", "columns": ["id"]},
                    "sink": {"collection": "into", "partition_by": "delay"},
                },
                "error sink.partition_by",
            ),
        ]:
            said = found(**changes)
            assert any(words in each for each in said), (changes, said)
        assert found(source=AT, operator={"distinct": {"keys": ["id"], "within": "1 day"}}, sink={"delta": "/t"}) == []
        hourly = {"windows": {"size": "1 hour", "aggregates": {"n": "count(*)", "mean": "avg(delay)"}}}
        db.create_collection("replaced", {"id": "int64", "at": "timestamp"}, key="id", on_duplicate="replace")
        daily = {"windows": {"size": "1 day", "aggregates": {"n": "count(*)"}}}
        replaced = {"collection": "replaced", "columns": ["id", "at"], "watermark": {"column": "at", "delay": "1 hour"}}
        said = found(source=replaced, operator=daily, sink={"delta": "/t"})
        assert any("count each version of a row" in each for each in said)
        assert any("midnight in UTC" in each for each in said)
        said = found(source=replaced | {"kinds": "skip others"}, operator=hourly | {}, sink={"delta": "/t"})
        assert not any("version" in each or "midnight" in each for each in said)
        versions = {"collection": "planes", "keys": ["id"], "columns": {"seats": "seats"}, "time": "_log_time"}
        arrived = AT | {"watermark": {"column": "_log_time", "delay": "1 hour"}}
        assert found(source=arrived, sink={"delta": "/t"}) == []
        beside = {
            "as_of": {
                "collection": "flights",
                "keys": ["id"],
                "columns": {"at": "last"},
                "time": "at",
                "tolerance": "1 day",
            }
        }
        bounded = AT | {"watermark": {"column": "at", "delay": "1 hour", "max_ahead": "1 day"}}
        for operator, more, words in [
            ({"distinct": {"keys": ["other"]}}, {}, "error operator: there is no column other"),
            ({"distinct": {"keys": ["id"]}}, {}, "warning operator: each key is kept forever"),
            ({"distinct": {"keys": ["id"]}}, {"source": AT | {"columns": []}}, "warning source.columns"),
            ({"distinct": {"keys": ["id"]}}, {"late": "nothing"}, "error late.collection"),
            ({"distinct": {"keys": ["id"]}}, {"source": bounded}, "needs the column _time_tick"),
            ({"distinct": {"keys": ["id"]}}, {"source": arrived}, "warning operator: each key is kept forever"),
            ({"distinct": {"keys": ["id"]}}, {"late": "into"}, "error operator: "),
            (hourly, {}, "error operator: "),
            ({"windows": {"aggregates": {"n": "count(*)"}}}, {}, "either a size, or a gap"),
            (
                {"windows": {"size": "1 hour", "late": "correct", "keep": "1 day", "aggregates": {"id": "count(*)"}}},
                {},
                "error operator: ",
            ),
            ({"pattern": {"match_recognize": "ORDER BY at PATTERN (A"}}, {}, "is not closed"),
            (
                {"pattern": {"match_recognize": "ORDER BY at MEASURES A.id AS id PATTERN (A B+) DEFINE B AS x > 1"}},
                {},
                "no column x",
            ),
            (
                {"pattern": {"match_recognize": "ORDER BY at MEASURES A.id AS id PATTERN (A B+)"}},
                {},
                "WITHIN does not bound it",
            ),
            ({"as_of": versions}, {}, "error operator.as_of.collection"),
            ({"as_of": versions | {"collection": "letters"}}, {}, "the key 'id' is int64 here and string"),
            ({"as_of": versions | {"collection": "into", "keys": ["delay"]}}, {}, "error operator.as_of.keys"),
            ({"as_of": versions | {"collection": "into"}}, {}, "no column seats"),
            (beside, {"late": "into"}, "no column"),
        ]:
            said = found(**{"source": AT, "operator": operator, **more})
            assert any(words in each for each in said), (operator, said)
        both = {"id": "int64?", "at": "timestamp", "delay": "float64?", "right_side": "bool", "right_at": "timestamp?"}
        late = {"late_by": "int64", "window_start": "timestamp?", "reason": "string"}
        db.create_collection("late", both | late, generated_key="key")
        db.create_collection(
            "seen", {"id": "int64", "at": "timestamp", "delay": "float64?", "last": "timestamp?"}, key="id"
        )
        assert found(source=AT, operator=beside, late="late", sink="seen") == []
        db.create_collection("first", {"id": "int64", "log_time": "timestamp"}, key="id")
        db.create_collection("again", {"id": "int64", "log_time": "timestamp"} | late, generated_key="key")
        first = {"distinct": {"keys": ["id"], "within": "1 day"}}
        assert found(source=arrived | {"columns": ["id"]}, operator=first, sink="first", late="again") == []
        joined = {"tables": {"planes": {"collection": "into", "columns": ["tail"]}}}
        said = found(sql="select f.id from flights f join planes p on f.id = p.id", **joined)
        assert "error tables.planes.columns: 'into' has no column 'tail': id" in said
        with pytest.raises(InvalidStream, match=r"'one' cannot run: source\.collection"):
            require_runnable(stream(source="nothing"), check(db.settings, stream(source="nothing")))


def test_a_fingerprint_is_of_what_decides_the_rows() -> None:
    same = [
        stream(),
        stream(seconds=3.0),
        stream(group="g"),
        stream(words="w"),
        stream(source=From(collection="flights", after=7)),
    ]
    assert len({each.fingerprint() for each in same}) == 1
    others = [
        stream(version=2),
        stream(sql="select * from flights"),
        stream(sink=Into(collection="other")),
        stream(source="planes"),
        stream(source=AT),
        stream(source=From(collection="flights", channels=("dml_0",))),
        stream(source=AT, operator={"distinct": {"keys": ["id"]}}),
        stream(source=AT, operator={"distinct": {"keys": ["id"]}}, late="late"),
        stream(sql="select 1", tables={"planes": {"collection": "planes"}}),
    ]
    assert len({each.fingerprint() for each in [*same, *others]}) == 1 + len(others)
    marked = stream(source=AT, operator={"distinct": {"keys": ["id"]}})
    assert marked.fingerprint() == "81dbe16295434c2f", "and those of before a watermark had a bound"
    before = Stream(name="s", source="events", sql="select id from events", sink="into")
    assert before.fingerprint() == "a1948dc13d47b96f", "checkpoints of before a source had channels go on"


def test_the_page_s_python_and_yaml_declare_the_same_stream_and_its_batch(tmp_path: Path) -> None:
    declared, derived = python_blocks("docs/declared-streams.md")
    (tmp_path / "pages_streams.py").write_text(declared.text, encoding="utf-8")
    yaml, *_ = [block.text for block in blocks("docs/declared-streams.md") if block.language == "yaml"]
    (tmp_path / "page.yaml").write_text(yaml, encoding="utf-8")
    names: dict[str, Any] = {"__name__": "pages_streams"}
    exec(compile(declared.text, "<page>", "exec"), names)
    exec(compile(derived.text, "<page>", "exec"), names)
    [stream_], [table] = names["FLOWS"], names["TABLES"]
    assert stream_.transform.function == "pages_streams:by_hour"
    assert (table.name, table.event_time, table.bucket) == ("flights_by_hour", "time_hour", "hour")
    found = declared_flow(Settings(data_dir=tmp_path, flow_declarations=str(tmp_path / "page.yaml")), "flights_by_hour")
    assert found.model_copy(update={"transform": stream_.transform, "description": stream_.description}) == stream_


def test_the_operators_page_declares_streams_that_make_their_operators(tmp_path: Path) -> None:
    [text] = [block.text for block in blocks("docs/operators.md") if block.language == "yaml"]
    (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
    found = declared_flows(Settings(data_dir=tmp_path, stream_declarations=str(tmp_path / "page.yaml")))
    kinds = {
        name: each.transform.operator.made("time_hour", FLIGHTS).name
        for name, each in found.items()
        if each.transform.operator
    }
    assert kinds == {
        "delays_by_hour": "windows", "rising_delays": "patterns", "flights_once": "distinct",
        "flights_with_weather": "as_of",
    }  # fmt: skip
    for each in found.values():
        assert Flow.parse(each.to_json()) == each
    assert found["flights_with_weather"].reads == ("collection:flights", "collection:weather")
    assert found["delays_by_hour"].writes == ("collection:delays_by_hour", "collection:flights_late")
    joined = stream(sql="select 1", tables={"then": {"collection": "planes"}})
    assert (joined.reads, joined.writes) == (("collection:flights", "collection:planes"), ("collection:into",))


def test_a_stream_of_more_than_a_transform_is_no_derived_table() -> None:
    plain = stream(source=AT, transform=flights_hourly)
    assert of_stream(plain, bucket="hour").event_time == "at"
    for more in ({"operator": {"distinct": {"keys": ["id"]}}}, {"tables": {"planes": {"collection": "planes"}}}):
        with pytest.raises(InvalidArgument, match="has an operator or tables"):
            of_stream(stream(source=AT, transform=flights_hourly, **more), bucket="hour")
