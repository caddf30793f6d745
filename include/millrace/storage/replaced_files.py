"""Removes files that a commit replaced, as soon as no reader and no task can need them.

One rule holds for a replaced file and for the log entry that names it. Both stay while the commit that replaced it is
younger than the retention, while a pin is older than that commit (millrace.storage.pins), and while fewer than `keep`
versions follow. Files that no commit names are never touched here: a task may be about to commit them, and VACUUM
removes them a day later.

Two logs name a file of a rows table: its own, and that of the published table. Each has a retention, and the removal
that comes last deletes the file: :meth:`FileRemover.remove` leaves what the published table needs, and
:meth:`FileRemover.remove_published` leaves what the rows table needs.

The log itself says what was replaced and when, so nothing else is stored: a remover that starts reads the log from its
oldest entry. The work of a call is bounded by its versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from typing import Final

from millrace.base.failpoint import hit
from millrace.storage.delta_log import first_commit, replaced_files
from millrace.storage.published import ROWS_FOLDER, PublishedTable
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, open_table

CALL_LIMIT: Final = 256
"""Versions whose replaced files a call removes."""


def published_needs(uri: str, *, since_ms: int) -> Set[str]:
    """Return the files of the table at `uri` that versions of a published table name, which were the newest at Unix
    time `since_ms` or later; none if `uri` is not a rows table, or nothing is published. Raises TableDamaged.
    """
    root, _, folder = uri.rpartition("/")
    published = PublishedTable.open(store_at(root)) if folder == ROWS_FOLDER else None
    if published is None:
        return frozenset()
    return {path.removeprefix(f"{ROWS_FOLDER}/") for path in published.needed_files(since_ms=since_ms)}


class FileRemover:
    """Removes replaced files of any number of tables, one thread at a time for each; several processes may do so."""

    def __init__(
        self,
        *,
        retention: float,
        publish_retention: float = 0.0,
        oldest_pin: Callable[[], int | None],
        permit: Callable[[], AbstractContextManager[bool]],
        keep: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`retention`, and `publish_retention` for versions of published tables, in seconds. `oldest_pin` returns Unix
        milliseconds; `permit` yields whether files may be removed now; `now` returns Unix seconds.
        """
        self._retention = retention
        self._publish_retention = publish_retention
        self._oldest_pin = oldest_pin
        self._permit = permit
        self._keep = keep
        self._now = now
        self._next: dict[str, int] = {}
        """For each table, the first version whose replaced files may still exist."""

    def remove(self, table: TableHandle, *, max_versions: int = CALL_LIMIT) -> int:
        """Remove what `table`, a handle at its newest version, no longer needs. Return the number of files.

        Tells the handle up to where the log may be trimmed.
        """
        store = table.store
        version = self._next.get(table.uri)
        if version is None:
            version = first_commit(store)
        table.replaced_from = self._next[table.uri] = version
        last = min(table.version - self._keep, version + max_versions - 1)
        if version > last:
            return 0
        with self._permit() as free:
            if not free:
                return 0
            # The pins are read inside: a reader that pins the tables now holds off removals meanwhile, or is seen.
            limit = self._limit(self._retention)
            doomed: list[str] = []
            while version <= last:
                found = replaced_files(store, version)
                if found is not None:  # else another process has removed its files, and trimmed the log
                    at, names = found
                    if at > limit:
                        break
                    doomed += names
                version += 1
            if doomed:
                live = table.live_files()  # a restore of an older version may have added a file again
                needed = published_needs(table.uri, since_ms=self._limit(self._publish_retention))
                doomed = [name for name in doomed if name not in live and name not in needed]
                store.delete(doomed)
                hit("replaced.removed")
        table.replaced_from = self._next[table.uri] = version
        return len(doomed)

    def remove_published(self, table: PublishedTable) -> int:
        """Remove the vector files and data files that no version of a published table needs within its retention.

        `table` is a handle at its newest version. Data files that the rows table still needs stay for :meth:`remove`.
        Opens the rows table only if the published table stopped using a file. Returns the number of data files.
        """
        with self._permit() as free:
            gone = table.expire(before_ms=self._limit(self._publish_retention)) if free else []
            shared = [path for path in gone if path.startswith(f"{ROWS_FOLDER}/")]
            rows = open_table(f"{table.uri}/{ROWS_FOLDER}") if shared else None
            required: set[str] = set()
            if rows is not None:
                found = {*rows.live_files(), *_replaced_after(rows, self._limit(self._retention))}
                required = {f"{ROWS_FOLDER}/{name}" for name in found}
            doomed = [path for path in gone if path not in required]
            table.store.delete(doomed)
        return len(doomed)

    def _limit(self, retention: float) -> int:
        """Return the Unix milliseconds before which a commit's replaced files may go."""
        pin, limit = self._oldest_pin(), int((self._now() - retention) * 1000)
        return limit if pin is None else min(limit, pin)


def _replaced_after(table: TableHandle, limit: int) -> Set[str]:
    """Return the files that commits after Unix milliseconds `limit` replaced."""
    names: set[str] = set()
    for version in range(table.version, -1, -1):
        found = replaced_files(table.store, version)
        if found is None or found[0] <= limit:
            break
        names.update(found[1])
    return names
