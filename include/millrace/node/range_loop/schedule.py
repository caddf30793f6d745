"""Which micro-batch comes next: what a planner has to do, less what stalls, as an offset that Spark keeps for us.

Nothing is believed of an offset that comes back besides how far a micro-batch may go at most: a lost or stale Spark checkpoint
costs nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypedDict

from millrace.base.backoff import jittered
from millrace.base.errors import MillraceError
from millrace.node.range_loop.definition import P, Planner
from millrace.node.range_loop.ownership import read_assigned
from millrace.node.range_loop.parking import parked_names

UNBOUNDED: Final = 1 << 62
MIN_BACKOFF_SECONDS: Final = 0.1
MAX_BACKOFF_SECONDS: Final = 5.0
"""Seconds between two attempts from one base, but for the jitter: doubled from the first to the longest."""
MAX_BOUNDED_ATTEMPTS: Final = 8

_logger = logging.getLogger(__name__)


class BatchOffset(TypedDict):
    """Spark's offset: a number that grows with each micro-batch, and how far that one may go."""

    batch: int
    max_bytes: int
    """Of one channel."""
    ends: dict[str, str]


START: Final[BatchOffset] = {"batch": 0, "max_bytes": 0, "ends": {}}


def offset_of(data: Mapping[str, Any]) -> BatchOffset:
    """An offset as it came back from Spark; one that is not ours counts as the start."""
    if not isinstance(data.get("ends"), dict) or not isinstance(data.get("batch"), int):
        return START
    return {"batch": data["batch"], "max_bytes": int(data.get("max_bytes", UNBOUNDED)), "ends": dict(data["ends"])}


@dataclass(slots=True)
class _Stall:
    base: int
    pause: float
    until: float
    times: int


class StallBackoff:
    """Channels that were planned and did not move: each is planned again later and later, not at the same time as others."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._stalls: dict[str, _Stall] = {}

    def due(self, channel: str, base: int, *, bounded: bool) -> bool:
        """Whether it is time for `channel`, which stands at `base`; should it be, it is taken to be planned now.

        A `bounded` run has no later look: it waits here, and gives a channel up behind BOUNDED_TRIES, which leaves a lag.
        """
        stall = self._stalls.get(channel)
        if stall is None or stall.base != base:
            stall = self._stalls[channel] = _Stall(base, MIN_BACKOFF_SECONDS, 0.0, 0)
        elif bounded:
            self._sleep(max(0.0, stall.until - self._clock()))
            if stall.times >= MAX_BOUNDED_ATTEMPTS:
                return False
        elif self._clock() < stall.until:
            return False
        stall.until = self._clock() + jittered(stall.pause)
        stall.pause = min(stall.pause * 2, MAX_BACKOFF_SECONDS)
        stall.times += 1
        return True

    def retain(self, channels: Iterable[str]) -> None:
        """Forget all but `channels`."""
        self._stalls = {name: self._stalls[name] for name in channels if name in self._stalls}


class RangeSchedule(Generic[P]):
    """Plans micro-batches over all channels of a planner, which it closes. One thread at a time."""

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
        """Why the last look found nothing to do, where that was an error."""
        self.stalled: frozenset[str] = frozenset()
        """What the last look left out of what there is to do, because it stalls."""

    def fix_target(self, target: Mapping[str, Any] | None = None) -> None:
        """Take `target`, or where all there is to read ends now, as the end of all (Trigger.AvailableNow)."""
        self._target = self._planner.ends() if target is None else target

    def exclude(self, channel: str) -> None:
        """Plan `channel` no more."""
        self._left.add(channel)

    def next_offset(self, start: BatchOffset, *, max_bytes: int = UNBOUNDED) -> BatchOffset:
        """The offset of the next micro-batch, or `start` itself where there is nothing to do (now).

        What cannot be reached counts as nothing to do.
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
            _logger.warning("no micro-batch is planned: %s: %s", error.code, error)
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
        """The ranges of the micro-batch up to `end`; a channel that stands there already, or is parked or given up since, has
        none."""
        without, only = self._without(), self._only()
        names = [name for name in end["ends"] if name not in without and (only is None or name in only)]
        ends = {name: self._planner.read_end(end["ends"][name]) for name in names}
        return self._planner.plan(ends, max_bytes=end["max_bytes"] or UNBOUNDED) if ends else []

    def seen(self) -> BatchOffset:
        """Where what there is to read ended at the last look."""
        return {**START, "ends": {name: str(end) for name, end in self._planner.seen().items()}}

    def close(self) -> None:
        """Idempotent."""
        self._planner.close()

    def _without(self) -> frozenset[str]:
        return (frozenset() if self._parked is None else parked_names(self._parked)) | self._left

    def _only(self) -> frozenset[str] | None:
        return None if self._assigned is None else read_assigned(self._assigned)
