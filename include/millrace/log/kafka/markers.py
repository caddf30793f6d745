"""The offsets of a Kafka partition that are no entries: the markers by which a broker says how a transaction ended.

Clients do not give them, so that a reader sees offsets that are missing. They are passed over only where the broker's own batches
prove that nothing but markers stands there; what is missing otherwise (by compaction, or lost) is LOG_CORRUPTED, never a skip.
What is proven is kept, what lies about the newest look, so that it is asked once.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from millrace.base.errors import LogCorrupted
from millrace.log.kafka.settings import KafkaPartition

if TYPE_CHECKING:
    from millrace.log.kafka.admin import BatchInfo

_MOST: Final = 8192
"""Ranges of markers that are kept; one that is not is asked for again."""


class OffsetOutOfRange(Exception):
    """The brokers have nothing at this offset: it was truncated, lies beyond the end, or the topic is gone."""


class TransactionMarkers:
    """What is known of one partition's markers. Thread-safe."""

    def __init__(self, place: KafkaPartition, look: Callable[[int], Sequence[BatchInfo]]) -> None:
        """`look` gives the batches from an offset on, some at least where there are any; it raises OutOfRange."""
        self._place = place
        self._look = look
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._stops: list[int] = []

    def skip_known(self, offset: int) -> int:
        """The first offset from `offset` on that is not known to be a marker."""
        with self._lock:
            place = bisect_right(self._starts, offset) - 1
            return max(offset, self._stops[place]) if place >= 0 else offset

    def forget_beyond(self, end: int) -> None:
        """Forget everything where the log ends before what is known of it: it was made again, or lost its tail."""
        with self._lock:
            if self._stops and self._stops[-1] > end:
                self._starts.clear()
                self._stops.clear()

    def require_markers(self, start: int, stop: int) -> None:
        """See to it that the offsets from `start` up to `stop` are markers.

        Raises LogCorrupted where one is not, OutOfRange where they were truncated, LogUnavailable.
        """
        while (start := self.skip_known(start)) < stop:
            reached = start
            for batch in self._look(start):
                if batch.control:
                    self._add(batch.first, batch.last + 1)
                    reached = batch.last + 1 if batch.first <= reached else reached
            if reached == start:
                raise LogCorrupted(
                    f"{self._place} has no record at offset {start}, and no transaction's marker: records up to {stop} are missing"
                    " in its midst. Was the topic compacted? Restore it from a copy"
                )
            start = reached

    def _add(self, start: int, stop: int) -> None:
        with self._lock:
            place = bisect_right(self._starts, start)
            if place and self._stops[place - 1] >= stop:
                return
            if place and self._stops[place - 1] == start:
                self._stops[place - 1] = stop
                return
            self._starts.insert(place, start)
            self._stops.insert(place, stop)
            if len(self._starts) > _MOST:
                far = -1 if place < len(self._starts) // 2 else 0
                del self._starts[far], self._stops[far]
