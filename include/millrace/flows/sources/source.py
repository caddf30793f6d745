"""The contract of a source: lanes, where they begin and end, and batches of their records in order.

The promises, which the conformance suite tests:

- A *lane* is a topic's partition or a VChannel; its name never changes, and its ranges follow one another.
- The records between two positions never change. A range that is read again gives the same records, in any process and
  in any division into ranges, so a runner needs no memory of what it read.
- A range is never read past a loss: records that retention removed are PositionTruncated, which names the earliest
  position, and a lane that ends before a position is LogRegressed.
- Records of one key are in one lane, in the order of their positions, unless the kind says otherwise
  (``ordered_by_key``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from millrace.flows.batch import Batch


class Ends(NamedTuple):
    """Of a lane: the earliest record that is kept, and the position after the newest."""

    low: int
    high: int


class SourceLag(NamedTuple):
    """How far the source is behind the database that it reads."""

    bytes: int | None
    """Of the database's log that are not read yet; None: not known."""
    seconds: float
    cause: str
    """Why it does not read; empty while it does."""
    counts: Mapping[str, int] = MappingProxyType({})
    """What a best-effort source received, dropped and knows to be lost, by name."""


class Limits(NamedTuple):
    """When a batch is large enough."""

    records: int
    size: int
    """Bytes, about."""
    seconds: float
    """How long a batch that has records waits for more."""
    whole: int = 0
    """Bytes up to which a transaction of the source is read as a whole, though it is larger than a batch."""


def task_of(topic: str, partition: int) -> str:
    """The name of a partition's lane, and of the task that reads it."""
    return f"{topic}-{partition}"


class Source(Protocol):
    """The lanes of a source. Not thread-safe.

    A class that derives from it inherits what most sources do: topics without ids, and nobody to tell of positions.
    """

    def partitions(self) -> list[tuple[str, int]]:
        """Topic and partition of each lane. Raises LogUnavailable, ChannelNotFound."""
        ...

    def ends(self) -> dict[str, Ends]:
        """By lane. Raises as `partitions`."""
        ...

    def ids(self) -> dict[str, str]:
        """The id of each topic, which a topic of its name that is created anew does not have; none if not known."""
        return {}

    def at(self, milliseconds: int) -> dict[str, int]:
        """By lane, the position at which a moment begins."""
        ...

    def inherited(self, standing: Mapping[str, int]) -> Mapping[str, int]:
        """Return where lanes without a position begin that belong together with those that have one, in `standing`.

        A lane of `standing` that is none of the source's any more is then forgotten.
        """
        return {}

    def mirror(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Tell others of the positions (topic, partition, offset) that were reached. Errors are ignored."""
        return

    def lag(self) -> SourceLag | None:
        """Return how far the source is behind what it reads, apart from its lanes; None if it reads nothing itself."""
        return None

    def settle(self, positions: Mapping[str, int], tick: Callable[[], int], *, wait: bool = True) -> Mapping[str, int]:
        """Hear of the committed positions before ranges are planned; return the position that a lane may go to now.

        A source of transactions over several lanes holds lanes at the end of one until all of them are there, and then
        records `tick`, at which the sink has it whole. If no tick can be had it tries again, unless `wait` is false. A
        lane that is absent has no limit.
        """
        return {}

    def close(self) -> None:
        """Release what the source holds. Idempotent."""
        return


class LaneReader(Protocol):
    """Reads one lane. Not thread-safe."""

    def batches(self, start: int, end: int, limits: Limits, /) -> Iterator[Batch]:
        """Yield records from position `start` on and before `end`, in batches that follow one another.

        A source that can stop anywhere yields one batch within `limits`, which may end before `end`. Another yields
        batches that move no position, until the last one moves it to `end`: all of them are done, or none.

        Raises LogUnavailable, PositionTruncated, LogRegressed.
        """
        ...

    def close(self) -> None:
        """Release what the reader holds. Idempotent."""
        return


class Feeder(Protocol):
    """Gathers beside a worker what the lanes of a source then have."""

    def wait_complete(self, seconds: float, /) -> None:
        """Wait until what was there at the start is in the lanes. Raises DeadlineExceeded."""
        ...

    def check(self) -> None:
        """Raise StreamBusy if another machine has taken over what this gathers. Costs nothing."""

    def close(self) -> None:
        """Stop. Idempotent."""
        ...
