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
"""Prefix of Kafka Connect's headers."""
ROWS_OF: Final = "millrace.stream"
"""The header of a row's letter: the flow, or ``<flow>/late``. Its topic is ``stream-`` plus that, its partition the
row's number, its offset the micro-batch."""
MAX_IDS: Final = 1000
_ID: Final = re.compile(r"(\d{1,6})-(\d{1,18})", re.ASCII)


class Place(NamedTuple):
    """The position of a record in its error topic, written ``0-17``."""

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
    """Conditions on dead letters. Without any, all are selected. Raises InvalidArgument."""

    step: str = ""
    """The step in which it failed."""
    kind: str = ""
    """The kind of the cause."""
    reason: str = ""
    """Words that the reason contains, ignoring case."""
    first: str = ""
    """The first position in its partition. Other partitions are excluded."""
    last: str = ""
    """The last position in its partition."""
    ids: tuple[str, ...] = ()
    """Exactly these positions."""
    lane: str = ""
    """The record's lane of the source; for a row of a micro-batch, ``stream-NAME``."""
    low: int | None = None
    """The first position in the lane; for a row, the number of its micro-batch."""
    high: int | None = None
    """The last position in the lane."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        if len(self.ids) > MAX_IDS:
            raise InvalidArgument(f"at most {MAX_IDS} records can be named one by one: name a range")
        if (self.low is not None or self.high is not None) and not self.lane:
            raise InvalidArgument("positions need a lane: name it, such as flights-0")
        places = [Place.parse(each) for each in (self.first, self.last) if each]
        if len({each.partition for each in places}) > 1:
            raise InvalidArgument(f"{self.first} and {self.last} are in two partitions: give a range within one")
        for each in self.ids:
            Place.parse(each)

    @property
    def whole(self) -> bool:
        return self == EVERYTHING

    def bounds(self, partition: int) -> tuple[int, int] | None:
        """Return the first offset in a partition that may be selected and the offset after the last; None if there are
        none."""
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
        """Return whether the selection takes a record of the topic that is within its partition's bounds."""
        if self.ids and str(Place(record.partition, record.offset)) not in self.ids:
            return False
        if self.lane:
            origin = place_of(record)
            if origin is None or not self.takes_place(*origin):
                return False
        headers = dict(record.headers)
        return (
            (not self.step or headers.get(f"{PREFIX}class.name") == self.step.encode())
            and (not self.kind or kind_of(record) == self.kind)
            and (
                not self.reason
                or self.reason.lower()
                in (headers.get(f"{PREFIX}exception.message") or b"").decode(errors="replace").lower()
            )
        )

    def takes_place(self, lane: str | None, position: int | None) -> bool:
        """Return whether the selection takes a record with this position in the source."""
        if not self.lane:
            return True
        if lane != self.lane or position is None:
            return False
        return (self.low is None or position >= self.low) and (self.high is None or position <= self.high)

    def takes_letter(self, letter: Letter) -> bool:
        """Return whether the selection takes a letter of a collection."""
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
    """Return the original lane and position of a record of the topic; None if its headers do not name them."""
    headers = {name: value or b"" for name, value in record.headers if name.startswith(PREFIX)}
    try:
        topic, partition = headers[f"{PREFIX}topic"].decode(), int(headers[f"{PREFIX}partition"])
        lane = topic if rows_of(record, topic) else f"{topic}-{partition}"
        return lane, int(headers[f"{PREFIX}offset"])
    except (KeyError, ValueError):
        return None


def rows_of(record: Record, topic: str) -> str:
    """Return the flow (or ``<flow>/late``) of a row's letter from `topic`; empty for a record of a source."""
    stream = (dict(record.headers).get(ROWS_OF) or b"").decode(errors="replace")
    return stream if topic == f"stream-{stream}" else ""


def kind_of(record: Record) -> str:
    """Return the kind of the cause of a record of the topic; empty if unknown."""
    return (dict(record.headers).get(f"{PREFIX}exception.class.name") or b"").decode(errors="replace")


EVERYTHING: Final = Selection()
