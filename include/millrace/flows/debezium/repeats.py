"""Recognise repeated events: after a restart a connector sends the events after its last stored offset again.

A connector repeats a whole stretch, in order. If its first event was seen, all of them were, and they are left out. If
the window no longer has the first one, none is left out: the whole stretch is applied again, in order, and produces the
same rows. A part of a stretch must never be left out, or a row would stay at an older version. So an unknown event
whose position does not follow the last one clears the window. So does a row of a snapshot, which has no place in the
order of changes.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

import msgspec

Order: TypeAlias = tuple[str, tuple[Any, ...]]
"""A log's name and a position in it. Positions of two logs cannot be compared."""
Scalar: TypeAlias = str | int | float | bool | None
_FILE: Final = re.compile(r"(.*?)(\d{1,18})$", re.DOTALL)
_sequence: Final = msgspec.json.Decoder(list[str | None]).decode
SOURCES: Final = 64
"""The most connectors of one lane that are tracked at once."""
_ROWS: Final = 1 << 11
_POSITIONS: Final = 1 << 32


class Source(msgspec.Struct):
    """The `source` of an event: its database and position. Connectors fill different fields."""

    connector: str = ""
    name: str = ""
    db: Scalar = None
    schema: Scalar = None
    table: Scalar = None
    ts_ms: Scalar = None
    snapshot: Scalar = None
    sequence: Any = None
    lsn: Any = None
    file: Any = None
    pos: Any = None
    row: Any = None
    commit_lsn: Any = None
    change_lsn: Any = None
    event_serial_no: int | None = None
    tick: Any = None

    @property
    def is_snapshot(self) -> bool:
        """Whether the row was read from the table, not from the log."""
        return self.snapshot not in (None, False, "false")

    def order(self) -> Order | None:
        """Return a position that grows from change to change of one connector; None if there is none."""
        if self.sequence is not None and self.lsn is not None:
            # Transactions arrive in commit order, but their changes have the positions where they were made. So
            # PostgreSQL's lsn alone does not grow; compare the commit's position first.
            try:
                return self.connector, tuple(int(each or 0) for each in _sequence(self.sequence))
            except (msgspec.MsgspecError, TypeError, ValueError):
                return None
        if self.file is not None and type(self.pos) is int:
            matched = _FILE.match(str(self.file))
            if matched is None:
                return None
            row = self.row if type(self.row) is int else 0
            return f"{self.connector} {matched[1]}", (int(matched[2]), self.pos, row)
        if isinstance(self.commit_lsn, str) and isinstance(self.change_lsn, str):
            return self.connector, (self.commit_lsn, self.change_lsn, self.event_serial_no or 0)
        if type(self.tick) is int:
            return self.connector, (self.tick,)
        return None

    def version(self) -> int:
        """Return a number that grows from change to change of one row. Raises ValueError if there is none.

        It is valid for one server: after a failover a binary log may start again.
        """
        found: int | None = None
        if type(self.lsn) is int:
            found = self.lsn
        elif self.file is not None and type(self.pos) is int:
            matched = _FILE.match(str(self.file))
            row = self.row if type(self.row) is int else 0
            if matched is not None and 0 <= self.pos < _POSITIONS and 0 <= row < _ROWS:
                found = (int(matched[2]) * _POSITIONS + self.pos) * _ROWS + row
        elif type(self.tick) is int:
            found = self.tick
        if found is None or not 0 <= found < 1 << 63:
            raise ValueError("its source has no numeric position: set version to offset")
        return found


class _Seen:
    """The seen events of one connector."""

    __slots__ = ("events", "newest")

    def __init__(self) -> None:
        self.events: dict[int, int] = {}
        """Offsets of records by their event's hash, in the order of offsets."""
        self.newest: Order | None = None


class Repeats:
    """The recent events of one lane. Not thread-safe."""

    def __init__(self, size: int) -> None:
        """`size` is the number of events remembered for each connector."""
        self._size = size
        self._seen: dict[str, _Seen] = {}
        self._offset = -1

    def __len__(self) -> int:
        return sum(len(each.events) for each in self._seen.values())

    def is_repeat(self, source: Source, operation: str, key: bytes | None, offset: int) -> bool:
        """Return whether the event of the record at `offset` occurred in an earlier record.

        A record that is read again is not a repeat of itself, and events seen after it are forgotten.
        """
        if offset <= self._offset:
            self._forget_from(offset)
        self._offset = offset
        seen = self._seen.get(source.name)
        if seen is None:
            if len(self._seen) >= SOURCES:
                self._seen.pop(next(iter(self._seen)))
            seen = self._seen[source.name] = _Seen()
        order = None if source.is_snapshot else source.order()
        if order is None:
            seen.events.clear()
            seen.newest = None
            return False
        event = hash((order, source.ts_ms, source.db, source.schema, source.table, operation, key))
        if event in seen.events:
            return True
        newest = seen.newest
        if newest is not None and (order[0] != newest[0] or order[1] < newest[1]):
            seen.events.clear()
        seen.newest = order
        seen.events[event] = offset
        if len(seen.events) > self._size:
            del seen.events[next(iter(seen.events))]
        return False

    def forget(self) -> None:
        """Forget all events seen so far, so that none of them counts as a repeat."""
        self._seen.clear()

    def _forget_from(self, offset: int) -> None:
        for seen in self._seen.values():
            while seen.events:
                last = next(reversed(seen.events))
                if seen.events[last] < offset:
                    break
                del seen.events[last]
                seen.newest = None  # the next event was judged before, after the same events
