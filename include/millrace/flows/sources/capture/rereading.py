"""Read the rows of captured tables beside their changes: of tables that were added, or that DDL changed.

A page of rows is read from the database as it is now, and goes into the spool where the changes have got to, at the end
of a transaction. The changes that the database made until the page was read come after it. They bring rows back to an
earlier version for a while, and then to the page's, since each is a whole row or a delete. So the table is right once
the changes have passed the place of the log at which its last page was read. Until then no mark is whole.

For a database whose log does not have DDL, this looks at the tables' shapes from time to time. A page has the columns
of the shape that was seen, and is read only after the changes have passed the place where that was. So all changes
before it in the spool have that shape, too.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from millrace.flows.sources.capture.ddl import Effect

LOOK_SECONDS: Final = 5.0
"""Between two looks at the shapes of tables."""
READ_SECONDS: Final = 1.0
"""For which pages are read before the engine goes on."""

_logger: Final = logging.getLogger(__name__)


class Look(NamedTuple):
    """Tables as they were at some place of the log."""

    shapes: dict[str, Any]
    """By table, in JSON; None: there is no such table."""
    place: int


class Page(NamedTuple):
    """Rows of a table, in the order of its key."""

    lines: list[bytes]
    """Events of the operation ``r``, as the engine writes them."""
    description: dict[str, Any]
    """The columns, as the engine describes them."""
    after: list[str] | None
    """The key of the last row, after which the next page begins; None: this is the last page."""
    place: int
    """Of the log, when this was read: changes before it may be in the page."""


class TableReader(Protocol):
    """What a database offers for it. One thread."""

    def look(self, tables: Sequence[str], /) -> Look:
        """Return the shapes of tables. Raises LogUnavailable."""
        ...

    def effect(self, before: Any, after: Any, /) -> Effect:
        """Return what changes of a table's shape do to its rows."""
        ...

    def admit(self, table: str, /) -> None:
        """Prepare a table that was created anew. Raises InvalidSettings if it cannot be captured."""
        ...

    def page(self, table: str, shape: Any, after: list[str] | None, /) -> Page | None:
        """Read rows after a key; None: the table has another shape now, or is locked. Raises LogUnavailable."""
        ...

    def passed(self, offset: Any, place: int, /) -> bool:
        """Return whether the changes before `place` are before the engine's `offset`."""
        ...

    def wake(self) -> None:
        """Write something into the log, so that the engine gets to its end though nobody else writes."""
        ...


class Progress(msgspec.Struct):
    """Of one table."""

    since: int
    """Place of the log that the changes pass before the first page."""
    replace: bool = False
    """Whether the rows replace all earlier ones."""
    after: list[str] | None = None
    until: int | None = None
    """Place of the log when the last page was read; None: it is not read yet."""


class Standing(msgspec.Struct):
    """What the spool keeps of this."""

    shapes: dict[str, Any] = {}
    tables: dict[str, Progress] = {}


class Rereading:
    """The reading of one engine's tables."""

    def __init__(self, reader: TableReader, tables: Sequence[str], stored: Any, *, added: Sequence[str] = ()) -> None:
        """Continue what `stored` says, and begin with tables that were `added`. Raises as `TableReader.look`."""
        self._reader, self._tables = reader, sorted(tables)
        self._standing = msgspec.convert(copy.deepcopy(stored or {}), Standing)
        known = self._standing
        known.shapes = {each: shape for each, shape in known.shapes.items() if each in self._tables}
        known.tables = {each: progress for each, progress in known.tables.items() if each in self._tables}
        self.look(added=added)

    @property
    def pending(self) -> list[str]:
        """The tables whose rows are not all there."""
        return sorted(self._standing.tables)

    def stored(self) -> Any:
        """Return what the spool keeps."""
        return msgspec.to_builtins(self._standing)

    def look(self, *, added: Sequence[str] = ()) -> None:
        """Look at the shapes of all tables, and note which are to be read. Raises as `TableReader.look`, `admit`."""
        found = self._reader.look(self._tables)
        self._looked = time.monotonic()
        known = self._standing
        for table, shape in found.shapes.items():
            if table in added:
                self._begin(table, Effect.REPLACE, shape, found.place)  # it may have been captured before
            elif table in known.shapes and known.shapes[table] != shape:
                self._begin(table, self._reader.effect(known.shapes[table], shape), shape, found.place)
            known.shapes[table] = shape

    def _begin(self, table: str, effect: Effect, shape: Any, place: int) -> None:
        reading = self._standing.tables.get(table)
        if effect is Effect.NOTHING and reading is None:
            return
        if effect is Effect.REPLACE and shape is not None:
            self._reader.admit(table)
        replace = effect is Effect.REPLACE or (reading is not None and reading.replace and reading.after is None)
        _logger.info("the rows of %s are read", table)
        self._standing.tables[table] = Progress(place, replace)

    def settle(self, offset: Any) -> bool:
        """Hear of the end of a transaction, before it is marked; return whether the last table is right now."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self.look()
        had = bool(self._standing.tables)
        for table, each in list(self._standing.tables.items()):
            if each.until is not None and self._reader.passed(offset, each.until):
                del self._standing.tables[table]
        return had and not self._standing.tables

    def pages(self, offset: Any) -> list[tuple[str, dict[str, Any] | None, list[bytes]]]:
        """Read rows to come after the transaction whose end is at `offset`: tables, descriptions and lines.

        Without a description, the rows before are to be removed.
        """
        end, found = time.monotonic() + READ_SECONDS, list[tuple[str, dict[str, Any] | None, list[bytes]]]()
        for table, each in sorted(self._standing.tables.items()):
            while each.until is None and self._reader.passed(offset, each.since):
                shape = self._standing.shapes[table]
                page = None if shape is None else self._reader.page(table, shape, each.after)
                if page is None and shape is not None:
                    self.look()
                    return found
                if each.replace and each.after is None:
                    found.append((table, None, []))
                if page is not None:
                    found.append((table, page.description, page.lines))
                each.after = None if page is None else page.after
                if each.after is None:
                    each.until = each.since if page is None else page.place
                if time.monotonic() >= end:
                    return found
        return found

    def wake(self) -> None:
        """Let the engine go on if something is to be read."""
        if self._standing.tables:
            self._reader.wake()
