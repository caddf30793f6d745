"""The contract of a source: lanes, where they begin and end, and batches of their records in order.

The promises, which the conformance suite tests:

- A *lane* is a topic's partition or a VChannel; its name never changes, and its ranges are consecutive.
- The records between two positions never change. A repeated read of a range returns the same records, in any process
  and in any division into ranges, so a runner needs no memory of what it read.
- A range is never read past a loss: records that retention removed raise PositionTruncated, which names the earliest
  position, and a lane that ends before a position raises LogRegressed.
- Records of one key are in one lane, in the order of their positions, unless the kind says otherwise
  (``ordered_by_key``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from millrace.flows.batch import Batch


class Ends(NamedTuple):
    """The earliest retained record of a lane, and the position after the newest."""

    low: int
    high: int


class SourceLag(NamedTuple):
    """The lag of a source behind its database."""

    bytes: int | None
    """Unread bytes of the database's log; None if unknown."""
    seconds: float
    cause: str
    """Why it does not read; empty while it does."""
    counts: Mapping[str, int] = MappingProxyType({})
    """Counts of a best-effort source, such as received, dropped and lost messages, by name."""


class Limits(NamedTuple):
    """When a batch is large enough."""

    records: int
    size: int
    """Bytes, about."""
    seconds: float
    """How long a batch with records waits for more."""
    whole: int = 0
    """Bytes up to which a transaction of the source is read as a whole although it exceeds a batch."""


def task_of(topic: str, partition: int) -> str:
    """Return the name of a partition's lane, and of the task that reads it."""
    return f"{topic}-{partition}"


class Source(Protocol):
    """The lanes of a source. Not thread-safe.

    A subclass inherits what most sources do: topics without ids, and no publication of positions.
    """

    def partitions(self) -> list[tuple[str, int]]:
        """Topic and partition of each lane. Raises LogUnavailable, ChannelNotFound."""
        ...

    def ends(self) -> dict[str, Ends]:
        """Return the ends by lane. Raises as `partitions`."""
        ...

    def ids(self) -> dict[str, str]:
        """Return the id of each topic, which changes when a topic is created again; empty if unknown."""
        return {}

    def at(self, milliseconds: int) -> dict[str, int]:
        """Return the position at which a moment begins, by lane."""
        ...

    def inherited(self, standing: Mapping[str, int]) -> Mapping[str, int]:
        """Return the positions of lanes without one that continue lanes with one, in `standing`.

        A lane of `standing` that the source no longer has is then forgotten.
        """
        return {}

    def mirror(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Publish the reached positions (topic, partition, offset) for other tools. Errors are ignored."""
        return

    def lag(self) -> SourceLag | None:
        """Return the lag behind the database, apart from that of the lanes; None if the source reads no database."""
        return None

    def settle(self, positions: Mapping[str, int], tick: Callable[[], int], *, wait: bool = True) -> Mapping[str, int]:
        """Process the committed positions before ranges are planned; return the position at which a lane must stop.

        A source of transactions over several lanes stops lanes at the end of one until all have reached it, and then
        records `tick`, at which the sink has it completely. If no tick is available it retries, unless `wait` is false.
        A lane that is absent has no limit.
        """
        return {}

    def close(self) -> None:
        """Release all resources. Idempotent."""
        return


class LaneReader(Protocol):
    """Reads one lane. Not thread-safe."""

    def batches(self, start: int, end: int, limits: Limits, /) -> Iterator[Batch]:
        """Yield records from position `start` on and before `end`, in consecutive batches.

        A source that can stop anywhere yields one batch within `limits`, which may end before `end`. Another source
        yields batches that move no position, until the last one moves it to `end`: all of them take effect, or none.

        Raises LogUnavailable, PositionTruncated, LogRegressed.
        """
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        return


class Feeder(Protocol):
    """Gathers the records of a source's lanes, beside a worker."""

    def wait_complete(self, seconds: float, /) -> None:
        """Wait until everything as of the start is in the lanes. Raises DeadlineExceeded."""
        ...

    def check(self) -> None:
        """Raise StreamBusy if another machine has taken over. Costs nothing."""

    def close(self) -> None:
        """Stop. Idempotent."""
        ...
