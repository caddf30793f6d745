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

from millrace.base.errors import MillraceError
from millrace.base.pauses import jittered
from millrace.node.range.definition import P, Planner
from millrace.node.range.owning import read_assigned
from millrace.node.range.parking import parked_names

UNBOUNDED: Final = 1 << 62
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Seconds between two attempts from one base, but for the jitter: doubled from the first to the longest."""
BOUNDED_TRIES: Final = 8

_logger = logging.getLogger(__name__)


class Offset(TypedDict):
    """Spark's offset: a number that grows with each micro-batch, and how far that one may go."""

    batch: int
    max_bytes: int
    """Of one channel."""
    ends: dict[str, str]


START: Final[Offset] = {"batch": 0, "max_bytes": 0, "ends": {}}


def offset_of(data: Mapping[str, Any]) -> Offset:
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


class Stalls:
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
            stall = self._stalls[channel] = _Stall(base, FIRST_PAUSE, 0.0, 0)
        elif bounded:
            self._sleep(max(0.0, stall.until - self._clock()))
            if stall.times >= BOUNDED_TRIES:
                return False
        elif self._clock() < stall.until:
            return False
        stall.until = self._clock() + jittered(stall.pause)
        stall.pause = min(stall.pause * 2, LONGEST_PAUSE)
        stall.times += 1
        return True

    def keep(self, channels: Iterable[str]) -> None:
        """Forget all but `channels`."""
        self._stalls = {name: self._stalls[name] for name in channels if name in self._stalls}


class Schedule(Generic[P]):
    """Plans micro-batches over all channels of a planner, which it closes. One thread at a time."""

    def __init__(
        self,
        planner: Planner[P, Any],
        *,
        parked: Path | None = None,
        assigned: Path | None = None,
        stalls: Stalls | None = None,
    ) -> None:
        self._planner = planner
        self._parked = parked
        self._assigned = assigned
        self._stalls = Stalls() if stalls is None else stalls
        self._left: set[str] = set()
        self._target: Mapping[str, Any] | None = None
        self.trouble: MillraceError | None = None
        """Why the last look found nothing to do, where that was an error."""
        self.behind: frozenset[str] = frozenset()
        """What the last look left out of what there is to do, because it stalls."""

    def fix_target(self, target: Mapping[str, Any] | None = None) -> None:
        """Take `target`, or where all there is to read ends now, as the end of all (Trigger.AvailableNow)."""
        self._target = self._planner.ends() if target is None else target

    def leave(self, channel: str) -> None:
        """Plan `channel` no more."""
        self._left.add(channel)

    def latest(self, start: Offset, *, max_bytes: int = UNBOUNDED) -> Offset:
        """The offset of the next micro-batch, or `start` itself where there is nothing to do (now).

        What cannot be reached counts as nothing to do.
        """
        self.trouble = None
        try:
            found = self._planner.pending(
                without=self._without(), only=self._only(), target=self._target, max_bytes=max_bytes
            )
            pending = list(found)
        except MillraceError as error:
            if not error.retriable:
                raise
            _logger.warning("no micro-batch is planned: %s: %s", error.code, error)
            self.trouble = error
            return start
        self._stalls.keep(each.channel for each in pending)
        bounded = self._target is not None
        ends = {
            each.channel: str(each.end)
            for each in pending
            if self._stalls.due(each.channel, each.base, bounded=bounded)
        }
        self.behind = frozenset(each.channel for each in pending) - ends.keys()
        return {"batch": start["batch"] + 1, "max_bytes": max_bytes, "ends": ends} if ends else start

    def plan(self, end: Offset) -> list[P]:
        """The ranges of the micro-batch up to `end`; a channel that stands there already, or is parked or given up since, has
        none."""
        without, only = self._without(), self._only()
        names = [name for name in end["ends"] if name not in without and (only is None or name in only)]
        ends = {name: self._planner.read_end(end["ends"][name]) for name in names}
        return self._planner.plan(ends, max_bytes=end["max_bytes"] or UNBOUNDED) if ends else []

    def seen(self) -> Offset:
        """Where what there is to read ended at the last look."""
        return {**START, "ends": {name: str(end) for name, end in self._planner.seen().items()}}

    def close(self) -> None:
        """Idempotent."""
        self._planner.close()

    def _without(self) -> frozenset[str]:
        return (frozenset() if self._parked is None else parked_names(self._parked)) | self._left

    def _only(self) -> frozenset[str] | None:
        return None if self._assigned is None else read_assigned(self._assigned)
