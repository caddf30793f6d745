"""Positions in a log, and the hybrid time tick.

A :class:`LogId` names one entry of a PChannel's log in a form that every backend can give (RocksMQ and Kafka use
``ledger = 0``; Pulsar uses both parts). A :class:`MessageId` adds the index inside the entry (an entry may frame many
messages) and the ordinal, which numbers, in time-tick order, the messages that the chain produced from that message:
those that it emitted and the message itself. Both compare as tuples, so ids order as time ticks within a PChannel.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Final, NamedTuple, TypeAlias, overload

from millrace.base.errors import InvalidArgument

LOGICAL_BITS: Final = 18
"""Bits of a time tick below the physical milliseconds, as in Milvus."""

GENERATION_BITS: Final = 48
"""Bits of a ledger below the log's generation. Each change of the backend (an AlterWAL message) starts the next
generation."""

MAX_TICK: Final = (1 << 63) - 1

COORDINATOR_ID: Final = int.from_bytes(b"Millrace")
"""The producer id of the coordinator's DDL; no other producer has it (random ids are below it)."""

_VCHANNEL: Final = re.compile(r"(.+)_([0-9]+)v[0-9]+", re.DOTALL)

_BINARY: Final = struct.Struct(">QQII")


def pchannel_of(vchannel: str) -> str:
    """Return the PChannel in a VChannel's name, ``<pchannel>_<collection id>v<n>``."""
    return vchannel.rpartition("_")[0]


def collection_id_of(vchannel: str) -> int | None:
    """Return the collection id in a VChannel's name; None if the name is not a VChannel's."""
    found = _VCHANNEL.fullmatch(vchannel)
    number = int(found[2]) if found is not None and len(found[2]) < 20 else 0
    return number if 0 < number < 1 << 63 else None


def split_channel(channel: str) -> tuple[str, str]:
    """Return the PChannel of a channel's name, and the name itself if it is a VChannel's (else "")."""
    return (pchannel_of(channel), channel) if _VCHANNEL.fullmatch(channel) else (channel, "")


class LogId(NamedTuple):
    """One entry of a PChannel's log; as a position, "the first entry with an id >= this"."""

    ledger: int
    entry: int

    def following(self) -> LogId:
        """Return the position after this entry."""
        return LogId(self.ledger, self.entry + 1)

    @property
    def generation(self) -> int:
        """The generation of the log that holds it; 0 is the first backend."""
        return self.ledger >> GENERATION_BITS

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}"

    @classmethod
    def parse(cls, text: str) -> LogId:
        """Invert ``str``. Raises InvalidArgument for any other text."""
        return cls(*_numbers(text, 2, "position in a log", "ledger:entry"))


EARLIEST: Final = LogId(0, 0)


def generation_start(generation: int) -> LogId:
    """Return the first position of a generation."""
    return LogId(generation << GENERATION_BITS, 0)


class LogIds(Sequence[LogId]):
    """Ids of consecutive entries of one ledger, created on access. Equal to any sequence with the same ids.

    An append of thousands of values whose ids nobody reads would otherwise pay for each, and again in garbage
    collection.
    """

    __slots__ = ("entries", "ledger")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ledger: int, entries: range) -> None:
        self.ledger = ledger
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, place: int) -> LogId: ...

    @overload
    def __getitem__(self, place: slice) -> LogIds: ...

    def __getitem__(self, place: int | slice) -> LogId | LogIds:
        if isinstance(place, slice):
            return LogIds(self.ledger, self.entries[place])
        return LogId(self.ledger, self.entries[place])

    def __iter__(self) -> Iterator[LogId]:
        # Twice as fast as calling LogId.
        return map(tuple.__new__, repeat(LogId), zip(repeat(self.ledger), self.entries))

    def __add__(self, other: Iterable[LogId]) -> list[LogId]:
        return [*self, *other]

    def __radd__(self, other: Iterable[LogId]) -> list[LogId]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LogIds):
            return self.entries == other.entries and (self.ledger == other.ledger or not self.entries)
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"LogIds({self.ledger}, {self.entries})"


class MessageId(NamedTuple):
    """The id of a message in a PChannel, with a text form and a 24-byte binary form that sorts as ids do."""

    ledger: int
    entry: int
    index: int  # type: ignore[assignment]  # the field's name; tuple.index is not used on ids
    ordinal: int

    @property
    def log_id(self) -> LogId:
        return LogId(self.ledger, self.entry)

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}:{self.index}:{self.ordinal}"

    def to_bytes(self) -> bytes:
        """Return 24 bytes, big-endian, ordered as the ids are."""
        return _BINARY.pack(*self)

    @classmethod
    def from_bytes(cls, data: bytes) -> MessageId:
        """Invert :meth:`to_bytes`. Raises InvalidArgument for any other length."""
        if len(data) != _BINARY.size:
            raise InvalidArgument(f"a binary message id has {_BINARY.size} bytes, not {len(data)}")
        return cls(*_BINARY.unpack(data))

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Invert ``str``. Raises InvalidArgument for any other text."""
        return cls(*_numbers(text, 4, "message id", "ledger:entry:index:ordinal"))


def _numbers(text: str, count: int, what: str, form: str) -> list[int]:
    parts = text.split(":")
    if len(parts) != count or not all(part.isascii() and part.isdigit() for part in parts):
        raise InvalidArgument(f"{text!r} is no {what}: write it as {form}")
    return [int(part) for part in parts]


def compose_tick(physical_ms: int, logical: int = 0) -> int:
    """Return the time tick of `physical_ms` (Unix milliseconds) and a logical counter below 2**18."""
    return (physical_ms << LOGICAL_BITS) | logical


def tick_physical_ms(tick: int) -> int:
    """Return the Unix milliseconds of a time tick."""
    return tick >> LOGICAL_BITS


Moment: TypeAlias = int | datetime | str
"""A time tick, a datetime with a time zone, or text: the tick's digits or ISO 8601 (UTC without a zone)."""


def resolve_tick(at: Moment) -> int:
    """Convert `at` to a time tick; a datetime means the last tick of its millisecond.

    Raises InvalidArgument if `at` is not a valid moment.
    """
    if isinstance(at, str):
        at = _moment(at)
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise InvalidArgument("a datetime needs a time zone: a tick is a moment, not a local time")
        if at.timestamp() < 0:
            raise InvalidArgument(f"{at.isoformat()} lies before 1970, where time ticks begin")
        ms = (at - datetime.fromtimestamp(0, at.tzinfo)) // timedelta(milliseconds=1)
        return compose_tick(ms, (1 << LOGICAL_BITS) - 1)
    if type(at) is not int:
        raise InvalidArgument(f"a moment is a time tick, a datetime or ISO 8601 text, not {type(at).__name__}")
    if not 0 <= at <= MAX_TICK:
        raise InvalidArgument(f"a time tick is not negative and at most {MAX_TICK}")
    return at


def resolve_span(after: Moment | None, until: Moment | None) -> tuple[int | None, int | None]:
    """Convert the bounds of a history to time ticks. Raises InvalidArgument if `until` is before `after`."""
    begin, end = (None if each is None else resolve_tick(each) for each in (after, until))
    if begin is not None and end is not None and begin > end:
        raise InvalidArgument(f"there is no history after tick {begin} up to the earlier tick {end}")
    return begin, end


def _moment(text: str) -> int | datetime:
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            f"{text[:100]!r} is neither a time tick nor a timestamp: write 460012345678901234 or 2026-11-21T10:15:00Z"
        ) from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found
