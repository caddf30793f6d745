"""Log entries as Arrow columns, and descriptions of a log, the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa

from millrace.message.ids import LogId

ENTRY_SCHEMA: Final = pa.schema(
    [
        pa.field("ledger", pa.int64(), nullable=False),
        pa.field("entry", pa.int64(), nullable=False),
        pa.field("physical_ms", pa.int64(), nullable=False),
        pa.field("value", pa.large_binary(), nullable=False),
    ]
)
"""Columns of a run of log entries: id, append timestamp (Unix ms), bytes."""


DEFAULT_MAX_ENTRY_BYTES: Final = 16 << 20


ENTRY_OVERHEAD_BYTES: Final = 64
"""Bytes that an entry counts in addition to its value where reads are bounded, so that empty entries count too."""


@dataclass(frozen=True, slots=True)
class LogEntries:
    """A run of entries in log order (ENTRY_SCHEMA), and the position after it, even if the run is empty."""

    batch: pa.RecordBatch
    next: LogId


def weight(batch: pa.RecordBatch) -> int:
    """Return the size of a run where reads are bounded: the bytes of its values plus ENTRY_OVERHEAD_BYTES for each."""
    return value_bytes(batch) + ENTRY_OVERHEAD_BYTES * int(batch.num_rows)


def value_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of the values in a run of entries."""
    if batch.num_rows == 0:
        return 0
    values = batch.column("value")
    offsets = memoryview(values.buffers()[1]).cast("q")
    return int(offsets[values.offset + batch.num_rows] - offsets[values.offset])


@dataclass(frozen=True, slots=True)
class LogDescription:
    """The extent of a log: ``begin`` is the first readable position, ``end`` the one after the last entry."""

    begin: LogId
    end: LogId
    bytes: int


class StampFloor(NamedTuple):
    """The promises of a log about later entries."""

    end: LogId
    """The position after the last entry."""
    ms: int
    """No entry at or after `end` has an earlier append stamp, in Unix milliseconds."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a checksum scan. ``first_bad`` is the first unreadable entry; None if there is none."""

    records: int
    entries: int
    bytes: int
    first_bad: LogId | None
    detail: str
