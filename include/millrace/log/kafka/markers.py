"""Offsets of a Kafka partition that are not entries: the markers by which a broker records how a transaction ended.

Clients do not return markers, so a reader sees missing offsets. It skips them only if the broker's own batches prove
that nothing but markers is there; any other missing offset (compacted, or lost) is LOG_CORRUPTED, never skipped.
Proven ranges near the newest lookups are cached.
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
"""Number of cached ranges; a range that is not cached is looked up again."""


class OffsetOutOfRange(Exception):
    """The brokers have nothing at this offset: it was truncated, is beyond the end, or the topic is gone."""


class TransactionMarkers:
    """Known markers of one partition. Thread-safe."""

    def __init__(self, place: KafkaPartition, look: Callable[[int], Sequence[BatchInfo]]) -> None:
        """`look` returns the batches from an offset on, at least one if there is any; it raises OffsetOutOfRange."""
        self._place = place
        self._look = look
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._stops: list[int] = []

    def skip_known(self, offset: int) -> int:
        """Return the first offset from `offset` on that is not a known marker."""
        with self._lock:
            place = bisect_right(self._starts, offset) - 1
            return max(offset, self._stops[place]) if place >= 0 else offset

    def forget_beyond(self, end: int) -> None:
        """Forget all markers if the log ends before the last known one: it was recreated, or lost its tail."""
        with self._lock:
            if self._stops and self._stops[-1] > end:
                self._starts.clear()
                self._stops.clear()

    def require_markers(self, start: int, stop: int) -> None:
        """Check that the offsets from `start` up to `stop` are markers.

        Raises LogCorrupted if one is not, OffsetOutOfRange if they were truncated, LogUnavailable.
        """
        while (start := self.skip_known(start)) < stop:
            reached = start
            for batch in self._look(start):
                if batch.control:
                    self._add(batch.first, batch.last + 1)
                    reached = batch.last + 1 if batch.first <= reached else reached
            if reached == start:
                raise LogCorrupted(
                    f"{self._place} has neither a record nor a transaction marker at offset {start}: records up to"
                    f" {stop} are missing"
                    ". Was the topic compacted? Restore it from a copy"
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
