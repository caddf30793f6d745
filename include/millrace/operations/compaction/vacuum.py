"""VACUUM of Millrace's tables: removes files that were replaced long enough ago, and files that crashes left.

Files are kept for at least 24 hours: a task's file is on disk before its commit names it, and a reader may still use a
version that a file was part of. A longer ``delta.deletedFileRetentionDuration`` of a table takes precedence.
"""

from __future__ import annotations

import re
from typing import Final

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.operations.backfill.derived import derived_names, derived_uri
from millrace.operations.checkpoint.recovery_checkpoints import recovery_checkpoints_uri as recovery_checkpoints_uri
from millrace.operations.quality.gate import require_unblocked
from millrace.operations.quality.quarantine import quarantine_uri
from millrace.pipelines.worker.positions import pipeline_tables
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.bases import bases_uri
from millrace.tables.collections.data_tables import stored_collection_ids
from millrace.tables.quality_state import quality_results_uri
from millrace.tables.wal.trims import trims_uri

MIN_HOURS: Final = 24

_INTERVAL: Final = re.compile(r"(?:interval\s+)?(\d+)\s+(hour|day|week)s?", re.IGNORECASE)
_HOURS: Final = {"hour": 1, "day": 24, "week": 168}


def tables_to_vacuum(settings: Settings, collection_ids: list[int] | None) -> dict[str, str]:
    """Return the tables to vacuum by name: those of the given collections, or all of them and the shared tables."""
    places: dict[str, str] = {}
    for kind in ("collections", "deletes"):
        for number in stored_collection_ids(settings, kind):
            if collection_ids in (None, []) or number in (collection_ids or []):
                places[f"{kind}/{number}"] = settings.table_uri(f"{kind}/{number}")
    if not collection_ids:
        places |= {
            "segments": settings.segments_uri,
            "checkpoints": settings.checkpoints_uri,
            "wal": settings.wal_uri,
            "recovery_checkpoints": recovery_checkpoints_uri(settings),
            "bases": bases_uri(settings.wal_uri),
            "wal_trims": trims_uri(settings.wal_uri),
            "quality/results": quality_results_uri(settings),
            "quality/quarantine": quarantine_uri(settings),
        }
        places |= pipeline_tables(settings)
        places |= {f"derived/{name}": derived_uri(settings, name) for name in derived_names(settings)}
    return places


def vacuum_table(uri: object, *, hours: int, dry_run: bool, full: bool = True) -> tuple[int, int]:
    """Vacuum one table and return (files, bytes) removed, or to be removed in a dry run.

    `full` also lists the folder, and so finds files that no log names.

    Raises InvalidArgument below 24 hours.
    """
    if hours < MIN_HOURS:
        raise InvalidArgument(
            f"VACUUM keeps files for at least {MIN_HOURS} hours, not {hours}: running tasks may need them"
        )
    table = open_table(uri)
    if table is None:
        return 0, 0
    hours = max(hours, _own_hours(table))
    names = table.vacuum(hours, dry_run=True, full=full)
    size = sum(table.store.size(name) or 0 for name in names)
    if names and not dry_run:
        names = table.vacuum(hours, dry_run=False, full=full)
    return len(names), size


def vacuum(
    settings: Settings, *, hours: int, collection_ids: list[int] | None = None, dry_run: bool = False
) -> tuple[dict[str, int], int]:
    """Vacuum and return (files by table, bytes) removed, or to be removed in a dry run.

    Raises QualityBlocked while a critical expectation has failed: the evidence may be in the files to remove.
    """
    if not dry_run:
        require_unblocked(settings, what="VACUUM")
    found: dict[str, int] = {}
    total = 0
    for name, path in tables_to_vacuum(settings, collection_ids).items():
        files, size = vacuum_table(path, hours=hours, dry_run=dry_run)
        if files:
            found[name] = files
        total += size
    return found, total


def _own_hours(table: TableHandle) -> int:
    match = _INTERVAL.fullmatch(str(table.configuration.get("delta.deletedFileRetentionDuration", "")).strip())
    return int(match[1]) * _HOURS[match[2].lower()] if match else 0
