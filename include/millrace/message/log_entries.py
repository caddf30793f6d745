"""A run of a log's entries as Arrow columns, and where a log stands: what a reader is given, whichever backend keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
"""Columns of a run of log entries: id, append stamp (Unix ms), bytes."""


DEFAULT_MAX_ENTRY_BYTES: Final = 16 << 20


ENTRY_OVERHEAD_BYTES: Final = 64
"""What an entry counts beside the bytes of its value where a read is bounded: one without any is not free."""


@dataclass(frozen=True, slots=True)
class LogEntries:
    """A run of entries in log order (ENTRY_SCHEMA) and the position right behind it, whether or not it is empty."""

    batch: pa.RecordBatch
    next: LogId


def weight(batch: pa.RecordBatch) -> int:
    """What a run of entries counts where reads are bounded: the bytes of its values, and ENTRY_BYTES for each."""
    return value_bytes(batch) + ENTRY_OVERHEAD_BYTES * int(batch.num_rows)


def value_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of the entries' values in a run of entries."""
    if batch.num_rows == 0:
        return 0
    values = batch.column("value")
    offsets = memoryview(values.buffers()[1]).cast("q")
    return int(offsets[values.offset + batch.num_rows] - offsets[values.offset])


@dataclass(frozen=True, slots=True)
class LogDescription:
    """Where a log stands. ``begin`` is the earliest position that can be read, ``end`` the one behind its last entry."""

    begin: LogId
    end: LogId
    bytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a checksum scan found. ``first_bad`` is the first entry that does not read, None where all do."""

    records: int
    entries: int
    bytes: int
    first_bad: LogId | None
    detail: str
