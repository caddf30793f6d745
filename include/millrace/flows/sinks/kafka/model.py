"""The declaration of a Kafka sink."""

from __future__ import annotations

from typing import Final, Literal

from millrace.flows.declare.part import TopicName, words
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.kinds import SinkKind


class KafkaSink(KafkaCluster):
    """Documents as JSON into a topic, acknowledged by all in-sync replicas."""

    kind: Literal["kafka"] = "kafka"
    topic: TopicName = words("the output topic")
    ids: Literal["position", "key", "template"] = words(
        "the record's key: topic-partition-offset; the source's key as it is; or what the step template_id made",
        default="key",
    )
    tombstones: Literal["delete", "ignore", "error"] = words(
        "whether records without a value are handed on", default="delete"
    )
    compression: Literal["none", "lz4", "zstd", "snappy", "gzip"] = words("of what is produced", default="lz4")


KIND: Final = SinkKind(
    "kafka",
    KafkaSink,
    "millrace.flows.sinks.kafka.sink:made",
    "at least once; the header millrace.position tells a reader of repeats",
)
