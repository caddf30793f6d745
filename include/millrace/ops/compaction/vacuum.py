"""VACUUM of Millrace's tables: files that were replaced long enough ago, and files that crashes left unnamed.

Never below 24 hours: a task's file stands on disk before its commit names it, and a reader may still hold the version
that a file was part of. A table that asks for longer itself (``delta.deletedFileRetentionDuration``) gets that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from deltalake import DeltaTable, PostCommitHookProperties

from millrace.errors import InvalidArgument
from millrace.ops.checkpoint.store import checkpoints_path as recovery_checkpoints_path
from millrace.ops.quality.gate import require_open
from millrace.ops.quality.quarantine import quarantine_path
from millrace.settings import Settings
from millrace.tables.bases import bases_path
from millrace.tables.delta_files import open_table
from millrace.tables.delta_log import commit_lease
from millrace.tables.quality_state import results_path
from millrace.tables.wal_trims import trims_path

LEAST_HOURS: Final = 24

_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_INTERVAL: Final = re.compile(r"(?:interval\s+)?(\d+)\s+(hour|day|week)s?", re.IGNORECASE)
_HOURS: Final = {"hour": 1, "day": 24, "week": 168}


def vacuum_places(settings: Settings, collection_ids: list[int] | None) -> dict[str, Path]:
    """The tables that are vacuumed, by name: of the given collections, or of all of them and the shared tables, too."""
    places: dict[str, Path] = {}
    for kind in ("collections", "deletes"):
        folder = settings.data_dir / kind
        ids = sorted((int(each.name) for each in folder.iterdir() if each.name.isdigit()) if folder.is_dir() else [])
        places |= {
            f"{kind}/{number}": folder / str(number)
            for number in ids
            if collection_ids in (None, []) or number in (collection_ids or [])
        }
    if not collection_ids:
        places |= {
            "segments": settings.segments_path,
            "checkpoints": settings.checkpoints_path,
            "wal": settings.wal_path,
            "recovery_checkpoints": recovery_checkpoints_path(settings),
            "bases": bases_path(settings.wal_path),
            "wal_trims": trims_path(settings.wal_path),
            "quality/results": results_path(settings),
            "quality/quarantine": quarantine_path(settings),
        }
        derived = settings.data_dir / "derived"
        folders = sorted(derived.iterdir()) if derived.is_dir() else []
        places |= {f"derived/{folder.name}": folder for folder in folders if folder.is_dir()}
    return places


def vacuum_table(path: Path, *, hours: int, dry_run: bool, full: bool = True) -> tuple[int, int]:
    """(files, bytes) that were removed, or would be. `full` looks at the folder too, and so finds files no log names.

    Raises InvalidArgument below 24 hours.
    """
    if hours < LEAST_HOURS:
        raise InvalidArgument(f"VACUUM keeps files for {LEAST_HOURS} hours at least, not {hours}: tasks may need them")
    table = open_table(path)
    if table is None:
        return 0, 0
    hours = max(hours, _own_hours(table))
    names = table.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=full)
    size = sum(_size(path / name) for name in names)
    if names and not dry_run:
        with commit_lease(path):
            table.update_incremental()
            names = table.vacuum(
                hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=full,
                post_commithook_properties=_HOOKS,
            )
    return len(names), size


def vacuum(
    settings: Settings, *, hours: int, collection_ids: list[int] | None = None, dry_run: bool = False
) -> tuple[dict[str, int], int]:
    """(files by table, bytes) that were removed, or would be.

    Raises QualityBlocked while a critical expectation stands failed: what is wrong may be in the files to be removed.
    """
    if not dry_run:
        require_open(settings, what="VACUUM")
    found: dict[str, int] = {}
    total = 0
    for name, path in vacuum_places(settings, collection_ids).items():
        files, size = vacuum_table(path, hours=hours, dry_run=dry_run)
        if files:
            found[name] = files
        total += size
    return found, total


def _own_hours(table: DeltaTable) -> int:
    match = _INTERVAL.fullmatch(
        str(table.metadata().configuration.get("delta.deletedFileRetentionDuration", "")).strip()
    )
    return int(match[1]) * _HOURS[match[2].lower()] if match else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # another VACUUM was first
