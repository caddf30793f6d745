"""The data of a pipeline: records as they arrived, the sink's action for each, and failures with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Record(NamedTuple):
    """A record of a topic (or a row of a collection, as if it were one)."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    """None: a tombstone."""
    timestamp: int
    """Milliseconds since 1970, as the topic has it."""
    headers: Sequence[tuple[str, bytes | None]] = ()

    @property
    def position(self) -> str:
        return f"{self.topic}-{self.partition}-{self.offset}"


class Action(NamedTuple):
    """What a sink is to do for one record."""

    record: Record
    id: str
    body: bytes | None
    """The document, JSON in one line; None: delete what has this id."""
    version: int | None
    """Larger is newer, and nothing older may replace it; None: ids of which there is one writer, once."""


class Failure(NamedTuple):
    """A record that is not in the sink, and why. It goes into the error topic."""

    record: Record
    stage: str
    """``VALUE_CONVERTER`` (no JSON), ``TRANSFORMATION`` (a step) or ``TASK_PUT`` (the sink), Kafka Connect's names."""
    step: str
    """Its name."""
    kind: str
    """A stable name of the fault."""
    reason: str


VALUE_CONVERTER = "VALUE_CONVERTER"
TRANSFORMATION = "TRANSFORMATION"
TASK_PUT = "TASK_PUT"
