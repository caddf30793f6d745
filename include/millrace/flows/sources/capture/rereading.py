"""Read the rows of captured tables beside their changes, for tables that were added or that DDL changed.

A page of rows is read from the database's present state, and goes into the spool at the current position of the
changes, at the end of a transaction. The changes that the database made until the page was read follow it. They set
rows back to an earlier version for a while, and then to the page's, since each is a whole row or a delete. So the table
is right once the changes have passed the log position at which its last page was read. Until then no mark is whole.

For a database whose log has no DDL, this checks the tables' shapes from time to time. A page has the columns of the
shape that was seen, and is read only after the changes have passed the position of that check. So all changes before it
in the spool have that shape, too.
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
"""Seconds between two checks of the tables' shapes."""
READ_SECONDS: Final = 1.0
"""Seconds for which pages are read before the engine continues."""

_logger: Final = logging.getLogger(__name__)


class Look(NamedTuple):
    """The tables' shapes at a position of the log."""

    shapes: dict[str, Any]
    """Shapes by table, in JSON; None if there is no such table."""
    place: int


class Page(NamedTuple):
    """Rows of a table, in the order of its key."""

    lines: list[bytes]
    """Events of the operation ``r``, in the engine's form."""
    description: dict[str, Any]
    """The columns, in the engine's form of descriptions."""
    after: list[str] | None
    """The key of the last row, after which the next page begins; None if this is the last page."""
    place: int
    """The log position when the page was read. It may contain changes before it."""


class TableReader(Protocol):
    """A database's operations for rereading. One thread."""

    def look(self, tables: Sequence[str], /) -> Look:
        """Return the shapes of tables. Raises LogUnavailable."""
        ...

    def effect(self, before: Any, after: Any, /) -> Effect:
        """Return the effect of a table's change of shape on its rows."""
        ...

    def admit(self, table: str, /) -> None:
        """Prepare a table that was created again. Raises InvalidSettings if it cannot be captured."""
        ...

    def page(self, table: str, shape: Any, after: list[str] | None, /) -> Page | None:
        """Read rows after a key; None if the table has another shape now, or is locked. Raises LogUnavailable."""
        ...

    def passed(self, offset: Any, place: int, /) -> bool:
        """Return whether the changes before `place` are before the engine's `offset`."""
        ...

    def wake(self) -> None:
        """Write something into the log, so that the engine reaches its end although nobody else writes."""
        ...


class Progress(msgspec.Struct):
    """The progress of one table."""

    since: int
    """The log position that the changes must pass before the first page."""
    replace: bool = False
    """Whether the rows replace all earlier ones."""
    after: list[str] | None = None
    until: int | None = None
    """The log position when the last page was read; None if it was not read yet."""


class Standing(msgspec.Struct):
    """The state of a rereading in the spool."""

    shapes: dict[str, Any] = {}
    tables: dict[str, Progress] = {}


class Rereading:
    """The rereading of one engine's tables."""

    def __init__(self, reader: TableReader, tables: Sequence[str], stored: Any, *, added: Sequence[str] = ()) -> None:
        """Continue from `stored`, and begin with tables that were `added`. Raises as `TableReader.look`."""
        self._reader, self._tables = reader, sorted(tables)
        self._standing = msgspec.convert(copy.deepcopy(stored or {}), Standing)
        known = self._standing
        known.shapes = {each: shape for each, shape in known.shapes.items() if each in self._tables}
        known.tables = {each: progress for each, progress in known.tables.items() if each in self._tables}
        self.look(added=added)

    @property
    def pending(self) -> list[str]:
        """The tables whose rows are not complete."""
        return sorted(self._standing.tables)

    def stored(self) -> Any:
        """Return the state for the spool."""
        return msgspec.to_builtins(self._standing)

    def look(self, *, added: Sequence[str] = ()) -> None:
        """Check the shapes of all tables, and select those to be read. Raises as `TableReader.look`, `admit`."""
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
        _logger.info("reading the rows of %s", table)
        self._standing.tables[table] = Progress(place, replace)

    def settle(self, offset: Any) -> bool:
        """Process the end of a transaction, before it is marked; return whether the last table became right."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self.look()
        had = bool(self._standing.tables)
        for table, each in list(self._standing.tables.items()):
            if each.until is not None and self._reader.passed(offset, each.until):
                del self._standing.tables[table]
        return had and not self._standing.tables

    def pages(self, offset: Any) -> list[tuple[str, dict[str, Any] | None, list[bytes]]]:
        """Read rows to be stored after the transaction that ends at `offset`: tables, descriptions and lines.

        Without a description, the earlier rows must be removed.
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
        """Wake the engine if something remains to be read."""
        if self._standing.tables:
            self._reader.wake()
