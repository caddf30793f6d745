"""The base of a read: a published version of tick V, at most the read's own, which has judged the rows up to V already.

The version masks what is dead at V, so a read needs only what happened since: rows, deletes and drops after V. The base
says so of a file of the rows table that the version names and that has no row of after V. The read judges the others
row by row: files that were flushed since, files that took the place of published ones and are not published yet, and
all files if nothing is published.

A base is derived. A read without one gives the same rows, at the cost of all deletes. So a base that cannot be used is
none, and a vector that cannot be read makes its file one of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa

from millrace.base.errors import MillraceError, StoreCannotPublish, TableDamaged
from millrace.base.settings import Settings
from millrace.storage.deletion_vectors import Positions
from millrace.storage.published import PublishedTable, inner_path
from millrace.tables.collections.data_tables import published_uri
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.read.open_tables import OpenTables

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublishedBase:
    """A published version, and the key index by which deletes since find their rows."""

    table: PublishedTable
    index: KeyIndex
    names: Mapping[str, str]
    """The published file by the file of the rows table whose rows it has."""

    @classmethod
    def find(cls, settings: Settings, collection_id: int, tick: int, tables: OpenTables) -> Self | None:
        """Return the newest published version up to `tick`; None if there is none that can be read now."""
        try:
            table = tables.published(published_uri(settings, collection_id))
            if table is not None and table.tick > tick:
                version = table.version_at(tick)
                table = None if version is None else PublishedTable.open(table.store, version=version)
        except StoreCannotPublish:
            return None
        except MillraceError as error:
            _log.warning("a read uses no published version: %s", error)
            return None
        if table is None or not 0 < table.tick <= tick:
            return None
        index = tables.key_index(settings.key_index_path(collection_id))
        return cls(table, index, {inner_path(path): path for path in table.files})

    @property
    def tick(self) -> int:
        return self.table.tick

    def masked(self, path: str) -> Positions | None:
        """Return the masked positions of a file of the rows table; None if the version does not tell."""
        published = self.names.get(path)
        if published is None:
            return None
        try:
            return self.table.masked(published)
        except TableDamaged as error:
            _log.warning("a read judges the rows of %s itself: %s", path, error)
            return None

    def bounds(self, files: pa.Table, columns: Iterable[str]) -> pa.Table:
        """Return `files` (TableHandle.actions) with the bounds of further columns, as far as the version has them.

        The log of the rows table has those of the key and of ticks alone.
        """
        lacking = [name for name in columns if f"min.{name}" not in files.column_names]
        if not lacking:
            return files
        none: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
        paths = files["path"].to_pylist()
        said = [none if (name := self.names.get(path)) is None else self.table.bounds(name) for path in paths]
        for name in lacking:
            for kind, values in zip(("min", "max"), zip(*said, strict=True), strict=False):
                files = files.append_column(f"{kind}.{name}", pa.array([each.get(name) for each in values]))
        return files

    def judged(self, files: pa.Table) -> dict[str, Positions]:
        """Return those of `files` (TableHandle.actions) whose rows the version has judged, with what it masks.

        Reads the vectors of these files. Memory: 8 bytes for each masked row.
        """
        last = "max._time_tick"
        if last not in files.column_names:
            return {}
        found: dict[str, Positions] = {}
        for path, tick in zip(files["path"].to_pylist(), files[last].to_pylist(), strict=True):
            if tick is not None and tick <= self.tick and (positions := self.masked(path)) is not None:
                found[path] = positions
        return found
