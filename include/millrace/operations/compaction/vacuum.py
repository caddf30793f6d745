"""VACUUM of Millrace's tables: removes files that were replaced long enough ago, and files that crashes left.

Files are kept for at least 24 hours: a task's file is on disk before its commit names it, and a reader may still use a
version that a file was part of. A longer ``delta.deletedFileRetentionDuration`` of a table takes precedence.
"""

from __future__ import annotations

import re
import time
from typing import Final, NamedTuple

import pyarrow.fs as fs

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.flows.range_host.positions import flow_tables
from millrace.node.retention.file_removal import DeploymentFileRemover
from millrace.operations.backfill.derived import derived_names, derived_uri
from millrace.operations.checkpoint.recovery_checkpoints import recovery_checkpoints_uri as recovery_checkpoints_uri
from millrace.operations.coverage import Coverage
from millrace.operations.quality.gate import require_unblocked
from millrace.operations.quality.quarantine import quarantine_uri
from millrace.runtime.progress import Progress
from millrace.storage.pins import TablePins
from millrace.storage.published import CONVERTED, PublishedTable
from millrace.storage.replaced_files import published_needs
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.bases import bases_uri
from millrace.tables.collections.layout import TABLES, has_earlier_layout, rows_name, stored_collection_ids
from millrace.tables.quality_state import quality_results_uri
from millrace.tables.wal.trims import trims_uri

MIN_HOURS: Final = 24

_PIN_SECONDS: Final = 1800.0
"""Age of a pin from which files that no log names are left alone: half of the time that a log names them at least
(millrace.storage.table.DEFAULT_TOMBSTONES).
"""
_INTERVAL: Final = re.compile(r"(?:interval\s+)?(\d+)\s+(hour|day|week)s?", re.IGNORECASE)
_HOURS: Final = {"hour": 1, "day": 24, "week": 168}


def tables_to_vacuum(settings: Settings, collection_ids: list[int] | None) -> dict[str, str]:
    """Return the tables to vacuum by name: those of the given collections, or all of them and the shared tables."""
    places: dict[str, str] = {}
    for kind in ("rows", "deletes"):
        for number in stored_collection_ids(settings, kind):
            if collection_ids in (None, []) or number in (collection_ids or []):
                name = rows_name(settings, number) if kind == "rows" else f"deletes/{number}"
                places[name] = settings.table_uri(name)
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
        places |= flow_tables(settings)
        places |= {f"derived/{name}": derived_uri(settings, name) for name in derived_names(settings)}
    return places


def published_tables(settings: Settings, collection_ids: list[int] | None) -> dict[str, str]:
    """Return the folders of published tables by name: those of the given collections, or all."""
    if has_earlier_layout(settings):
        return {}
    names = [f"{TABLES}/{each}" for each in collection_ids or stored_collection_ids(settings, "rows")]
    return {name: settings.table_uri(name) for name in names}


class Vacuumed(NamedTuple):
    """Files that VACUUM removed, or would remove in a dry run."""

    files: dict[str, int]
    """Files by table."""
    bytes: int
    tables: int
    unchanged: int
    """Number of the tables that were not opened."""


def vacuum_table(uri: object, *, hours: int, dry_run: bool, full: bool = True) -> tuple[int, int]:
    """Vacuum one table and return (files, bytes) removed, or to be removed in a dry run.

    `full` also lists the folder, and so finds files that no log names.

    Raises InvalidArgument below 24 hours.
    """
    _check_hours(hours)
    table = open_table(uri)
    return (0, 0) if table is None else _vacuum(table, hours=hours, dry_run=dry_run, full=full)


