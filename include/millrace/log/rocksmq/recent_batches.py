"""The newest durable batches of a channel, in memory as they were appended, for readers that follow the log closely.

They were framed and synced a moment ago, so they need neither a read nor another checksum. Batches that were not
appended as Arrow arrays are not cached; a reader before the cached ones reads the files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import pyarrow as pa

from millrace.log.rocksmq.reader import SegmentRun, empty_batch, entry_batch, stop_within_bytes
from millrace.message.log_entries import ENTRY_OVERHEAD_BYTES, weight

_OVERHEAD: Final = 4 << 10
"""Bytes that a batch counts in addition to its values, for its Python objects."""


@dataclass(frozen=True, slots=True)
class RecentBatch:
    """One append: entries `base` to `last`. No entry lies between entry `previous` and `base`."""

    previous: int
    base: int
    last: int
    values: pa.LargeBinaryArray
    bytes: int
    """Size as a read counts it: the values, and ENTRY_BYTES for each entry."""


class RecentBatches:
    """Contiguous batches, about `max_bytes` of them. Not thread-safe: the channel's lock must be held."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._batches: deque[RecentBatch] = deque()
        self._held = 0

    def add(self, *, previous: int, base: int, values: pa.LargeBinaryArray | None, bytes: int) -> None:
        """Cache the batch that was just made durable; `previous` is the entry before it. With None, the cache
        is cleared.
        """
        if values is None:
            self._batches.clear()
            self._held = 0
            return
        counted = bytes + ENTRY_OVERHEAD_BYTES * len(values)
        self._batches.append(RecentBatch(previous, base, base + len(values) - 1, values, counted))
        self._held += counted + _OVERHEAD
        while self._held > self._max_bytes:
            self._held -= self._batches.popleft().bytes + _OVERHEAD

    def run_batches(self, start: int, limit: int | None, max_bytes: int) -> list[RecentBatch]:
        """Return the batches of a run from `start` on, at least one; an empty list if `start` is not cached."""
        batches = self._batches
        if not batches or not batches[0].previous < start <= batches[-1].last:
            return []
        if batches[-1].previous < start:
            return [batches[-1]]  # a reader that keeps up; a search in a deque costs its length
        taken: list[RecentBatch] = []
        size = 0
        for batch in islice(batches, bisect_left(batches, start, key=lambda each: each.last), None):
            size += batch.bytes
            if taken and (size > max_bytes or (limit is not None and limit <= batch.base)):
                break
            taken.append(batch)
        return taken


def run_from_batches(batches: Sequence[RecentBatch], *, start: int, limit: int | None, max_bytes: int) -> SegmentRun:
    """Return the run from `start` on, below `limit`, as :func:`millrace.log.rocksmq.reader.read_run` does for these
    entries.

    A single batch is returned without a copy.
    """
    if len(batches) == 1 and limit is None and start <= batches[0].base and batches[0].bytes <= max_bytes:
        (only,) = batches
        batch = entry_batch(np.arange(only.base, only.last + 1, dtype=np.int64), only.values)
        return SegmentRun(batch, only.last + 1, None, only.bytes)
    ids = np.concatenate([np.arange(batch.base, batch.last + 1, dtype=np.int64) for batch in batches])
    first = int(np.searchsorted(ids, start))
    stop = len(ids) if limit is None else int(np.searchsorted(ids, limit))
    if stop <= first:
        return SegmentRun(empty_batch(), max(start, limit or 0), None, 0)
    values = batches[0].values if len(batches) == 1 else pa.concat_arrays([batch.values for batch in batches])
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
    if len(batches) == 1:  # larger than requested: cut between entries, after at least one
        stop = min(stop, stop_within_bytes(offsets, first, max_bytes))
    batch = entry_batch(ids[first:stop], values.slice(first, stop - first))
    return SegmentRun(batch, int(ids[stop - 1]) + 1, None, weight(batch))
