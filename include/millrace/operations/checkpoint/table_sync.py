"""Durability of the tables before the log is truncated: syncs files, log entries and folders of every table.

Streaming node and flusher fsync what they commit. Other writers may not, and truncation must not depend on them.
Therefore everything committed since the last call is synced once more before the log is truncated. Tables that have not
changed since (:mod:`millrace.operations.coverage`) are not opened. The records hold the versions known to be synced; if
they are lost, all live files are synced.
"""

from __future__ import annotations

from typing import NamedTuple

from millrace.base.settings import Settings
from millrace.operations.coverage import Coverage
from millrace.runtime.progress import Progress
from millrace.storage.store import OBJECT_STORES
from millrace.storage.table import open_table, sync_table
from millrace.tables.collections.layout import rows_name, stored_collection_ids


class SyncedTables(NamedTuple):
    """The result of a sync."""

    files: int
    tables: int
    """Number of tables that the truncation depends on."""
    unchanged: int
    """Number of those that were not opened."""


def tables_to_sync(settings: Settings) -> dict[str, str]:
    """Return the tables on a disk that truncation of the log depends on, by name with their URIs.

    Those in an object store are durable: looking at each of them would cost a listing a run.
    """
    if settings.tables_uri.partition("://")[0] in OBJECT_STORES:
        return {}
    names = ["wal", "segments", "checkpoints"]
    names += [rows_name(settings, number) for number in stored_collection_ids(settings, "rows")]
    names += [f"deletes/{number}" for number in stored_collection_ids(settings, "deletes")]
    return {name: settings.table_uri(name) for name in names}


def sync_tables(settings: Settings, progress: Progress | None = None, *, full: bool = False) -> SyncedTables:
    """Sync everything committed since the last call; `full`: all live files."""
    covered = Coverage.load(settings, "checkpoint", ignore=full)
    progress = progress or Progress()
    count, changed = 0, covered.changed(tables_to_sync(settings))
    for number, (name, path) in enumerate(changed):
        progress.step("syncing the tables", number, len(changed))
        table = open_table(path)
        if table is not None:
            count += sync_table(table, covered.note(name))
            covered.record(name, note=table.version)
    covered.save()
    return SyncedTables(count, covered.tables, covered.unchanged)
