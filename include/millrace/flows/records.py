"""The data of a pipeline: records as received, the sink's action for each, and failures with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple


class Record(NamedTuple):
    """A record of a topic, or a row of a collection in that form."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    """The value; None for a tombstone."""
    timestamp: int
    """The topic's timestamp, milliseconds since 1970."""
    headers: Sequence[tuple[str, bytes | None]] = ()
    original: Record | None = None
    """The record as received, if a format of the source decoded it. Dead letters store this one."""

    @property
    def position(self) -> str:
        return f"{self.topic}-{self.partition}-{self.offset}"


OPERATION: Final = "millrace.op"
"""The header with the operation of a captured change: c, u, d, r (snapshot), t (truncation)."""
BINARY: Final = "millrace.base64"
"""The header of a captured change that lists, separated by commas, the columns of bytes, whose texts are base64."""
DIGITS: Final = "millrace.digits"
"""The header of a captured change that lists, separated by commas, the columns of numbers with unlimited digits, which
fit a field of texts."""
PLACE: Final = "millrace.place"
"""The header with the place from which a record was read: a file and its line."""
FAULT: Final = "millrace.fault"
"""The first header of a record that the source could not read as a document: the reason. The value is the raw text."""
_TRUNCATED: Final = (OPERATION, b"t")


def is_truncation(record: Record) -> bool:
    """Return whether the record means that all rows of its source were removed."""
    return record.value is None and record.key is None and _TRUNCATED in record.headers


def listed_columns(record: Record, header: str) -> list[str]:
    """Return the fields of the record's value that its `header` (BINARY, DIGITS) lists."""
    return [name for each, names in record.headers if each == header and names for name in names.decode().split(",")]


class Action(NamedTuple):
    """A sink's action for one record."""

    record: Record
    id: str
    body: bytes | None
    """The document, JSON on one line; None to delete the document of this id."""
    version: int | None
    """The version: an older one never replaces a newer one. None for ids that are written once, by one writer."""


class Failure(NamedTuple):
    """A failed record and the reason. It goes to the error topic."""

    record: Record
    stage: str
    """``VALUE_CONVERTER`` (not JSON), ``TRANSFORMATION`` (a step) or ``TASK_PUT`` (the sink): Kafka Connect's names."""
    step: str
    """Its name."""
    kind: str
    """A stable name of the cause."""
    reason: str
    attempts: int = 1
    """How often the record was written alone, after the sink had refused batches with it."""

    def as_received(self) -> Failure:
        """Return the failure with the record as received."""
        return self if self.record.original is None else self._replace(record=self.record.original)


VALUE_CONVERTER = "VALUE_CONVERTER"
TRANSFORMATION = "TRANSFORMATION"
TASK_PUT = "TASK_PUT"
