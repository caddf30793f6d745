"""Parquet files of a table that are durable before a commit names them, with what the commit needs to know of each.

:class:`FileSink` writes files with names unique to the attempt (millrace.storage.parquet_file) and describes each as a
:class:`FileAction`: plain data that a task sends to the driver. :mod:`millrace.storage.commit` commits them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

import pyarrow as pa

from millrace.base.errors import TableDamaged
from millrace.storage.parquet_file import REPAIR_HINT, FileAction, ParquetFileWriter, storage_options
from millrace.storage.store import TableStore, store_at
from millrace.storage.table import TableHandle

COMPRESSION: Final = "snappy"
MAX_FILE_BYTES: Final = 256 << 20
"""Approximate size of Arrow columns at which a file is closed."""


@dataclass(slots=True)
class FileSink:
    """Writes rows of one table to files of this attempt, one open file per set of partition values."""

    store: TableStore
    schema: pa.Schema
    """Columns of the files: those of the table without its partition columns."""
    stats_columns: tuple[str, ...]
    """Columns whose min and max go into the Delta log, for pruning."""
    kind: str = "part"
    """First word of the files' names."""
    actions: list[FileAction] = field(default_factory=list)
    _open: dict[tuple[tuple[str, str], ...], _OpenFile] = field(default_factory=dict)

    @classmethod
    def at(cls, uri: object, schema: pa.Schema, stats_columns: tuple[str, ...], *, kind: str = "part") -> Self:
        """Make a sink for the table at `uri`."""
        return cls(store_at(uri), schema, stats_columns, kind)

    def write(self, rows: pa.Table, partition: Mapping[str, str]) -> None:
        """Add `rows` (of ``schema``) to the partition's file."""
        key = tuple(partition.items())
        file = self._open.get(key)
        if file is None:
            file = self._open[key] = _OpenFile(self._new_file(partition, rows))
        file.parquet.write(rows)
        file.bytes += rows.nbytes
        if file.bytes >= MAX_FILE_BYTES:
            self.actions.append(self._open.pop(key).parquet.close(partition, self.stats_columns))

    def _new_file(self, partition: Mapping[str, str], first: pa.Table) -> ParquetFileWriter:
        """Return the writer of a new file that begins with the rows `first`."""
        folder = "".join(f"{name}={value}/" for name, value in partition.items())
        options = storage_options(first, compression=COMPRESSION)
        return ParquetFileWriter(
            self.store, f"{folder}{self.kind}-{uuid.uuid4()}.parquet", self.schema, options=options
        )

    def finish(self) -> list[FileAction]:
        """Close all open files durably. Returns the actions of all files."""
        for key, file in self._open.items():
            self.actions.append(file.parquet.close(dict(key), self.stats_columns))
        self._open.clear()
        return self.actions

    def abort(self) -> None:
        """Delete all written files."""
        for file in self._open.values():
            file.parquet.discard()
        self._open.clear()
        delete_uncommitted(self.store, self.actions)
        self.actions.clear()


@dataclass(slots=True)
class _OpenFile:
    parquet: ParquetFileWriter
    bytes: int = 0


def delete_uncommitted(store: TableStore, actions: Iterable[FileAction]) -> None:
    """Delete files that no commit will ever name. Only for the attempt that wrote them, after it was fenced."""
    store.delete(action.path for action in actions)


def check_live_files(table: TableHandle, names: Iterable[str]) -> None:
    """Raise TableDamaged if one of the live files `names` of `table` is missing."""
    missing = [name for name in names if table.store.size(name) is None]
    if missing:
        raise TableDamaged(
            f"{len(missing)} files of the table {table.uri} are missing, one is {missing[0]}: {REPAIR_HINT}",
            missing=True,
        )
