"""The declaration of a source of topics, and the columns of their records."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from millrace.flows.declare.part import TopicName, words
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.kinds import SourceKind

RECORD_TIME: Final = "_record_time"
RECORD_COLUMNS: Final = ("_key", "_value", "_headers", "_topic", "_partition", "_offset", RECORD_TIME)
"""The columns of a topic's record among rows. They begin with an underscore, as the columns of changes do, so that no
field of a collection, and hardly one of a document, has one of these names."""


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


class KafkaSource(KafkaCluster):
    """JSON documents, one a record, of plain topics. Each partition is a task of the pipeline."""

    kind: Literal["kafka"] = "kafka"
    topics: Annotated[tuple[TopicName, ...], Field(max_length=64)] = words("the input topics", default=())
    topics_regex: Annotated[str, StringConstraints(max_length=500), AfterValidator(_pattern)] = words(
        "in place of topics: a regular expression of whole names; new topics of such a name are read from their"
        " beginning, within about 10 s",
        default="",
    )
    group: str = words(
        "consumer group to which positions are mirrored for other tools; empty: millrace-<id>",
        default="",
        max_length=249,
        pattern=r"^[A-Za-z0-9._-]*$",
    )
    assignment: Literal["all", "group"] = words(
        "who reads which partitions: all: the one worker reads all; group: the consumer group divides them among all"
        " workers of the pipeline, on this machine (resources.workers) and on others",
        default="all",
    )
    offset_reset: Literal["earliest", "latest", "error"] = words(
        "autoOffsetReset: where a partition begins that has no position yet", default="earliest"
    )
    session_timeout_ms: int = words("sessionTimeoutMs", default=45_000, ge=1, le=3_600_000)
    max_poll_interval_ms: int = words("maxPollIntervalMs", default=300_000, ge=1, le=86_400_000)
    poll_timeout_ms: int = words("how long one long poll waits for records", default=500, ge=1, le=60_000)
    isolation: Literal["read_committed", "read_uncommitted"] = words(
        "whether records of open or aborted transactions are read", default="read_committed"
    )

    @model_validator(mode="after")
    def _fits(self) -> KafkaSource:
        if bool(self.topics) == bool(self.topics_regex):
            raise ValueError("topics: name them, or say topics_regex; one of the two")
        if len(set(self.topics)) < len(self.topics):
            raise ValueError("topics: each once")
        if self.max_poll_interval_ms < self.session_timeout_ms:
            raise ValueError("max_poll_interval_ms is at least session_timeout_ms (librdkafka refuses it otherwise)")
        return self

    def reads(self, topic: str) -> bool:
        """Whether a topic of that name is one of the source's. Kafka's own topics are none."""
        if self.topics_regex:
            return not topic.startswith("__") and re.fullmatch(self.topics_regex, topic) is not None
        return topic in self.topics

    def client_settings(self) -> dict[str, str | int]:
        return {
            **super().client_settings(),
            "session.timeout.ms": self.session_timeout_ms,
            "max.poll.interval.ms": self.max_poll_interval_ms,
            "isolation.level": self.isolation,
        }


KIND: Final = SourceKind(
    "kafka",
    KafkaSource,
    "millrace.flows.sources.kafka.topics:source_of",
    "millrace.flows.sources.kafka.topics:reader_of",
)
