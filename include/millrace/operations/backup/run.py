"""A backup of a deployment while it runs: tables pinned, log and coordinator of one moment, files, the manifest last.

For the seconds in which the tables are pinned and the log's tail is copied nothing is given up (millrace.node.retention.removal_lock). The
tables' data files follow: they stay on disk for a day after they were replaced. Where one is gone all the same, the
backup begins anew, from newer versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import Field

from millrace.base.errors import BackupDamaged, InvalidArgument
from millrace.base.failpoint import hit
from millrace.base.files import make_folder
from millrace.base.log_backends import is_in_data_folder
from millrace.base.package import VERSION
from millrace.base.settings import Settings, non_default_settings
from millrace.log.protocol import LogService
from millrace.node.retention.removal_lock import removals_blocked
from millrace.operations.backfill.importer import STATE_FILE
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.deployment_id import ensure_deployment_id, read_deployment_id
from millrace.operations.backup.files import BackupFiles, FileGone, exclusive_lock
from millrace.operations.backup.log_copy import CopiedLog, copy_log
from millrace.operations.backup.manifest import (
    BackupManifest,
    begin_backup,
    list_backups,
    remove_backup,
    remove_unfinished_backups,
)
from millrace.operations.backup.table_pins import PinnedTable, pin_tables
from millrace.operations.backup.verify import verify_backup
from millrace.operations.checkpoint.staged_trim import TRIM_NOTES_FOLDER
from millrace.operations.operation import OperationReport
from millrace.operations.quality.quarantine import quarantine_uri
from millrace.operations.quality.results import docs_path, quality_path
from millrace.operations.restore.records import restores_path
from millrace.operations.roots import backup_roots, check_within, started_by_launcher
from millrace.runtime.progress import Progress
from millrace.storage.store import TableStore, store_at
from millrace.tables.quality_state import quality_results_uri

ATTEMPTS: Final = 3
"""How often a backup begins anew because a file was gone."""
WAIT_SECONDS: Final = 60.0
"""How long a backup waits for a truncation under way."""
LOCK: Final = ".backups.lock"
_THREADS: Final = 4


class BackupReport(OperationReport):
    """What a backup holds, or would."""

    id: str = Field(description="Empty: a dry run.")
    folder: str
    dry_run: bool
    tables: int
    files: int
    bytes: int
    linked_files: int = Field(description="Files that the backup before has, and that were not read again.")
    new_bytes: int = Field(description="Bytes of the other files.")
    log_included: bool
    ticks: dict[str, int] = Field(description="By PChannel: the WAL of the backup is whole up to there.")
    dropped: tuple[str, ...] = Field(
        default=(), description="Backups of this deployment that were removed, beyond those to be kept."
    )
    left: tuple[str, ...] = Field(
        default=(),
        description="Unfinished backups in that folder which are not known as this deployment's: left alone.",
    )
    verified: bool = False
    seconds: float


def run(settings: Settings, params: BackupParams, progress: Progress) -> BackupReport:
    """The operation as its job runs it, with the log's server (which it starts where none runs)."""
    from millrace.client.append_client import AppendClient
    from millrace.rpc.launch import launch_of

    root = backup_folder(settings, params)  # before anything is started
    with AppendClient.connect(
        settings.data_dir, deadline=settings.start_deadline, launch=launch_of(settings)
    ) as client:
        return backup(settings, client.service, params, progress, root=root)


def backup_folder(settings: Settings, params: BackupParams) -> Path:
    """The folder of backups. Raises InvalidArgument where none is named, or one inside the data folder is."""
    named = params.to or settings.backup_dir
    if not named:
        raise InvalidArgument("where should the backup go? Give the folder (to), or set backup_dir")
    root, data = Path(named), settings.data_dir.resolve()
    if data == root.resolve() or data in root.resolve().parents:
        raise InvalidArgument(f"{root} lies in the data folder, and would be lost with it: choose another folder")
    if started_by_launcher():
        check_within(str(root), backup_roots(settings), setting="backup_roots")
    return root


def backup(
    settings: Settings,
    service: LogService,
    params: BackupParams,
    progress: Progress,
    *,
    root: Path | None = None,
    seam: Callable[[str], None] = hit,
) -> BackupReport:
    """The operation on a log that is at hand. Raises BackupBusy, BackupRefused, LogBusy, TableUnavailable, InvalidArgument."""
    started = time.monotonic()
    root = root or backup_folder(settings, params)
    if params.dry_run:
        return _dry_run(settings, root, started)
    make_folder(root)
    with exclusive_lock(root / LOCK, busy=f"another backup is being made in {root}: try again when it is done"):
        own = ensure_deployment_id(settings)
        left = remove_unfinished_backups(root, own)
        for attempt in range(ATTEMPTS):
            folder = begin_backup(root, own)
            seam("backup.begun")
            try:
                manifest, files = _take(settings, service, folder, own, progress, seam)
                break
            except FileGone:
                remove_backup(folder)
                if attempt + 1 == ATTEMPTS:
                    raise
        if params.verify:
            progress.update("reading it back")
            problems = verify_backup(folder).problems
            if problems:
                raise BackupDamaged(f"{folder} does not read back as it was written: {'; '.join(problems[:5])}")
        dropped = [old for old, _ in list(list_backups(root, of=own))[params.keep :]]
        for old in dropped:
            remove_backup(old)
            seam("backup.dropped")
    return BackupReport(
        id=manifest.id,
        folder=str(folder),
        dry_run=False,
        tables=len(manifest.tables),
        files=len(manifest.files),
        bytes=manifest.bytes,
        linked_files=files.linked,
        new_bytes=files.new_bytes,
        log_included=manifest.log_included,
        ticks={name: each.tick for name, each in manifest.channels.items()},
        dropped=tuple(old.name for old in dropped),
        left=left,
        verified=params.verify,
        seconds=round(time.monotonic() - started, 3),
    )