def vacuum(
    settings: Settings,
    progress: Progress | None = None,
    *,
    hours: int,
    collection_ids: list[int] | None = None,
    dry_run: bool = False,
    full: bool = False,
) -> Vacuumed:
    """Vacuum the tables that have something to remove, or may have; `full`: all of them.

    A table that has not changed has nothing to remove until `hours` after its last commit, or at all if no file of it
    was replaced. A crash may have left a file that no log names: each table is listed once a day anyway.

    Raises QualityBlocked while a critical expectation has failed: the evidence may be in the files to remove.
    """
    _check_hours(hours)
    if not dry_run:
        require_unblocked(settings, what="VACUUM")
    found: dict[str, int] = {}
    total = 0
    places = tables_to_vacuum(settings, collection_ids)
    covered = Coverage.load(settings, "vacuum", depends={"format": 1, "hours": hours}, ignore=full)
    progress = progress or Progress()
    wanted = [(name, path) for name, path in places.items() if covered.look(name, path) is None]
    # A version that is pinned for so long may name a file that was replaced, and that no log names any more.
    pin = TablePins(settings.pins_uri).oldest()
    listed = pin is None or time.time() - pin / 1000 < _PIN_SECONDS
    for number, (name, path) in enumerate(wanted):
        progress.step(f"VACUUM of {name}", number, len(wanted))
        table = open_table(path)
        files, size = 0, 0
        if table is not None:
            retention = settings.publish_retention
            files, size = _vacuum(table, hours=hours, dry_run=dry_run, full=listed, publish_retention=retention)
        if files:
            found[name] = files
        elif not dry_run:
            covered.record(name, until=_next_look(covered, name, table, hours))
        total += size
    published = published_tables(settings, collection_ids)
    if not dry_run:
        for name, uri in published.items():
            if covered.look(name, uri) is None:
                _sweep(settings, uri, hours=hours)
                covered.record(name)
    if not collection_ids:
        covered.retain({*places, *published})
    covered.save()
    return Vacuumed(found, total, covered.tables, covered.unchanged)


def reclaimable_bytes(settings: Settings, *, hours: int, full: bool = False) -> int:
    """Return the bytes that VACUUM would free, by the Delta logs. VACUUM itself also finds files that no log names."""
    _check_hours(hours)
    places = tables_to_vacuum(settings, None)
    covered = Coverage.load(settings, "reclaimable", depends={"format": 1, "hours": hours}, ignore=full)
    total = 0
    for name, path in places.items():
        known = covered.look(name, path)
        if known is not None:
            total += int(known.note)
            continue
        table = open_table(path)
        size = 0
        if table is not None:
            retention = settings.publish_retention
            size = _vacuum(table, hours=hours, dry_run=True, full=False, publish_retention=retention)[1]
        covered.record(name, until=_next_look(covered, name, table, hours), note=size)
        total += size
    covered.retain(places)
    covered.save()
    return total


def _next_look(covered: Coverage, name: str, table: TableHandle | None, hours: int) -> float:
    """Return when an unchanged table may have something to remove that it has not now, in Unix seconds."""
    if table is None or not table.unnamed_files(0, full=False):
        return time.time() + hours * 3600.0
    return covered.changed_at(name) + max(hours, _own_hours(table)) * 3600.0


def _vacuum(
    table: TableHandle, *, hours: int, dry_run: bool, full: bool, publish_retention: float = 0.0
) -> tuple[int, int]:
    hours = max(hours, _own_hours(table))
    names = table.unnamed_files(hours, full=full)
    if not names:
        return 0, 0
    spare = published_needs(table.uri, since_ms=int((time.time() - publish_retention) * 1000))
    names = [name for name in names if name not in spare]
    size = sum(table.store.size(name) or 0 for name in names)
    if names and not dry_run:
        names = table.vacuum(hours, full=full, spare=spare)
    return len(names), size


def _sweep(settings: Settings, uri: str, *, hours: int) -> None:
    """Remove unneeded files of a published table, and leftovers of failed publishes.

    A running publisher also removes the former, with its commits.
    """
    table = PublishedTable.open(store_at(uri))
    if table is None:
        return
    DeploymentFileRemover(settings).after_publish(table)
    table.sweep_vectors()
    named, before = table.needed_files(since_ms=0), time.time() - hours * 3600
    there = table.store.filesystem.get_file_info(fs.FileSelector(CONVERTED, allow_not_found=True, recursive=True))
    table.store.delete(
        each.path for each in there if each.is_file and each.path not in named and each.mtime.timestamp() < before
    )


def _check_hours(hours: int) -> None:
    if hours < MIN_HOURS:
        raise InvalidArgument(
            f"VACUUM keeps files for at least {MIN_HOURS} hours, not {hours}: running tasks may need them"
        )


def _own_hours(table: TableHandle) -> int:
    match = _INTERVAL.fullmatch(str(table.configuration.get("delta.deletedFileRetentionDuration", "")).strip())
    return int(match[1]) * _HOURS[match[2].lower()] if match else 0
