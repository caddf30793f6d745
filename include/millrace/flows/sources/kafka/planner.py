"""The steps of a reader of topics: offsets by lane, and the effect of retention and of new topics on them.

A :class:`Place` is plain data, also as JSON: the offset of each partition before which everything was read, and the ids
of the topics. Two places are a range whose records never change: a task for each lane reads it, at any time, in any
process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from millrace.base.errors import LogRegressed, PositionTruncated
from millrace.flows.sources.kafka.topics import Topics
from millrace.flows.sources.source import Ends, task_of

UNBOUNDED: Final = 1 << 62
FEW: Final = 100
"""Records of a lane that a step takes without asking for their size."""

_MARGIN: Final = 4
"""The factor by which records may grow without notice."""

Start = Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a reader."""

    offsets: Mapping[str, int]
    """The offset of the next record, by lane (``topic-partition``)."""
    ids: Mapping[str, str]
    """The id of each topic, which changes when it is created again. Empty at a beginning, and if the brokers have no
    ids."""
    since: Mapping[str, int] = field(default_factory=dict)
    """Where the reader began. Spark stores a query's beginning only with its first micro-batch."""

    again: int = 0
    """The number of the last redrive whose records were read. See :class:`RecordsAgain`."""

    @property
    def begins(self) -> bool:
        return dict(self.offsets) == dict(self.since)

    def start(self) -> Self:
        """Return the position at which this reader began."""
        return type(self)(self.since, self.ids, self.since)

    def to_json(self) -> dict[str, Any]:
        found = {"offsets": dict(self.offsets), "ids": dict(self.ids), "since": dict(self.since)}
        return {**found, "again": self.again} if self.again else found

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(value["offsets"], value["ids"], value["since"], value.get("again", 0))


@dataclass(frozen=True, slots=True)
class LaneRange:
    """A task: the records of one partition, from `start` on and before `end`."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def lane(self) -> str:
        return task_of(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class RecordsAgain:
    """A task: records that could not be decoded before, from a file of a redrive."""

    path: str
    number: int


class Planner:
    """Plans the reading of topics. One thread at a time."""

    def __init__(self, topics: Topics, record_size: Callable[[LaneRange], float] | None = None) -> None:
        """`record_size` returns the mean bytes of the records of a range, which is not empty."""
        self._topics = topics
        self._record_size = record_size
        self._sizes: dict[str, float] = {}
        """Mean bytes of a record, by lane, as of the last query."""

    def begin(self, start: Start | int = "earliest", *, offsets: Mapping[str, int] | None = None) -> Place:
        """Return a beginning: a named end, the records from a moment (milliseconds) on, or `offsets` by lane.

        A lane that is not in `offsets` begins at its earliest record.
        """
        if isinstance(start, int):
            found = self._topics.at(start)
        else:
            found = {lane: ends.low if start == "earliest" else ends.high for lane, ends in self._topics.ends().items()}
        if offsets is not None:
            found |= {lane: offset for lane, offset in offsets.items() if lane in found}
        return Place(found, {}, found)

    def ends(self) -> dict[str, int]:
        """Return the offset after the newest record of each lane."""
        return {lane: ends.high for lane, ends in self._topics.ends().items()}

    def next(
        self,
        place: Place,
        *,
        max_bytes: int = UNBOUNDED,
        max_records: int = UNBOUNDED,
        target: Mapping[str, int] | None = None,
    ) -> Place:
        """Return the next position of a reader at `place`: up to `target` (default: everything), within the limits.

        A limited step takes the same share of each lane's backlog, so that lanes reach their ends together and none
        falls behind the watermark of the others. A partition that was added to the topic since then begins at its
        earliest record. Returns `place` itself if there is nothing to read.

        Raises PositionTruncated if retention removed records that were not read, LogRegressed if a topic was created
        again or lost records, and as Topics.ends.
        """
        ids = self._require_same(place)
        ends = self._topics.ends()
        backlog: dict[str, int] = {}
        for lane, end in ends.items():
            at = _checked(lane, place.offsets.get(lane, end.low), end)
            backlog[lane] = max(0, (end.high if target is None else target.get(lane, at)) - at)
        gone = [lane for lane in place.offsets if lane not in ends]
        if gone:
            raise LogRegressed(f"{gone[0]}: the partition no longer exists, since the topic was created again")
        records = sum(backlog.values())
        if not records:
            return place
        share = min(1.0, max_records / records)
        if max_bytes < UNBOUNDED and records > FEW:
            share = min(share, max_bytes / max(1.0, self._size(place, ends, backlog, max_bytes)))
        offsets, since = dict(place.offsets), dict(place.since)
        for lane, count in backlog.items():
            at = offsets.get(lane, ends[lane].low)
            since.setdefault(lane, at)
            offsets[lane] = at + (min(count, max(1, int(count * share))) if count else 0)
        return Place(offsets, ids, since, place.again)

    def ranges(self, start: Place, end: Place) -> list[LaneRange]:
        """Return a task for each lane that has records between two positions."""
        found = []
        for lane, last in end.offsets.items():
            topic, _, partition = lane.rpartition("-")
            first = start.offsets.get(lane, end.since.get(lane, 0))
            if first < last:
                found.append(LaneRange(topic, int(partition), first, last))
        return found

    def _require_same(self, place: Place) -> dict[str, str]:
        ids = dict(self._topics.ids())
        for topic, known in place.ids.items():
            if ids.get(topic, known) != known:
                raise LogRegressed(
                    f"{topic}: the topic was created again (its id was {known}, now {ids[topic]}):"
                    " replay the stream from the new topic's beginning"
                )
        return {**place.ids, **ids}

    def _size(self, place: Place, ends: Mapping[str, Ends], backlog: Mapping[str, int], most: int) -> float:
        """Return about how many bytes the backlog has.

        Queries record sizes, at the cost of a fetch each, only if needed.
        """
        asked = [lane for lane, count in backlog.items() if count]
        if self._record_size is None:
            return 0.0
        known = all(lane in self._sizes for lane in asked)
        if not known or sum(backlog[lane] * self._sizes[lane] for lane in asked) * _MARGIN >= most:
            for topic, partition in self._topics.partitions():
                lane = task_of(topic, partition)
                if lane in asked:
                    at = place.offsets.get(lane, ends[lane].low)
                    few = LaneRange(topic, partition, at, min(at + FEW, at + backlog[lane]))
                    self._sizes[lane] = self._record_size(few)
        return sum(backlog[lane] * self._sizes[lane] for lane in asked)


def _checked(lane: str, at: int, ends: Ends) -> int:
    if at < ends.low:
        raise PositionTruncated(
            f"{lane}: offset {at} was removed by retention; the earliest is {ends.low}: replay the stream from there",
            earliest=(0, ends.low),
        )
    if at > ends.high:
        raise LogRegressed(
            f"{lane}: offset {at} is beyond the end {ends.high}: the topic was created again, or lost records"
        )
    return at