def _take(
    settings: Settings,
    service: LogService,
    folder: Path,
    own: str,
    progress: Progress,
    seam: Callable[[str], None],
) -> tuple[BackupManifest, BackupFiles]:
    begun = datetime.now(UTC).isoformat()
    earlier, known = next(list_backups(folder.parent, of=own), (None, None))
    files = BackupFiles(folder, earlier, known)
    with removals_blocked(settings, deadline=WAIT_SECONDS):
        progress.update("pinning the tables")
        pinned = pin_tables(settings, files)
        seam("backup.pinned")
        _take_records(settings, files)  # before the log's end: what they say was sent is in it
        progress.update("copying the log")
        log = copy_log(settings, service, pinned, files)
        seam("backup.log")
        _take_staged(settings, files)  # behind it: what its messages name was there before them
    _take_tables(pinned, files, progress)
    files.sync_folders()
    seam("backup.copied")
    manifest = _manifest(settings, folder.name, begun, pinned, log)
    manifest = replace(manifest, deployment=own, files=dict(sorted(files.stored.items())))
    manifest.write(folder)
    seam("backup.written")
    return manifest, files


def _manifest(
    settings: Settings, name: str, begun: str, pinned: Mapping[str, PinnedTable], log: CopiedLog
) -> BackupManifest:
    return BackupManifest(
        id=name,
        started=begun,
        finished=datetime.now(UTC).isoformat(),
        millrace=VERSION,
        log=settings.log,
        log_included=log.included,
        settings=non_default_settings(settings),
        tables={each.name: each.version for each in pinned.values()},
        channels=log.channels,
        incarnations=log.incarnations,
    )


def _take_tables(pinned: Mapping[str, PinnedTable], files: BackupFiles, progress: Progress) -> None:
    """The data files of all tables, several at a time. The first error ends it."""
    wanted = [
        (store_at(each.uri), file, each.name, size) for each in pinned.values() for file, size in each.files.items()
    ]
    total, done = sum(size for *_, size in wanted) or 1, 0

    def one(file: tuple[TableStore, str, str, int]) -> int:
        files.link_table_file(*file)
        return file[-1]

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="backup") as pool:
        for number, size in enumerate(pool.map(one, wanted)):
            done += size
            if number % 100 == 0:
                progress.update("taking the tables' files", done=done / total, files=number, bytes=done)


def _take_staged(settings: Settings, files: BackupFiles) -> None:
    """What loads have staged: messages of the log may name it. Files of a load that is still being staged are left out."""
    staged = settings.staged_path
    for folder in sorted(staged.iterdir()) if staged.is_dir() else []:
        if folder.name.startswith(".") and folder.name != TRIM_NOTES_FOLDER:
            continue
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(settings.data_dir))
            if path.suffix == ".parquet":
                files.link_by_digest(path, name)
            elif path.is_file() and path.name != STATE_FILE:
                files.copy(path, name)


def _take_records(settings: Settings, files: BackupFiles) -> None:
    """Small files that are replaced whole: what loads and restores note of what they have sent, users' expectations."""
    for path in sorted(settings.staged_path.glob(f"[!.]*/{STATE_FILE}")):
        files.copy(path, str(path.relative_to(settings.data_dir)))
    tables = {quality_results_uri(settings), quarantine_uri(settings), docs_path(settings)}
    for folder in (restores_path(settings), quality_path(settings)):
        for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
            if path.is_file() and not tables.intersection(path.parents):
                files.copy(path, str(path.relative_to(settings.data_dir)))


def _dry_run(settings: Settings, root: Path, started: float) -> BackupReport:
    pinned = pin_tables(settings, None)
    _, known = next(list_backups(root, of=read_deployment_id(settings)), (None, None))
    wanted = {f"{each.name}/{file}": size for each in pinned.values() for file, size in each.files.items()}
    had = {name for name, size in wanted.items() if known is not None and (known.files.get(name) or (-1,))[0] == size}
    return BackupReport(
        id="",
        folder=str(root),
        dry_run=True,
        tables=len(pinned),
        files=len(wanted),
        bytes=sum(wanted.values()),
        linked_files=len(had),
        new_bytes=sum(size for name, size in wanted.items() if name not in had),
        log_included=is_in_data_folder(settings.log),
        ticks={},
        seconds=round(time.monotonic() - started, 3),
    )
