"""The contract of a source: lanes, where they begin and end, and batches of their records in order.

The promises, which the conformance suite tests:

- A *lane* is a topic's partition or a collection; its name never changes, and its ranges follow one another.
- The records between two positions never change. A range that is read again gives the same records, in any process and
  in any division into ranges, so a runner needs no memory of what it read.
- A range is never read past a loss: records that retention removed are PositionTruncated, which names the earliest
  position, and a lane that ends before a position is LogRegressed.
- Records of one key are in one lane, in the order of their positions. Records of different keys need not be: a
  collection's lane merges its VChannels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol

from millrace.base.settings import Settings
from millrace.flows.batch import Batch
from millrace.flows.sources.models import Source as Declared


class Ends(NamedTuple):
    """Of a lane: the earliest record that is kept, and the position after the newest."""

    low: int
    high: int


class Limits(NamedTuple):
    """When a batch is large enough."""

    records: int
    size: int
    """Bytes, about."""
    seconds: float
    """How long a batch that has records waits for more."""


def task_of(topic: str, partition: int) -> str:
    """The name of a partition's lane, and of the task that reads it."""
    return f"{topic}-{partition}"


class Source(Protocol):
    """The lanes of a source. Not thread-safe."""

    def partitions(self) -> list[tuple[str, int]]:
        """Topic and partition of each lane; a collection is one. Raises LogUnavailable, ChannelNotFound."""
        ...

    def ends(self) -> dict[str, Ends]:
        """By lane. Raises as `partitions`."""
        ...

    def ids(self) -> dict[str, str]:
        """The id of each topic, which a topic of its name that is created anew does not have; none if not known."""
        ...

    def at(self, milliseconds: int) -> dict[str, int]:
        """By lane, the position at which a moment begins."""
        ...

    def mirror(self, offsets: Iterable[tuple[str, int, int]]) -> None:
        """Tell others of the positions (topic, partition, offset) that were reached. Errors are ignored."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


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
        """Idempotent."""
        ...


class SourceKind(NamedTuple):
    """A kind of source."""

    source: str
    """``module:function``, from (declared, settings, *, group, after) to a Source; `after`: where a lane stands."""
    reader: str
    """``module:function``, from (declared, settings, *, group, topic, partition) to a LaneReader."""


_MODULES: Final = "millrace.flows.sources"
SOURCES: Final[dict[str, SourceKind]] = {
    "kafka": SourceKind(f"{_MODULES}.kafka.topics:source_of", f"{_MODULES}.kafka.topics:reader_of"),
    "collection": SourceKind(
        f"{_MODULES}.collection.documents:source_of", f"{_MODULES}.collection.documents:reader_of"
    ),
}
"""By the `kind` of a declaration. A new source is a folder, a model and a line here."""


def source_of(declared: Declared, settings: Settings, *, group: str, after: int | None = None) -> Source:
    """Return the lanes of `declared`; `after` is where its only lane stands, if it has one position."""
    found: Source = _function(SOURCES[declared.kind].source)(declared, settings, group=group, after=after)
    return found


def reader_of(declared: Declared, settings: Settings, *, group: str, topic: str, partition: int) -> LaneReader:
    """Return a reader of one lane of `declared`."""
    make = _function(SOURCES[declared.kind].reader)
    found: LaneReader = make(declared, settings, group=group, topic=topic, partition=partition)
    return found


def _function(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
