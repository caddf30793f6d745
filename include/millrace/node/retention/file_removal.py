"""Removal of replaced files in a deployment: its pins, its retention, and what blocks it.

A backup that pins the tables blocks it (millrace.node.retention.removal_lock), and so does a failed critical
expectation: the evidence may be in the files to remove.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.node.retention.removal_lock import removal_permit
from millrace.storage.commit import set_properties
from millrace.storage.pins import TablePins
from millrace.storage.published import PublishedTable
from millrace.storage.replaced_files import FileRemover
from millrace.storage.table import TOMBSTONES, TableHandle
from millrace.tables.quality_state import failed_critical_expectations

_log = logging.getLogger(__name__)
REMOVE_COMMITS: Final = 16
"""Commits of a table between two removals."""
_BLOCKED_SECONDS: Final = 10.0
"""Time for which the state of the expectations is not read again."""


class DeploymentFileRemover:
    """Removes replaced files of a deployment's tables beside their commits. One thread at a time for each table."""

    def __init__(self, settings: Settings, *, keep: int = 0, retention: float | None = None) -> None:
        """`keep`: the newest versions of a table whose replaced files stay in any case. `retention` in seconds replaces
        the setting.
        """
        self._settings = settings
        self._remover = FileRemover(
            retention=settings.file_retention if retention is None else retention,
            publish_retention=settings.publish_retention,
            oldest_pin=TablePins(settings.pins_uri).oldest,
            permit=self._permit,
            keep=keep,
        )
        self._due: dict[str, int] = {}
        self._blocked, self._asked = False, -math.inf

    def after_commit(self, table: TableHandle) -> int:
        """Remove what is no longer needed, once every REMOVE_COMMITS commits. Return the number of files."""
        if table.version < self._due.get(table.uri, 0):
            return 0
        try:
            if table.uri not in self._due:
                self._limit_tombstones(table)
            self._due[table.uri] = table.version + REMOVE_COMMITS
            return self._remover.remove(table)
        except Exception as error:  # the commit succeeded; its caller must not see a failure
            _log.warning("cannot remove replaced files of %s now (%s): a later commit does", table.uri, error)
            return 0

    def after_publish(self, table: PublishedTable) -> int:
        """Remove what a published table no longer needs. Returns the number of data files."""
        try:
            return self._remover.remove_published(table)
        except Exception as error:  # as after a commit
            _log.warning("cannot remove unneeded files of %s (%s): a later publish removes them", table.uri, error)
            return 0

    def remove(self, table: TableHandle) -> int:
        """Remove everything that is no longer needed. Return the number of files."""
        return self._remover.remove(table, max_versions=table.version + 1)

    def _limit_tombstones(self, table: TableHandle) -> None:
        """Have Delta checkpoints forget removed files once they are gone; tables of earlier builds keep them longer."""
        wanted = f"interval {max(1, math.ceil(self._settings.file_retention / 3600))} hours"
        set_properties(table, lambda known: {} if known.get(TOMBSTONES) == wanted else {TOMBSTONES: wanted})

    @contextmanager
    def _permit(self) -> Iterator[bool]:
        if time.monotonic() >= self._asked + _BLOCKED_SECONDS:
            try:
                self._blocked = bool(failed_critical_expectations(self._settings))
            except MillraceError:
                self._blocked = True  # unknown
            self._asked = time.monotonic()
        with removal_permit(self._settings) as free:
            yield free and not self._blocked
