"""Delta tables of the read model: one handle per version, with its list of files.

Threads share a :class:`TableSnapshot`. It is never refreshed, so everything read from it comes from one version. The
list of its files is read from the Delta log once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.observe.ttl_cache import TtlCache
from millrace.storage.table import TableHandle, open_table

MAX_TABLES: Final = 256
"""Tables whose newest version is kept; beyond that, the one that was opened first is opened again when it is needed."""
RECHECK_SECONDS: Final = 1.0
"""Seconds for which a version counts as the newest without a check."""


class TableSnapshot:
    """One version of one table."""

    def __init__(self, table: TableHandle) -> None:
        self.table = table
        self.version = table.version
        self._lock = threading.Lock()
        self._actions: pa.Table | None = None

    def actions(self) -> pa.Table:
        """Return the live files: path, size_bytes, num_records, and the log's partition.*, min.*, max.* columns."""
        with self._lock:
            if self._actions is None:
                self._actions = self.table.actions()
            return self._actions

    def column(self, name: str, *, of: pa.Table | None = None) -> list[Any]:
        """Return a column of :meth:`actions`, with nulls if no file has it."""
        actions = self.actions() if of is None else of
        return actions[name].to_pylist() if name in actions.column_names else [None] * actions.num_rows

    def total(self, name: str) -> int:
        """Return the sum of a column of :meth:`actions`."""
        actions = self.actions()
        return int(pc.sum(actions[name]).as_py() or 0) if name in actions.column_names else 0

    def sizes(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the bytes of each file."""
        return np.asarray(self.column("size_bytes"), dtype=np.int64)

    def opened(
        self, path: str, *, read_dictionary: Sequence[str] | None = None
    ) -> AbstractContextManager[pq.ParquetFile]:
        """Open a file of :meth:`actions` for reading."""
        return self.table.open_file(unquote(path), read_dictionary=read_dictionary)


class TableCache:
    """The newest version of each table, checked at most once a second."""

    def __init__(self, cache: TtlCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._known: OrderedDict[str, TableSnapshot] = OrderedDict()

    def newest(self, uri: str) -> TableSnapshot | None:
        """Return the current version of the table at `uri`, or None if it does not exist yet."""
        return self._cache.get(("table", uri), RECHECK_SECONDS, lambda: self._open(uri))

    def _open(self, uri: str) -> TableSnapshot | None:
        with self._lock:
            known = self._known.get(uri)
        if known is not None and known.table.is_newest():
            return known
        table = open_table(uri)
        if table is None:
            with self._lock:
                self._known.pop(uri, None)
            return None
        pinned = TableSnapshot(table)
        with self._lock:
            self._known[uri] = pinned
            self._known.move_to_end(uri)
            if len(self._known) > MAX_TABLES:
                self._known.popitem(last=False)
        return pinned
