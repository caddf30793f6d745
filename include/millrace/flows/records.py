"""The data of a pipeline: records as they arrived, the sink's action for each, and failures with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


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
    original: Record | None = None
    """As it was received, if a format of the source decoded it: what a dead letter keeps."""

    @property
    def position(self) -> str:
        return f"{self.topic}-{self.partition}-{self.offset}"


OPERATION: Final = "millrace.op"
"""The header of a captured change that says its operation: c, u, d, r (of a snapshot), t (all rows are gone)."""
BINARY: Final = "millrace.base64"
"""The header of a captured change that lists the columns of bytes, whose texts are base64, with commas."""
DIGITS: Final = "millrace.digits"
"""The header of a captured change that lists the columns of numbers with any number of digits, with commas: they fit a
field of texts."""
PLACE: Final = "millrace.place"
"""The header that says where a record was read: a file and its line."""
FAULT: Final = "millrace.fault"
"""The first header of a record whose value is no document, as the source found: why. The value is what was read."""
_TRUNCATED: Final = (OPERATION, b"t")


def is_truncation(record: Record) -> bool:
    """Return whether the record says that all rows of its source are gone."""
    return record.value is None and record.key is None and _TRUNCATED in record.headers


def listed_columns(record: Record, header: str) -> list[str]:
    """Return the fields of the record's value that its `header` (BINARY, DIGITS) lists."""
    return [name for each, names in record.headers if each == header and names for name in names.decode().split(",")]


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
    attempts: int = 1
    """How often the sink was given the record alone, if it refused the batches that had it."""

    def as_received(self) -> Failure:
        """Return the failure of the record as it was received."""
        return self if self.record.original is None else self._replace(record=self.record.original)


VALUE_CONVERTER = "VALUE_CONVERTER"
TRANSFORMATION = "TRANSFORMATION"
TASK_PUT = "TASK_PUT"
