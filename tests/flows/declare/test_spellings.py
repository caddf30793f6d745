"""Streams of earlier builds mean what they meant: the same rows, under the same fingerprints, in either spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from millrace.base.errors import InvalidStream, PipelineInvalid
from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.commands.main import app
from millrace.flows.declare import spellings
from millrace.flows.declare.discovery import declared_flows
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import expanded
from millrace.flows.declare.stream import From, FromTopics, Into, stream_of
from millrace.pipelines.declaration import as_pipeline, pipeline_of

GOLDEN = json.loads((Path(__file__).parent / "golden_streams.json").read_text(encoding="utf-8"))
"""Declarations with what the build of session 28 said of them."""


@pytest.mark.parametrize("golden", GOLDEN, ids=[each["what"] for each in GOLDEN])
def test_a_stream_s_fingerprint_is_that_of_earlier_builds(golden: dict[str, Any]) -> None:
    made = stream_of(golden["declared"])
    assert made.fingerprint() == golden["fingerprint"], "its checkpoint continues"
    assert {"source": made.source.identity(), "sink": spellings.sink_identity(made.sink)} == golden["identity"]
    assert [made.source.target, made.sink.target] == [golden["source"], golden["sink"]]
    assert (list(made.reads), list(made.writes)) == (golden["reads"], golden["writes"])
    assert made.chosen_guarantee == golden["guarantee"]


@pytest.mark.parametrize("golden", GOLDEN, ids=[each["what"] for each in GOLDEN])
def test_parts_that_say_their_kind_declare_the_same_stream(golden: dict[str, Any]) -> None:
    parts = ("source", "sink", "late")
    made = stream_of(golden["declared"])
    plain: dict[str, Any] = golden["declared"]
    shown = plain | {name: getattr(made, name).model_dump() for name in parts if name in plain}
    assert {shown[name]["kind"] for name in parts if name in plain} <= {*spellings.SINKS}
    again = stream_of(shown)
    if golden["what"] != "kafka spaces":  # the addresses are shown as a list
        assert again == made
        assert again.fingerprint() == golden["fingerprint"]


def test_the_examples_are_the_flows_that_earlier_builds_declared_and_are_shown_in_the_new_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KAFKA", "h:1")
    monkeypatch.setenv("OPENSEARCH", "http://h:2")
    earlier = Settings(data_dir=tmp_path, flow_declarations=str(Path(__file__).parent / "earlier_flows.yaml"))
    found = declared_flows(earlier, shipped=False)
    assert {name: each.fingerprint() for name, each in found.items() if each.host == "spark"} == {
        "rising_delays": "0da60cc4e4e6a494",
        "flights_by_origin": "b033ebab8bb9e5d8",
    }
    example = ROOT.parent / "examples" / "mixed_flows.yaml"
    page = expanded(yaml.safe_load(example.read_text(encoding="utf-8")))
    assert len(page["flows"]) == len(found) == 3
    for declared in page["flows"]:
        was = found[declared["name"]]
        if was.host == "spark":  # the dead letters of rows were those of the source alone
            assert declared.pop("errors") == {"collection": declared["source"].setdefault("dead_letters", "undecoded")}
        assert Flow.of({**declared, "description": was.description}) == was
        ran = CliRunner().invoke(app, ["flows", "show", was.name], env=earlier.environment())
        assert ran.exit_code == 0, ran.output
        shown = json.loads(ran.stdout)
        assert Flow.of({name: each for name, each in shown.items() if name != "guarantee"}) == was
        assert not {"id", "steps", "sql", "operator", "words"} & set(shown)
        assert shown["guarantee"] == was.chosen_guarantee


def test_the_words_of_python_are_the_kinds_models() -> None:
    assert From(collection="c") == stream_of({"name": "s", "source": "c", "sink": "d"}).source
    topics = FromTopics(kafka="h:1", topics=("a",), start="now")
    assert (topics.kind, topics.bootstrap, topics.start) == ("kafka", ("h:1",), "now")
    index = Into(opensearch={"hosts": ["http://h:1"], "index_base": "i"}, key="a, b")
    assert (index.kind, index.target) == ("opensearch", "opensearch:i")
    assert index == Into(kind="opensearch", hosts=["http://h:1"], index_base="i", key="a, b")


def test_a_field_that_its_host_has_no_use_for_is_refused_by_its_path() -> None:
    kafka = {"kind": "kafka", "bootstrap": ["h:1"], "topics": ["a"]}
    index = {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i"}
    for part, name, value in (
        ("source", "columns", {"id": "int64"}),
        ("source", "watermark", {"column": "at"}),
        ("sink", "dead_letters", "letters"),
    ):
        declared: dict[str, Any] = {"id": "p", "source": kafka, "sink": index}
        with pytest.raises(PipelineInvalid, match=f"{part}: {name} is for rows, but the range loop"):
            pipeline_of(declared | {part: declared[part] | {name: value}})
    with pytest.raises(PipelineInvalid, match="sink: path is for rows"):  # or a pipeline would write anywhere
        pipeline_of({"id": "p", "source": kafka, "sink": {"kind": "delta", "path": "/elsewhere"}})
    made = as_pipeline(pipeline_of({"id": "p", "source": kafka, "sink": index}))
    assert not {"columns", "record", "max_bytes", "watermark"} & set(made["source"]), "and is not shown"
    for part, name, value in (("source", "assignment", "group"), ("sink", "ids", "position")):
        stream: dict[str, Any] = {"name": "s", "source": kafka, "sink": kafka | {"topic": "b"}}
        del stream["sink"]["topics"]
        with pytest.raises(InvalidStream, match=f"{part}: {name} is for documents, but a Spark query processes rows"):
            stream_of(stream | {part: stream[part] | {name: value}})


@pytest.mark.parametrize(
    ("sink", "path"),
    [
        ({"kind": "opensearch", "hosts": ["h:1"], "index_base": "i", "key": "id"}, "sink.hosts.0: "),
        ({"opensearch": {"hosts": ["h:1"], "index_base": "i"}, "key": "id"}, "sink.opensearch.hosts.0: "),
        ({"kafka": {"bootstrap": ["h"]}, "topic": "t"}, "sink.kafka.bootstrap.0: "),
        ({"kind": "kafka", "bootstrap": ["h"], "topic": "t"}, "sink.bootstrap.0: "),
        ({"delta": ""}, "sink.delta: "),
        ({"collection": "c", "mode": "other"}, "sink.mode: "),
    ],
)
def test_a_problem_is_at_the_path_that_was_written(sink: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidStream, match=f"a stream: {path}"):
        stream_of({"name": "s", "source": "c", "sink": sink})
