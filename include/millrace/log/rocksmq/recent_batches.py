"""The newest durable batches of a channel, as they were appended: who follows the log closely reads these.

They are in memory for the append's own sake, were framed and synced a moment ago, and need neither a read nor another checksum.
What was not appended as an Arrow array is not kept; a reader behind the kept ones reads the files.
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
"""What a batch counts beside its values: the objects that hold a small one are not free."""


@dataclass(frozen=True, slots=True)
class RecentBatch:
    """One append: entries `base` to `last`, with nothing between them and the entry `behind`."""

    behind: int
    base: int
    last: int
    values: pa.LargeBinaryArray
    bytes: int
    """As a read counts them: of the values, and ENTRY_BYTES for each entry."""


class RecentBatches:
    """Whole batches without a gap between them, about `max_bytes` of them. Not thread-safe: the channel's lock is held."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._batches: deque[RecentBatch] = deque()
        self._held = 0

    def add(self, *, behind: int, base: int, values: pa.LargeBinaryArray | None, bytes: int) -> None:
        """Keep the batch that was just made durable; `behind` is the last entry before it. None: there is none to keep."""
        if values is None:
            self._batches.clear()
            self._held = 0
            return
        counted = bytes + ENTRY_OVERHEAD_BYTES * len(values)
        self._batches.append(RecentBatch(behind, base, base + len(values) - 1, values, counted))
        self._held += counted + _OVERHEAD
        while self._held > self._max_bytes:
            self._held -= self._batches.popleft().bytes + _OVERHEAD

    def run_batches(self, start: int, limit: int | None, max_bytes: int) -> list[RecentBatch]:
        """The batches of a run from `start` on, at least one; empty where `start` is not among what is kept."""
        batches = self._batches
        if not batches or not batches[0].behind < start <= batches[-1].last:
            return []
        taken: list[RecentBatch] = []
        size = 0
        for batch in islice(batches, bisect_left(batches, start, key=lambda each: each.last), None):
            size += batch.bytes
            if taken and (size > max_bytes or (limit is not None and limit <= batch.base)):
                break
            taken.append(batch)
        return taken


def run_from_batches(batches: Sequence[RecentBatch], *, start: int, limit: int | None, max_bytes: int) -> SegmentRun:
    """The run from `start` on, below `limit`: what :func:`millrace.log.rocksmq.reader.read_run` gives for these entries.

    A single batch is handed out without a copy.
    """
    ids = np.concatenate([np.arange(batch.base, batch.last + 1, dtype=np.int64) for batch in batches])
    first = int(np.searchsorted(ids, start))
    stop = len(ids) if limit is None else int(np.searchsorted(ids, limit))
    if stop <= first:
        return SegmentRun(empty_batch(), max(start, limit or 0), None, 0)
    values = batches[0].values if len(batches) == 1 else pa.concat_arrays([batch.values for batch in batches])
    offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
    if len(batches) == 1:  # larger than asked for: cut between entries, behind one at least
        stop = min(stop, stop_within_bytes(offsets, first, max_bytes))
    batch = entry_batch(ids[first:stop], values.slice(first, stop - first))
    return SegmentRun(batch, int(ids[stop - 1]) + 1, None, weight(batch))
