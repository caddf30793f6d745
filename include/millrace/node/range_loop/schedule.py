"""Plans the next micro-batch: the planner's work minus stalled channels, as an offset that Spark stores.

Nothing in an offset that Spark returns is trusted, except the upper end of a micro-batch. A lost or stale Spark
checkpoint therefore costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypedDict

from millrace.base.backoff import Backoff
from millrace.base.errors import MillraceError
from millrace.node.range_loop.definition import MAX_BACKOFF_SECONDS, P, Planner
from millrace.node.range_loop.ownership import read_assigned
from millrace.node.range_loop.parking import parked_names

UNBOUNDED: Final = 1 << 62
MIN_BACKOFF_SECONDS: Final = 0.1
"""Pause before the first retry from the same base, without jitter. It doubles up to the longest."""
MAX_BOUNDED_ATTEMPTS: Final = 8

_logger = logging.getLogger(__name__)


class BatchOffset(TypedDict):
    """Spark's offset: the number of the micro-batch and its upper ends. Stored in Spark's checkpoint."""

    batch: int
    max_bytes: int
    """Byte limit per channel."""
    ends: dict[str, str]


START: Final[BatchOffset] = {"batch": 0, "max_bytes": 0, "ends": {}}


def offset_of(data: Mapping[str, Any]) -> BatchOffset:
    """Parse an offset from Spark. An offset of another source counts as the start."""
    if not isinstance(data.get("ends"), dict) or not isinstance(data.get("batch"), int):
        return START
    return {"batch": data["batch"], "max_bytes": int(data.get("max_bytes", UNBOUNDED)), "ends": dict(data["ends"])}


@dataclass(slots=True)
class _Stall:
    base: int
    delays: Backoff
    until: float = 0.0
    times: int = 0


class StallBackoff:
    """Backs off channels that were planned and did not move, with jitter so that they do not retry together."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        longest: float = MAX_BACKOFF_SECONDS,
    ) -> None:
        self._longest = longest
        self._clock = clock
        self._sleep = sleep
        self._stalls: dict[str, _Stall] = {}

    def due(self, channel: str, base: int, *, bounded: bool) -> bool:
        """Return whether `channel`, which is at `base`, is due. If so, it counts as planned now.

        A `bounded` run has no later poll: it waits here, and gives the channel up after MAX_BOUNDED_ATTEMPTS, which
        leaves a lag.
        """
        stall = self._stalls.get(channel)
        if stall is None or stall.base != base:
            stall = self._stalls[channel] = _Stall(base, Backoff(MIN_BACKOFF_SECONDS, self._longest))
        elif bounded:
            self._sleep(max(0.0, stall.until - self._clock()))
            if stall.times >= MAX_BOUNDED_ATTEMPTS:
                return False
        elif self._clock() < stall.until:
            return False
        stall.until = self._clock() + stall.delays.next_delay()
        stall.times += 1
        return True

    def retain(self, channels: Iterable[str]) -> None:
        """Forget all channels except `channels`."""
        self._stalls = {name: self._stalls[name] for name in channels if name in self._stalls}


class RangeSchedule(Generic[P]):
    """Plans micro-batches over all channels of a planner, and closes that planner. One thread at a time."""

    def __init__(
        self,
        planner: Planner[P, Any],
        *,
        parked: Path | None = None,
        assigned: Path | None = None,
        stalls: StallBackoff | None = None,
    ) -> None:
        self._planner = planner
        self._parked = parked
        self._assigned = assigned
        self._stalls = StallBackoff() if stalls is None else stalls
        self._left: set[str] = set()
        self._target: Mapping[str, Any] | None = None
        self.error: MillraceError | None = None
        """The error because of which the last poll found no work, if any."""
        self.stalled: frozenset[str] = frozenset()
        """Channels that have work and were left out by the last poll because they stall."""

    def fix_target(self, target: Mapping[str, Any] | None = None) -> None:
        """Fix the end of the run: `target`, or the current end of the source (Trigger.AvailableNow)."""
        self._target = self._planner.ends() if target is None else target

    def exclude(self, channel: str) -> None:
        """Exclude `channel` from further planning."""
        self._left.add(channel)

    def next_offset(self, start: BatchOffset, *, max_bytes: int = UNBOUNDED) -> BatchOffset:
        """Return the offset of the next micro-batch, or `start` itself if there is no work now.

        A source that cannot be reached counts as no work.
        """
        self.error = None
        try:
            found = self._planner.pending(
                without=self._without(), only=self._only(), target=self._target, max_bytes=max_bytes
            )
            pending = list(found)
        except MillraceError as error:
            if not error.retriable:
                raise
            _logger.warning("cannot plan a micro-batch: %s: %s", error.code, error)
            self.error = error
            return start
        self._stalls.retain(each.channel for each in pending)
        bounded = self._target is not None
        ends = {
            each.channel: str(each.end)
            for each in pending
            if self._stalls.due(each.channel, each.base, bounded=bounded)
        }
        self.stalled = frozenset(each.channel for each in pending) - ends.keys()
        return {"batch": start["batch"] + 1, "max_bytes": max_bytes, "ends": ends} if ends else start

    def plan(self, end: BatchOffset) -> list[P]:
        """Return the ranges of the micro-batch up to `end`.

        Channels that are there already, or that were parked or given up since, have none.
        """
        without, only = self._without(), self._only()
        names = [name for name in end["ends"] if name not in without and (only is None or name in only)]
        ends = {name: self._planner.read_end(end["ends"][name]) for name in names}
        return self._planner.plan(ends, max_bytes=end["max_bytes"] or UNBOUNDED) if ends else []

    def seen(self) -> BatchOffset:
        """Return the ends that the last poll found."""
        return {**START, "ends": {name: str(end) for name, end in self._planner.seen().items()}}

    def close(self) -> None:
        """Close the planner. Idempotent."""
        self._planner.close()

    def _without(self) -> frozenset[str]:
        return (frozenset() if self._parked is None else parked_names(self._parked)) | self._left

    def _only(self) -> frozenset[str] | None:
        return None if self._assigned is None else read_assigned(self._assigned)
