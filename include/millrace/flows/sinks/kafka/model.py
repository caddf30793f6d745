"""The declaration of a Kafka sink."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from millrace.flows.debezium.model import FORMAT, DebeziumEvents
from millrace.flows.declare.part import TopicName, words
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.kinds import SinkKind


class KafkaSink(KafkaCluster):
    """Rows or documents as JSON into a topic, acknowledged by all in-sync replicas."""

    of_rows: ClassVar = frozenset({"key", "dead_letters", "servers"})
    of_documents: ClassVar = frozenset({"ids", "tombstones", "format", "debezium"})

    kind: Literal["kafka"] = "kafka"
    topic: TopicName = words("the output topic")
    ids: Literal["position", "key", "template"] = words(
        "the record's key: topic-partition-offset; the source's key; or the result of the step template_id",
        default="key",
    )
    tombstones: Literal["delete", "ignore", "error"] = words(
        "whether records without a value are written", default="delete"
    )
    format: Literal["json", "debezium"] = words(
        "values are documents, or change events in Debezium's form", default="json"
    )
    debezium: DebeziumEvents = words("how change events are written", default_factory=DebeziumEvents)
    compression: Literal["none", "lz4", "zstd", "snappy", "gzip"] = words("of produced messages", default="lz4")
    transactional: bool = words(
        "each batch is a transaction that stores the position, so that readers of committed messages see each document"
        " once; the flow needs rights for the transactional ids and groups millrace-<id>-*",
        default=False,
    )
    key: str | None = words("for rows: the column with a record's key", default=None)
    dead_letters: str | None = words("a collection for rows that the brokers refuse", default=None)
    servers: SkipJsonSchema[str] = Field(default="", exclude=True, repr=False)
    """The brokers as a stream spelled them, if that differs from `bootstrap` with commas. A part of its identity."""

    @model_validator(mode="after")
    def _fits(self) -> KafkaSink:
        if self.format != FORMAT and self.debezium != DebeziumEvents():
            raise ValueError("debezium applies only to the format debezium: set format to debezium")
        if self.format == FORMAT and self.ids != "key":
            raise ValueError("ids: an event has the key of its row: set ids to key")
        return self

    def with_columns_of(self, collection: str) -> KafkaSink:
        """Return the sink whose events have the columns of `collection`, unless it names a collection itself.

        Raises ValueError for events without a collection.
        """
        if self.format != FORMAT or self.debezium.collection:
            return self
        if not collection:
            raise ValueError("sink.debezium.collection: name the collection whose key and columns the events have")
        return self.model_copy(update={"debezium": self.debezium.model_copy(update={"collection": collection})})

    @property
    def target(self) -> str:
        """Its name in lists and graphs."""
        return f"kafka:{self.topic}"


_PLAIN: Final = "at least once; a reader can recognise repeats by the header millrace.position"


def _promise(declared: KafkaSink) -> str:
    return "exactly once: a transaction stores the position" if declared.transactional else _PLAIN


KIND: Final = SinkKind(
    "kafka",
    KafkaSink,
    "millrace.flows.sinks.kafka.sink:made",
    _PLAIN,
    of=_promise,
    unnumbered=_PLAIN,
)
