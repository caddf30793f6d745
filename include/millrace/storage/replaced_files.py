"""Removes files that a commit replaced, as soon as no reader and no task can need them.

One rule holds for a replaced file and for the log entry that names it. Both stay while the commit that replaced it is
younger than the retention, while a pin is older than that commit (millrace.storage.pins), and while fewer than `keep`
versions follow. Files that no commit names are never touched here: a task may be about to commit them, and VACUUM
removes them a day later.

The log itself says what was replaced and when, so nothing else is stored: a remover that starts reads the log from its
oldest entry. The work of a call is bounded by its versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from millrace.base.failpoint import hit
from millrace.storage.delta_log import first_commit, replaced_files
from millrace.storage.table import TableHandle

CALL_LIMIT: Final = 256
"""Versions whose replaced files a call removes."""


class FileRemover:
    """Removes replaced files of any number of tables, one thread at a time for each; several processes may do so."""

    def __init__(
        self,
        *,
        retention: float,
        oldest_pin: Callable[[], int | None],
        permit: Callable[[], AbstractContextManager[bool]],
        keep: int = 0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`retention` in seconds. `oldest_pin` returns Unix milliseconds; `permit` yields whether files may be removed
        now; `now` returns Unix seconds.
        """
        self._retention = retention
        self._oldest_pin = oldest_pin
        self._permit = permit
        self._keep = keep
        self._now = now
        self._next: dict[str, int] = {}
        """By table the first version whose replaced files may still be there."""

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
            pin = self._oldest_pin()
            limit = int((self._now() - self._retention) * 1000)
            limit = limit if pin is None else min(limit, pin)
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
                doomed = [name for name in doomed if name not in live]
                store.delete(doomed)
                hit("replaced.removed")
        table.replaced_from = self._next[table.uri] = version
        return len(doomed)
