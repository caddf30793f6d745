"""A selection of dead letters: by cause, by their records' place, or one by one. All conditions must hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from millrace.base.errors import InvalidArgument
from millrace.flows.records import Record

if TYPE_CHECKING:
    from millrace.flows.errors.letter import Letter

PREFIX: Final = "__connect.errors."
"""Of Kafka Connect's headers."""
ROWS_OF: Final = "millrace.stream"
"""The header of a letter of a row: the flow, or ``<flow>/late``. Its topic is ``stream-`` and that, its partition the
row's number, its offset the micro-batch."""
MAX_IDS: Final = 1000
_ID: Final = re.compile(r"(\d{1,6})-(\d{1,18})", re.ASCII)


class Place(NamedTuple):
    """Where a record lies in its error topic; written ``0-17``."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}-{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises InvalidArgument."""
        found = _ID.fullmatch(text)
        if found is None:
            raise InvalidArgument(
                f"{text[:60]!r} is not a position in an error topic: give partition and offset, such as 0-17"
                " (see the list of errors)"
            )
        return cls(int(found[1]), int(found[2]))


@dataclass(frozen=True, slots=True)
class Selection:
    """Nothing given: everything. Raises InvalidArgument."""

    step: str = ""
    """It failed in this step."""
    kind: str = ""
    """Of this kind of fault."""
    reason: str = ""
    """The reason has these words in it, in whatever case."""
    first: str = ""
    """At or behind this place, in its partition; other partitions are left out."""
    last: str = ""
    """At or before it."""
    ids: tuple[str, ...] = ()
    """Just these places."""
    lane: str = ""
    """The record is of this lane of the source; of a row of a micro-batch, ``stream-NAME``."""
    low: int | None = None
    """At or after this position of the lane; of a row, the number of its micro-batch."""
    high: int | None = None
    """At or before it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        if len(self.ids) > MAX_IDS:
            raise InvalidArgument(f"at most {MAX_IDS} records can be named one by one: name a range")
        if (self.low is not None or self.high is not None) and not self.lane:
            raise InvalidArgument("positions are those of a lane: name it, such as flights-0")
        places = [Place.parse(each) for each in (self.first, self.last) if each]
        if len({each.partition for each in places}) > 1:
            raise InvalidArgument(f"{self.first} and {self.last} lie in two partitions: a range is of one")
        for each in self.ids:
            Place.parse(each)

    @property
    def whole(self) -> bool:
        return self == EVERYTHING

    def bounds(self, partition: int) -> tuple[int, int] | None:
        """The first offset and the one behind the last that can be meant in a partition; None: nothing there."""
        low, high = 0, 1 << 62
        for text, is_first in ((self.first, True), (self.last, False)):
            if text:
                place = Place.parse(text)
                if place.partition != partition:
                    return None
                low, high = (max(low, place.offset), high) if is_first else (low, min(high, place.offset + 1))
        if self.ids:
            here = [place.offset for place in map(Place.parse, self.ids) if place.partition == partition]
            if not here:
                return None
            low, high = max(low, min(here)), min(high, max(here) + 1)
        return (low, high) if low < high else None

    def takes(self, record: Record) -> bool:
        """Whether a record of the topic, within its partition's bounds, is meant."""
        if self.ids and str(Place(record.partition, record.offset)) not in self.ids:
            return False
        if self.lane:
            origin = place_of(record)
            if origin is None or not self.takes_place(*origin):
                return False
        told = dict(record.headers)
        return (
            (not self.step or told.get(f"{PREFIX}class.name") == self.step.encode())
            and (not self.kind or kind_of(record) == self.kind)
            and (
                not self.reason
                or self.reason.lower()
                in (told.get(f"{PREFIX}exception.message") or b"").decode(errors="replace").lower()
            )
        )

    def takes_place(self, lane: str | None, position: int | None) -> bool:
        """Return whether a record of the source that was there is meant."""
        if not self.lane:
            return True
        if lane != self.lane or position is None:
            return False
        return (self.low is None or position >= self.low) and (self.high is None or position <= self.high)

    def takes_letter(self, letter: Letter) -> bool:
        """Return whether a letter of a collection is meant."""
        return (
            (not self.step or letter.step == self.step)
            and (not self.kind or letter.kind == self.kind)
            and self.reason.lower() in letter.reason.lower()
            and self.takes_place(letter.lane, letter.position)
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ids": list(self.ids)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "ids": tuple(value.get("ids", ()))})


def place_of(record: Record) -> tuple[str, int] | None:
    """Return the lane and position that a record of the topic came from; None if its headers do not say them."""
    told = {name: value or b"" for name, value in record.headers if name.startswith(PREFIX)}
    try:
        topic, partition = told[f"{PREFIX}topic"].decode(), int(told[f"{PREFIX}partition"])
        lane = topic if rows_of(record, topic) else f"{topic}-{partition}"
        return lane, int(told[f"{PREFIX}offset"])
    except (KeyError, ValueError):
        return None


def rows_of(record: Record, topic: str) -> str:
    """Return whose row a letter from `topic` is: a flow on Spark, or its late rows; empty for a record of a source."""
    stream = (dict(record.headers).get(ROWS_OF) or b"").decode(errors="replace")
    return stream if topic == f"stream-{stream}" else ""


def kind_of(record: Record) -> str:
    """What a record of the topic failed of."""
    return (dict(record.headers).get(f"{PREFIX}exception.class.name") or b"").decode(errors="replace")


EVERYTHING: Final = Selection()
