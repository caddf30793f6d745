"""The guarantee of a pair of source and sink."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from millrace.flows.declare.flow import Flow
from millrace.flows.guarantee import guarantee_of, level
from millrace.flows.registry import promise_of, sink_kinds, source_kinds
from millrace.pipelines.declaration import pipeline_of

KAFKA = {"kind": "kafka", "bootstrap": ["h:1"]}
TOPIC = {**KAFKA, "topics": ["in"]}
ROWS = {"kind": "collection", "collection": "c"}


@pytest.mark.parametrize(
    ("source", "sink", "promised"),
    [
        (TOPIC, ROWS, "exactly once"),
        (ROWS, ROWS, "effectively once"),
        (TOPIC, {**KAFKA, "topic": "out"}, "at least once"),
        (TOPIC, {**KAFKA, "topic": "out", "transactional": True}, "exactly once"),
        (ROWS, {**KAFKA, "topic": "out", "transactional": True}, "at least once"),
        (TOPIC, {"kind": "delta", "table": "t"}, "exactly once"),
        (TOPIC, {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i", "ids": "key"}, "effectively once"),
        (ROWS, {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i", "ids": "key"}, "effectively once"),
    ],
)
def test_a_pair_promises_what_both_allow(source: dict[str, Any], sink: dict[str, Any], promised: str) -> None:
    more = {"errors": {"cluster": {"bootstrap": ["h:1"]}}} if source is ROWS else {}
    pipeline = pipeline_of({"id": "p", "source": source, "sink": sink, **more})
    assert level(promise_of(pipeline.source, pipeline.sink)) == promised


@pytest.mark.parametrize(
    ("sink", "chosen", "promised"),
    [
        (ROWS, None, "exactly once: the sink stores the micro-batch's number with its rows"),
        (ROWS, "at least once", "at least once: a micro-batch that a crash interrupts is repeated, with its number"),
        ({"kind": "function", "function": "m:f"}, None, "at least once: "),
        ({"kind": "function", "function": "m:f"}, "at most once", "at most once: a micro-batch .* is lost"),
        ({**KAFKA, "topic": "out"}, "exactly once", "exactly once: "),
        (
            {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i", "key": "k"},
            None,
            "effectively once: a row",
        ),
    ],
)
def test_a_query_of_spark_promises_by_the_same_function(
    sink: dict[str, Any], chosen: str | None, promised: str
) -> None:
    more = {"guarantee": chosen} if chosen else {}
    source = {**TOPIC, "columns": {"k": "string"}}
    flow = Flow.of({"name": "s", "source": source, "transform": "m:f", "sink": sink, "host": "spark", **more})
    assert re.match(promised, flow.promise)
    assert (
        flow.chosen_guarantee
        == level(flow.promise)
        == promise_of(flow.source, flow.sink, rows=True, chosen=flow.guarantee).partition(":")[0]
    )


def test_a_query_over_a_source_that_is_read_once_promises_less() -> None:
    once = replace(source_kinds()["kafka"], repeatable=False)
    found = Flow.of({"name": "s", "source": {**TOPIC, "columns": {"k": "string"}}, "sink": {**ROWS}, "host": "spark"})
    assert level(guarantee_of(once, None, found.sink, rows=True)) == "at most once"


def test_a_source_that_is_read_once_and_a_kind_with_other_words_promise_less() -> None:
    once = replace(source_kinds()["kafka"], repeatable=False)
    assert level(guarantee_of(once, sink_kinds()["delta"], None)) == "at most once"
    other = replace(sink_kinds()["delta"], guarantee="perhaps, who knows")
    assert level(guarantee_of(source_kinds()["kafka"], other, None)) == "at least once"
