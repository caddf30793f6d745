"""The declaration of a source of topics, and the columns of their records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from millrace.flows.debezium.model import FORMAT, Debezium
from millrace.flows.declare.addresses import host_of
from millrace.flows.declare.part import TopicName, words
from millrace.flows.declare.rows import TopicStart, Watermark
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.kinds import SourceKind

RECORD_TIME: Final = "_record_time"
RECORD_COLUMNS: Final = ("_key", "_value", "_headers", "_topic", "_partition", "_offset", RECORD_TIME)
"""The columns of a topic's record among rows. They begin with an underscore, as the columns of changes do, so that they
do not collide with fields of a collection, and rarely with those of a document."""


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


class KafkaSource(KafkaCluster):
    """Records of plain topics, whose values are JSON or change events: documents, or the rows of a Spark query."""

    of_rows: ClassVar = frozenset(
        {"name", "columns", "record", "start", "tombstones", "dead_letters", "watermark", "max_bytes", "max_records"}
    )
    of_documents: ClassVar = frozenset({"topics_regex", "assignment", "offset_reset", "format", "debezium"})

    kind: Literal["kafka"] = "kafka"
    topics_regex: Annotated[str, StringConstraints(max_length=500), AfterValidator(_pattern)] = words(
        "instead of topics: a regular expression of whole names; new matching topics are read from their"
        " beginning, within about 10 s",
        default="",
    )
    topics: Annotated[tuple[TopicName, ...], Field(max_length=64)] = words("the input topics", default=())
    group: str = words(
        "consumer group to which positions are mirrored for other tools; empty: millrace-<id>",
        default="",
        max_length=249,
        pattern=r"^[A-Za-z0-9._-]*$",
    )
    assignment: Literal["all", "group"] = words(
        "the division of partitions: all: one worker reads all; group: the consumer group divides them among all"
        " workers of the pipeline, on this machine (resources.workers) and on others",
        default="all",
    )
    offset_reset: Literal["earliest", "latest", "error"] = words(
        "autoOffsetReset: where a partition without a position begins", default="earliest"
    )
    session_timeout_ms: int = words("sessionTimeoutMs", default=45_000, ge=1, le=3_600_000)
    max_poll_interval_ms: int = words("maxPollIntervalMs", default=300_000, ge=1, le=86_400_000)
    poll_timeout_ms: int = words("longest wait of one poll for records", default=500, ge=1, le=60_000)
    isolation: Literal["read_committed", "read_uncommitted"] = words(
        "whether records of open or aborted transactions are read", default="read_committed"
    )
    format: Literal["json", "debezium"] = words(
        "values are JSON documents, or change events of Debezium in JSON or Avro", default="json"
    )
    debezium: Debezium = words("how change events are decoded", default_factory=Debezium)
    name: str = words("name of the table of rows; empty: the topic's", default="")
    columns: dict[str, str] = words(
        'fields of the values with their types ("int64"; "string?" may be missing or null) as columns; empty: the'
        " values stay bytes, in _value",
        default_factory=dict,
    )
    record: tuple[str, ...] = words(
        f"columns of the record beside them: {', '.join(RECORD_COLUMNS)}; empty, without columns: all", default=()
    )
    start: TopicStart = words("where rows begin: earliest, now, or at the records of a moment", default="earliest")
    tombstones: Literal["error", "ignore"] = words(
        "with columns: put a record without a value aside, or leave it out", default="error"
    )
    dead_letters: str | None = words(
        "a collection for records that cannot be decoded; empty: the flow's folder", default=None
    )
    watermark: Watermark | None = words("the event time of rows", default=None)
    max_bytes: int = words("about the most bytes of a micro-batch of rows", default=64 << 20, gt=0)
    max_records: int | None = words("the most records of a micro-batch of rows", default=None, gt=0)

    @field_validator("topics")
    @classmethod
    def _named(cls, topics: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if "topics_regex" in info.data and bool(topics) == bool(info.data["topics_regex"]):
            raise ValueError("give either topics or topics_regex")
        return topics

    @model_validator(mode="after")
    def _fits(self) -> KafkaSource:
        if self.format != FORMAT and self.debezium != Debezium():
            raise ValueError("debezium applies only to the format debezium: set format to debezium")
        if self.debezium.truncates == "apply" and len(self.topics) != 1:
            raise ValueError("debezium.truncates: several topics have no common order: use apply with one topic")
        if len(set(self.topics)) < len(self.topics):
            raise ValueError("topics: a topic occurs twice")
        if self.max_poll_interval_ms < self.session_timeout_ms:
            raise ValueError("max_poll_interval_ms must be at least session_timeout_ms, as librdkafka requires")
        for each in self.record:
            if each not in RECORD_COLUMNS:
                raise ValueError(f"record: {each!r} is not one of {', '.join(RECORD_COLUMNS)}")
        if self.watermark is not None and self.watermark.max_ahead is not None:
            raise ValueError(
                "watermark.max_ahead compares with the log time of rows, which records do not have: leave it out"
            )
        return self

    def reads(self, topic: str) -> bool:
        """Return whether a topic of that name belongs to the source. Kafka's own topics never do."""
        if self.topics_regex:
            return not topic.startswith("__") and re.fullmatch(self.topics_regex, topic) is not None
        return topic in self.topics

    @property
    def target(self) -> str:
        """Its name in lists and graphs."""
        return f"kafka:{','.join(self.topics) or self.topics_regex}"

    @property
    def table(self) -> str:
        """The name of its rows in SQL."""
        return self.name or self.topics[0]

    @property
    def record_columns(self) -> tuple[str, ...]:
        """The columns of the record that its rows have."""
        given = self.record or (() if self.columns else RECORD_COLUMNS)
        marked = self.watermark is not None and self.watermark.column == RECORD_TIME
        return (*given, RECORD_TIME) if marked and RECORD_TIME not in given else given

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide which rows it returns.

        Topic ids distinguish topics of one name on other brokers.
        """
        return self.model_dump(
            mode="json", include={"topics", "name", "columns", "record", "tombstones", "isolation", "watermark"}
        )

    def addresses(self) -> Iterator[tuple[str, str]]:
        yield from super().addresses()
        if self.debezium.registry is not None:
            yield "debezium.registry.url", host_of(urlsplit(self.debezium.registry.url).netloc)

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
