"""Progress of a consumer's lanes: what was read, queued, delivered, acknowledged and committed of each.

The consumer guards all of it with its lock (millrace.client.consume.consumer).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from millrace.base.job_pool import Job
from millrace.client.consume.delivery import AckState
from millrace.client.consume.scan import Scan


@dataclass(slots=True, eq=False)
class LaneProgress:
    """Progress of one lane: delivered units that are not done, in order, and the position below them."""

    tick: int
    out: deque[AckState] = field(default_factory=deque)
    seen: int = 0
    """Everything up to this tick was read and delivered."""
    queued: int = 0
    """Everything up to this tick was read and queued."""
    committed: int = -1
    """Durable position."""
    sent: int = -1
    """Position that the server was told, which it writes soon."""
    started: bool = True
    """Whether `tick` is known; it is not before a scan by the policy has begun."""
    drain_until: float | None = None
    """When the lane is released to another member at the latest, once it shall be."""
    gone: bool = False
    """Whether the lane is no longer this consumer's."""
    dropped: bool = False
    """Whether it was delivered that the lane's collection was dropped."""

    def settle(self) -> None:
        while self.out and self.out[0].done:
            self.tick = max(self.tick, self.out.popleft().tick)
        if not self.out:
            self.tick = max(self.tick, self.seen)

    @property
    def open(self) -> bool:
        """Whether units of the lane are delivered."""
        return not self.gone and self.drain_until is None

    @classmethod
    def at(cls, start: int | None, *, committed: int | None) -> LaneProgress:
        """Return the progress of a lane that starts at a tick, or by the policy if that is None."""
        tick = 0 if start is None else start
        stored = -1 if committed is None else committed
        return cls(tick, seen=tick, queued=tick, committed=stored, sent=stored, started=start is not None)


@dataclass(slots=True, eq=False)
class ChannelReader:
    """Reads the lanes of one PChannel; another one takes its place when the lanes change."""

    pchannel: str
    places: dict[str, LaneProgress]
    """By lane, the VChannels or the PChannel itself."""
    scan: Scan | None = None
    stopped: bool = False
    caught_up: bool = False
    """Whether everything was queued, or the reader has reached its end."""
    job: Job | None = None
    """Reads ahead."""
    steps: Iterator[float | None] | None = None
    """What the job does: each step yields the seconds until the next one, or None to wait for news."""
    mark: Mark | None = None
    """The last mark, if no delivery was queued after it."""
    failure: Exception | None = None
    """An error that passes by itself and waits for a poll; no further one does."""

    def is_stopped(self) -> bool:
        return self.stopped

    def stop(self) -> None:
        """End reading, also while the job waits for news or for room."""
        self.stopped = True
        if self.scan is not None:
            self.scan.close()
        if self.job is not None:
            self.job.wake()

    def of(self, vchannel: str, tick: int) -> tuple[LaneProgress, ...]:
        """Return the places that a unit at `tick` belongs to: all, if it concerns the whole PChannel."""
        whole = self.places.get(self.pchannel)
        if whole is not None:
            found: tuple[LaneProgress, ...] = (whole,)
        elif vchannel:
            found = (self.places[vchannel],) if vchannel in self.places else ()
        else:
            found = tuple(self.places.values())
        return tuple(place for place in found if place.queued < tick)


@dataclass(slots=True, eq=False)
class Mark:
    """Everything of these lanes up to `tick` is queued before this."""

    places: tuple[LaneProgress, ...]
    tick: int
    queued: bool = True
