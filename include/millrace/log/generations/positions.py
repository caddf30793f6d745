"""Positions of the whole log and of one of its generations: the ledger's high bits say which."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.ids import EARLIEST, GENERATION_BITS, LogId
from millrace.message.log_entries import ENTRY_SCHEMA

_LEDGERS: Final = (1 << GENERATION_BITS) - 1


def backend_position(position: LogId) -> LogId:
    """A position as its backend has it."""
    return LogId(position.ledger & _LEDGERS, position.entry)


def log_position(position: LogId, generation: int, *, origin: int) -> LogId:
    """A backend's position as one of the whole log, whose beginning is 0:0 in whichever generation it began."""
    if position == EARLIEST and generation == origin:
        return EARLIEST
    return LogId(position.ledger | generation << GENERATION_BITS, position.entry)


def log_batch(batch: pa.RecordBatch, generation: int) -> pa.RecordBatch:
    """Entries of a generation with the ids of the whole log."""
    if not generation or not batch.num_rows:
        return batch
    ledger = pc.add(batch.column("ledger"), pa.scalar(generation << GENERATION_BITS, pa.int64()))
    return pa.RecordBatch.from_arrays([ledger, *batch.columns[1:]], schema=ENTRY_SCHEMA)
