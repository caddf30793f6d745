"""Chunks of log entries for the chain, which bound a host's memory by messages as well as by bytes.

A read is bounded by its bytes. But a few bytes may frame many messages, and each one that is judged alone (a FlushAll,
a Begin, an entry that does not decode) takes about a kilobyte until its row is written. Chunk boundaries do not change
any result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from millrace.message.ids import LogId
from millrace.message.log_entries import LogEntries
from millrace.message.wire.decode import framed_counts
from millrace.message.wire.layout import BYTES_PER_MESSAGE, MAX_MESSAGES

MAX_CHUNK_MESSAGES: Final = MAX_MESSAGES
"""Maximum messages per chunk: as many as one entry can frame, since an entry cannot be split."""


def chunk_entries(entries: LogEntries) -> Iterator[LogEntries]:
    """Yield `entries` in order, split between entries into chunks of at most MAX_CHUNK_MESSAGES messages."""
    batch = entries.batch
    for start, stop in chunk_bounds(batch.column("value")):
        last = stop == batch.num_rows
        if last and not start:
            yield entries
        else:
            yield LogEntries(batch.slice(start, stop - start), entries.next if last else id_at(batch, stop))


def chunk_bounds(values: pa.LargeBinaryArray) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each chunk of a run of entries."""
    if len(values) <= 1 or len(values) + values.nbytes // BYTES_PER_MESSAGE <= MAX_CHUNK_MESSAGES:
        yield 0, len(values)  # so few bytes cannot frame more messages
        return
    ends = np.cumsum(framed_counts(values))
    start, taken = 0, 0
    while ends[-1] - taken > MAX_CHUNK_MESSAGES:
        stop = int(np.searchsorted(ends, taken + MAX_CHUNK_MESSAGES, side="right"))
        yield start, stop
        start, taken = stop, int(ends[stop - 1])
    yield start, len(values)


def id_at(batch: pa.RecordBatch, row: int) -> LogId:
    """Return the id of one entry of a run."""
    return LogId(batch.column("ledger")[row].as_py(), batch.column("entry")[row].as_py())
