"""Net changes between two versions of a published table, from its log alone: which rows of which files came or went.

Cost follows the commits between the versions and the vectors of the files that they changed; no data file is read.

Rewrites change no rows, so their files count as unchanged by them. A row that came, was moved by a rewrite and went is
in both answers: as come in the old file and as gone in the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.storage.deletion_vectors import NO_POSITIONS, Positions, Vector, read_vector
from millrace.storage.published import PublishedTable
from millrace.storage.published_log import parse_commit
from millrace.storage.store import TableStore


@dataclass(frozen=True, slots=True)
class Shown:
    """A data file that is live in a version."""

    vector: Vector | None
    """The masked rows; None if there are none."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """What changed of one data file."""

    path: str
    before: Shown | None
    """As the older version shows it; None if it is not live there."""
    after: Shown | None
    """As the newer version shows it; None if it is not live there."""

    def came(self, store: TableStore, rows: int) -> Positions:
        """Return the positions of rows that only the newer version shows. `rows` is the number of rows in the file.

        Raises TableDamaged.
        """
        return _only(store, self.after, self.before, rows)

    def went(self, store: TableStore, rows: int) -> Positions:
        """Return the positions of rows that only the older version shows. Raises TableDamaged."""
        return _only(store, self.before, self.after, rows)


def _only(store: TableStore, one: Shown | None, other: Shown | None, rows: int) -> Positions:
    if one is None:
        return NO_POSITIONS
    if other is None:
        return np.setdiff1d(np.arange(rows, dtype=np.int64), _masked(store, one), assume_unique=True)
    return np.setdiff1d(_masked(store, other), _masked(store, one), assume_unique=True)


def _masked(store: TableStore, shown: Shown) -> Positions:
    return NO_POSITIONS if shown.vector is None else read_vector(store, shown.vector)


def net_changes(table: PublishedTable, since: int) -> list[FileChange] | None:
    """Return the files that differ between version `since` and the version of `table`.

    None if the log no longer has the commits between them. Raises TableDamaged.
    """
    before: dict[str, Shown | None] = {}
    after: dict[str, Shown | None] = {}
    for version in range(since + 1, table.version + 1):
        actions = parse_commit(table.store, version)
        if actions is None:
            return None
        for remove in (action["remove"] for action in actions if "remove" in action):
            before.setdefault(remove["path"], _shown(remove))
            after[remove["path"]] = None if remove["dataChange"] else _shown(remove)
        for add in (action["add"] for action in actions if "add" in action):
            before.setdefault(add["path"], None if add["dataChange"] else _shown(add))
            after[add["path"]] = _shown(add)
    return [FileChange(path, before[path], after[path]) for path in before if before[path] != after[path]]


def _shown(action: Mapping[str, Any]) -> Shown:
    return Shown(Vector.from_action(action.get("deletionVector")))
