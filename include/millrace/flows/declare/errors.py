"""Handling of records that fail: where they go, how often they are retried, and how many of them stop the flow.

One model for every form of declaration and both hosts.
"""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from millrace.base.errors import ErrorLimitExceeded
from millrace.flows.declare.part import Part, TopicName, words
from millrace.flows.kafka.cluster import KafkaCluster

MAX_SKIPPED: Final = 1_000
"""Records that a declaration may name to be skipped."""
SKIPPED: Final = "SKIPPED"
"""The kind of the letter of a skipped record."""
SKIPPED_WORDS: Final = "it is named in errors.skip, or by `millrace flows skip`"


class ErrorLimit(Part):
    """A limit of failed records before the flow stops. Each lane counts its records in windows, one after the other.

    A window ends after `over` records. The counts are part of the lane's position, so a restart keeps them.
    """

    share: float | None = words("the largest share of a lane's window that may fail", default=None, ge=0, le=1)
    count: int | None = words(
        "the most records that may fail in the present windows of all lanes together", default=None, ge=0, le=1 << 53
    )
    over: int = words("records of a lane in one window", default=10_000, ge=1, le=1 << 53)

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.share is None and self.count is None:
            raise ValueError("has no limit: give share, count or both")
        return self

    def exceeded(self, windows: list[tuple[int, int]]) -> str:
        """Describe the limit that `windows` (each lane's records and failures) exceed; empty if none is exceeded."""
        failed = sum(errors for _, errors in windows)
        if self.count is not None and failed > self.count:
            return f"{failed} records failed in the present windows, and errors.limit.count is {self.count}"
        for records, errors in windows:
            size = max(records, self.over)
            if self.share is not None and errors > self.share * size:
                return f"{errors} of {size} records of a lane failed, and errors.limit.share is {self.share:g}"
        return ""


def require_within(limit: ErrorLimit | None, windows: list[tuple[int, int]], *, flow: str, place: str) -> None:
    """Raise ErrorLimitExceeded if `windows` exceed the `limit` of `flow`, whose dead letters are in `place`."""
    exceeded = "" if limit is None else limit.exceeded(windows)
    if exceeded:
        raise ErrorLimitExceeded(
            f"{flow}: {exceeded}. The records are in {place}. Correct the cause, then begin the count anew with"
            f" `millrace flows errors reset {flow}` and start the flow"
        )


class SkippedRecord(Part):
    """A record that is put aside without being transformed or written."""

    lane: str = words("its lane, such as flights-0", min_length=1, max_length=512)
    position: int = words("its position in the lane: of a topic the offset", ge=0, le=(1 << 63) - 1)
    row: int | None = words(
        "of a flow on Spark, the number of a row that its sink gets; the position is that of its micro-batch, and the"
        " lane is stream-NAME",
        default=None,
        ge=0,
        le=(1 << 31) - 1,
    )


class Errors(Part):
    """The place of failed records: an error topic, with the original record and Kafka Connect's headers on the cause,
    or a collection of dead letters."""

    topic: TopicName | None = words("its name; empty: <id>.errors", default=None)
    cluster: KafkaCluster | None = words("its brokers; empty: the source's", default=None)
    create: bool = words("create the topic if it does not exist", default=True)
    collection: str | None = words(
        "a collection of dead letters of this deployment, in place of a topic",
        default=None,
        min_length=1,
        max_length=255,
    )
    tries: int = words(
        "attempts of a record that the sink refuses by itself, before it is put aside", default=3, ge=1, le=1_000
    )
    in_a_row: int = words(
        "records in a row that the sink refuses before the sink itself counts as failed: the flow stops, and none of"
        " them is put aside",
        default=20,
        ge=1,
        le=1_000_000,
    )
    limit: ErrorLimit | None = words("how many records may fail before the flow stops; empty: any number", default=None)
    skip: Annotated[tuple[SkippedRecord, ...], Field(max_length=MAX_SKIPPED)] = words(
        "records to be put aside without being transformed or written", default=()
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.collection is not None and (self.topic is not None or self.cluster is not None):
            raise ValueError("collection and topic (with its cluster) exclude each other: declare one of them")
        return self
