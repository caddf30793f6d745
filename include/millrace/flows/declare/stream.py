"""The spelling of earlier builds for flows on Spark: the transform's fields are fields of the stream.

STREAMS = [Stream(name="hourly",
                  source=From(collection="flights", watermark=Watermark(column="time_hour", delay="1 day")),
                  transform=hourly, sink=Into(collection="flights_by_hour", mode="upsert"), output_mode="update")]
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from millrace.flows.declare import spellings
from millrace.flows.declare.flow import Flow, LateSink, RowSink
from millrace.flows.declare.rows import Table as Table
from millrace.flows.declare.rows import Watermark as Watermark
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.kafka.model import KafkaSource

From = CollectionSource
"""A stream's source: a collection's changes."""


def FromTopics(**fields: Any) -> KafkaSource:
    """Return a stream's source of Kafka topics, with the brokers as `kafka`. Raises pydantic's error."""
    return KafkaSource.model_validate(spellings.source({"kind": "kafka"} | fields if "kafka" not in fields else fields))


def Into(**fields: Any) -> RowSink:
    """Return a stream's sink: `collection`, `delta`, `kafka`, `opensearch` or `function`, with its fields.

    Raises ValueError.
    """
    found: RowSink = TypeAdapter(LateSink).validate_python(spellings.sink(fields))
    return found


def Stream(**fields: Any) -> Flow:
    """Return the flow that a stream's fields declare. Raises InvalidStream."""
    return stream_of(fields)


def stream_of(value: object, *, where: str = "a stream") -> Flow:
    """Return the flow that a dict declares in the form of streams. Raises InvalidStream, naming each wrong field."""
    return Flow.of(value, where=where, spelling="stream")
