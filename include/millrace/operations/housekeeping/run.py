"""The operation `housekeeping`: trim each area to its retention, and report what that freed.

Nothing of it is needed to answer a read or to continue work. Each area is idempotent and independent: after a kill or
an error the next run removes the rest. One run at a time holds a lock; the areas whose files a backup copies also ask
for the removal permit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded
from millrace.base.file_lock import exclusive_lock, is_locked
from millrace.base.settings import Settings
from millrace.coord.consumer_positions import read_group_positions
from millrace.node.range_loop.parking import parked_names
from millrace.node.retention.removal_lock import removal_permit
from millrace.operations.housekeeping.airflow_history import airflow_home, trim_database
from millrace.operations.housekeeping.declaration import Area, HousekeepingParams
from millrace.operations.housekeeping.old_files import Removed, newest_write, remove_old_files
from millrace.operations.operation import OperationReport, counted, mebibytes
from millrace.operations.quality.data_docs import docs_store, remove_old_runs
from millrace.operations.quality.quarantine import quarantined
from millrace.operations.quality.results import remove_old_results
from millrace.operations.restore.records import remove_finished_records, unfinished_records
from millrace.runtime.launch.launcher import Launcher
from millrace.runtime.progress import Progress
from millrace.storage.objects import remove_old_uploads
from millrace.tables.quality_state import failed_critical_expectations

LOCK: Final = "housekeeping.lock"
NODE_LOCK: Final = "node.lock"
"""Lock of a running node in its folder (millrace.node.cluster.member)."""
DAY: Final = 86_400.0


class AreaReport(OperationReport):
    """Space that one area freed, or could free."""

    area: str
    retention_days: float = Field(description="0: everything is kept.")
    rows: int = 0
    files: int = 0
    freed_bytes: int = 0
    details: dict[str, int] = Field(default_factory=dict, description="Rows by table.")
    words: str = Field(default="", description="What was not trimmed, and why.")


class HousekeepingReport(OperationReport):
    """Space that a run freed, by area."""

    dry_run: bool
    areas: tuple[AreaReport, ...] = ()
    kept: dict[str, int] = Field(
        default_factory=dict, description="How much waits for a person or a program. None of it is removed by age."
    )
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        rows, files = sum(each.rows for each in self.areas), sum(each.files for each in self.areas)
        size = sum(each.freed_bytes for each in self.areas)
        if not rows and not files:
            return "Nothing is older than its retention."
        would = "would be" if self.dry_run else "were"
        return f"{counted(rows, 'row')} and {counted(files, 'file')} {would} removed, {mebibytes(size)}."


@dataclass(frozen=True, slots=True)
class Trim:
    """One area at work: remove what was last written before the moment `before`, in Unix seconds."""

    settings: Settings
    before: float
    dry_run: bool


def run(settings: Settings, params: HousekeepingParams, progress: Progress) -> HousekeepingReport:
    """Trim the areas that `params` name. Raises DeadlineExceeded while another run is at work, and JobFailed."""
    started, now = time.perf_counter(), time.time()
    settings.run_path.mkdir(parents=True, exist_ok=True)
    busy = DeadlineExceeded(f"another run of housekeeping is at work in {settings.data_dir}: try again when it is done")
    found = []
    with exclusive_lock(settings.run_path / LOCK, deadline=Deadline.after(0), busy=busy):
        for number, area in enumerate(params.areas):
            progress.step(f"trimming {area.replace('_', ' ')}", number, len(params.areas))
            days = RETENTION[area](settings)
            trims = days or area == "runs"  # whose number is limited, too
            freed = AREAS[area](Trim(settings, now - days * DAY, params.dry_run)) if trims else {}
            found.append(AreaReport(area=area, retention_days=days, **freed))
    return HousekeepingReport(
        dry_run=params.dry_run,
        areas=tuple(found),
        kept=_waiting_counts(settings),
        seconds=round(time.perf_counter() - started, 3),
    )


def _waiting_counts(settings: Settings) -> dict[str, int]:
    found = {
        "parked PChannels": len(parked_names(settings.parked_path)),
        "quality blocks": len(failed_critical_expectations(settings)),
        "quarantined slices": len(quarantined(settings)),
        "unfinished restores": unfinished_records(settings),
        "consumer groups": len(read_group_positions(settings)),
    }
    return {name: count for name, count in found.items() if count}


def _airflow_database(trim: Trim) -> dict[str, Any]:
    found = trim_database(trim.settings, before=trim.before, dry_run=trim.dry_run)
    rows: dict[str, int] = found["rows"]
    return {"rows": sum(rows.values()), "details": rows, "freed_bytes": found["bytes"], "words": found["words"]}


def _airflow_logs(trim: Trim) -> dict[str, Any]:
    return _old_files(airflow_home(trim.settings) / "logs", trim)


def _runs(trim: Trim) -> dict[str, Any]:
    """Remove the folders of runs that have ended. A run whose process holds the lock of its folder stays."""
    return {"files": len(Launcher(trim.settings).clean(dry_run=trim.dry_run))}


def _reports(trim: Trim) -> dict[str, Any]:
    """Remove the folders of nodes that left the cluster: nobody wrote there since, and no node has the lock."""
    found = Removed()
    nodes = trim.settings.run_path / "nodes"
    for name in os.listdir(nodes) if nodes.is_dir() else ():
        folder = nodes / name
        if folder.is_symlink() or is_locked(folder / NODE_LOCK) or newest_write(folder) >= trim.before:
            continue
        found += remove_old_files(folder, before=trim.before, dry_run=trim.dry_run)
        with suppress(OSError):
            if not trim.dry_run:
                folder.rmdir()
    return {"files": found.files, "freed_bytes": found.bytes}


def _restores(trim: Trim) -> dict[str, Any]:
    with removal_permit(trim.settings) as free:
        if not free:
            return {"words": "a backup copies them now; the next run trims them"}
        return {"files": remove_finished_records(trim.settings, before=trim.before, dry_run=trim.dry_run)}


def _quality(trim: Trim) -> dict[str, Any]:
    rows = remove_old_results(trim.settings, before=trim.before, dry_run=trim.dry_run)
    pages = remove_old_runs(docs_store(trim.settings), before=trim.before, dry_run=trim.dry_run)
    return {"rows": rows, "details": {"quality/results": rows} if rows else {}, "files": pages}


def _uploads(trim: Trim) -> dict[str, Any]:
    try:
        return {"files": remove_old_uploads(trim.settings.tables_uri, before=trim.before, dry_run=trim.dry_run)}
    except OSError as error:
        return {"words": f"{error}; the next run trims them"}


def _old_files(folder: Path, trim: Trim) -> dict[str, Any]:
    found = remove_old_files(folder, before=trim.before, dry_run=trim.dry_run)
    return {"files": found.files, "freed_bytes": found.bytes}


AREAS: Final[Mapping[Area, Callable[[Trim], dict[str, Any]]]] = {
    "airflow_database": _airflow_database,
    "airflow_logs": _airflow_logs,
    "runs": _runs,
    "reports": _reports,
    "restores": _restores,
    "quality": _quality,
    "uploads": _uploads,
}

RETENTION: Final[Mapping[Area, Callable[[Settings], float]]] = {
    "airflow_database": lambda settings: settings.airflow_retention_days,
    "airflow_logs": lambda settings: settings.airflow_retention_days,
    "runs": lambda settings: settings.run_retention_days,
    "reports": lambda settings: settings.run_retention_days,
    "restores": lambda settings: settings.run_retention_days,
    "quality": lambda settings: settings.quality_retention_days,
    "uploads": lambda settings: 1.0 if settings.tables_uri.startswith("s3://") else 0.0,
}
"""Days that an area keeps, by its setting. 0: it is not trimmed."""
