"""Delta tables as the read model sees them: one handle a version, opened anew when there is a newer one, and its files.

A :class:`Pinned` is shared by threads: it is never refreshed, and whatever it is asked for comes from one version. The list of
its files is taken from the Delta log once a version.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from millrace.ops.observe.cache import Cache
from millrace.tables.delta_files import open_table

SECONDS: Final = 1.0
"""How long a version counts as the newest without a look."""


class Pinned:
    """One version of one table."""

    def __init__(self, path: Path, table: DeltaTable) -> None:
        self.path = path
        self.table = table
        self.version = int(table.version())
        self._lock = threading.Lock()
        self._actions: pa.Table | None = None

    def actions(self) -> pa.Table:
        """The live files: path, size_bytes, num_records, partition.* and min.*/max.* columns as the log has them."""
        with self._lock:
            if self._actions is None:
                self._actions = pa.table(self.table.get_add_actions(flatten=True))
            return self._actions

    def column(self, name: str, *, of: pa.Table | None = None) -> list[Any]:
        """A column of :meth:`actions` (nulls where no file has it)."""
        actions = self.actions() if of is None else of
        return actions[name].to_pylist() if name in actions.column_names else [None] * actions.num_rows

    def total(self, name: str) -> int:
        """The sum of a column of :meth:`actions`."""
        actions = self.actions()
        return int(pc.sum(actions[name]).as_py() or 0) if name in actions.column_names else 0

    def sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Bytes of each file."""
        return np.asarray(self.column("size_bytes"), dtype=np.int64)

    def file(self, path: str) -> Path:
        """Where a file of :meth:`actions` lies."""
        return self.path / unquote(path) if not (self.path / path).exists() else self.path / path


class Tables:
    """The newest version of each table, looked for at most once a second."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._known: dict[Path, Pinned] = {}

    def newest(self, path: Path) -> Pinned | None:
        """The table at `path` as it is now; None where there is none yet."""
        return self._cache.get(("table", path), SECONDS, lambda: self._open(path))

    def _open(self, path: Path) -> Pinned | None:
        with self._lock:
            known = self._known.get(path)
        following = path / "_delta_log" / f"{known.version + 1:020d}.json" if known is not None else None
        if known is not None and following is not None and not following.exists() and known.path.exists():
            return known
        table = open_table(path)
        if table is None:
            with self._lock:
                self._known.pop(path, None)
            return None
        pinned = Pinned(path, table)
        with self._lock:
            self._known[path] = pinned
        return pinned
