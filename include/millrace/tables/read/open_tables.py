"""Tables and key indexes that stay open between reads, brought up to date when they are asked for.

Opening the four tables of a read costs tens of milliseconds; looking whether they moved costs tens of microseconds. A
handle moves with its table, so a plan made with these tables is read before the next one is made: reads that end within
one call (of some keys, say) take an :class:`OpenTables` from an :class:`OpenTablesPool` for that long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from millrace.base.errors import MillraceError
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at
from millrace.storage.table import ChangeMark, TableHandle, change_mark, open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.key_index.index import MANIFEST_FILE, KeyIndex
from millrace.tables.wal.reader import WalSnapshot

MOST_TABLES: Final = 64
"""Tables that stay open, and key indexes. The one that was asked for first is closed first."""
MOST_FREE: Final = 4
"""Open tables that a pool holds for later reads."""


class OpenTables:
    """The tables of one read, opened once each. Not thread-safe."""

    def __init__(self) -> None:
        self._handles: dict[str, tuple[ChangeMark, TableHandle]] = {}
        self._checkpoints: tuple[TableHandle, int, dict[str, Checkpoint]] | None = None
        self._wal: tuple[TableHandle, WalSnapshot] | None = None
        self._published: dict[str, PublishedTable] = {}
        self._indexes: dict[Path, tuple[tuple[int, int], KeyIndex]] = {}

    def table(self, uri: str) -> TableHandle | None:
        """Return the table at its newest version; None if it does not exist. Raises TableDamaged."""
        mark = change_mark(uri)
        if mark is None:
            self._handles.pop(uri, None)
            return None
        known, handle = self._handles.get(uri, (mark, None))
        if handle is not None and known.settled and known.text == mark.text:
            return handle
        if handle is None or not _moved_on(handle, known, mark):
            handle = open_table(uri)
        if handle is None:
            return None
        if uri not in self._handles and len(self._handles) >= MOST_TABLES:
            del self._handles[next(iter(self._handles))]
        self._handles[uri] = (mark, handle)
        return handle

    def checkpoints(self, uri: str) -> dict[str, Checkpoint]:
        """Return the checkpoint of each PChannel at the newest version of ``checkpoints``."""
        table = self.table(uri)
        if table is None:
            return {}
        known = self._checkpoints
        if known is None or known[0] is not table or known[1] != table.version:
            known = self._checkpoints = (table, table.version, read_checkpoints(table))
        return known[2]

    def wal(self, uri: str) -> WalSnapshot | None:
        """Return the newest version of ``wal``; None if it does not exist."""
        table = self.table(uri)
        if table is None:
            return None
        known = self._wal
        if known is None or known[0] is not table or known[1].version != table.version:
            known = self._wal = (table, WalSnapshot(table))
        return known[1]

    def published(self, uri: str) -> PublishedTable | None:
        """Return a published table at its newest version; None if there is none, or it cannot be read now."""
        known = self._published.pop(uri, None)
        try:
            if known is not None:
                known.refresh()
            else:
                known = PublishedTable.open(store_at(uri))
        except MillraceError:
            return None
        if known is not None:
            self._published[uri] = known
            if len(self._published) > MOST_TABLES:
                del self._published[next(iter(self._published))]
        return known

    def key_index(self, folder: Path) -> KeyIndex:
        """Return the key index in `folder`, as its manifest is now."""
        try:
            found = (folder / MANIFEST_FILE).stat()
        except FileNotFoundError:
            return KeyIndex(folder)
        mark = (found.st_ino, found.st_mtime_ns)
        known = self._indexes.get(folder)
        if known is None or known[0] != mark:
            if folder not in self._indexes and len(self._indexes) >= MOST_TABLES:
                del self._indexes[next(iter(self._indexes))]
            known = self._indexes[folder] = (mark, KeyIndex.open(folder))
        return known[1]


def _moved_on(handle: TableHandle, known: ChangeMark, mark: ChangeMark) -> bool:
    """Refresh a handle. Returns False if another table may have taken the place of its own, or it cannot be refreshed.

    The first part of a mark is the log folder's inode; marks of an object store do not tell.
    """
    if known.text.partition("-")[0] != mark.text.partition("-")[0]:
        return False
    try:
        handle.refresh()
    except MillraceError:
        return False
    return handle.version_exists()


class OpenTablesPool:
    """Open tables for one read at a time each. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[OpenTables] = []
        self._guard = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[OpenTables]:
        """Lend open tables to the block. After an error they are closed."""
        with self._guard:
            tables = self._free.pop() if self._free else OpenTables()
        yield tables
        with self._guard:
            if len(self._free) < MOST_FREE:
                self._free.append(tables)
