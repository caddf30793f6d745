"""Backup of a running deployment: pin the tables, copy the log and the coordinator's file, link the tables' files.

Log and coordinator's file are of one moment. The manifest is written last.

Nothing may be removed while the tables are pinned and the log's tail is copied, which takes seconds
(millrace.node.retention.removal_lock). The tables' data files follow; a pin (millrace.storage.pins) keeps those that
are replaced meanwhile. If one is missing all the same, the backup starts again from newer versions.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from millrace.base.errors import BackupDamaged, InvalidArgument
from millrace.base.failpoint import hit
from millrace.base.files import make_folder
from millrace.base.log_backends import is_in_data_folder
from millrace.base.package import VERSION
from millrace.base.scratch_folder import ScratchFolder
from millrace.base.settings import Settings, non_default_settings
from millrace.log.protocol import LogService
from millrace.node.retention.removal_lock import removals_blocked
from millrace.operations.backfill.importer import STATE_FILE
from millrace.operations.backup.bucket import BackupPlace, BucketFolder, ContentPool, backup_place
from millrace.operations.backup.bucket_files import BucketFiles
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.deployment_id import ensure_deployment_id, read_deployment_id
from millrace.operations.backup.files import BackupFiles, FileGone, exclusive_lock
from millrace.operations.backup.flow_state import HeldFlows, held_spools, take_documents, take_spools
from millrace.operations.backup.log_copy import CopiedLog, copy_log
from millrace.operations.backup.manifest import (
    BackupManifest,
    begin_backup,
    list_backups,
    remove_backup,
    remove_unfinished_backups,
    remove_unused_contents,
)
from millrace.operations.backup.table_pins import PinnedTable, pin_outputs, pin_tables
from millrace.operations.backup.verify import verify_backup
from millrace.operations.checkpoint.staged_trim import TRIM_NOTES_FOLDER
from millrace.operations.coverage import Coverage
from millrace.operations.operation import OperationReport, counted, mebibytes
from millrace.operations.quality.quarantine import quarantine_uri
from millrace.operations.quality.results import quality_path
from millrace.operations.restore.records import restores_path
from millrace.operations.roots import (
    backup_root_names,
    backup_roots,
    check_uri_within,
    check_within,
    started_by_launcher,
)
from millrace.runtime.progress import Progress
from millrace.storage.local import LocalStore
from millrace.storage.pins import TablePins
from millrace.storage.store import TableStore, list_below, store_at
from millrace.tables.collections.staged_files import StagedFiles
from millrace.tables.quality_state import quality_results_uri

ATTEMPTS: Final = 3
"""Attempts of a backup before a missing file makes it fail."""
WAIT_SECONDS: Final = 60.0
"""Seconds that a backup waits for a truncation under way."""
LOCK: Final = ".backups.lock"
STAGED: Final = "staged"
_THREADS: Final = 4


class BackupReport(OperationReport):
    """What a backup contains, or would contain."""

    id: str = Field(description="Empty: a dry run.")
    folder: str
    dry_run: bool
    tables: int
    files: int
    bytes: int
    linked_files: int = Field(description="Files linked from the previous backup, which were not read again.")
    new_bytes: int = Field(description="Bytes of the other files.")
    log_included: bool
    ticks: dict[str, int] = Field(description="By PChannel: tick up to which the WAL of the backup is complete.")
    dropped: tuple[str, ...] = Field(
        default=(), description="Backups of this deployment that were removed because they exceed the number to keep."
    )
    left: tuple[str, ...] = Field(
        default=(),
        description=(
            "Unfinished backups in that folder that are not known to be this deployment's. They are left alone."
        ),
    )
    unchanged_tables: int = Field(default=0, description="Tables that have not changed since the previous backup.")
    verified: bool = False
    seconds: float

    @property
    def sentence(self) -> str:
        what = f"{counted(self.tables, 'table')} in {counted(self.files, 'file')}"
        if self.dry_run:
            return f"A backup would have {what}, {mebibytes(self.bytes)}."
        words = f", {self.unchanged_tables:,} unchanged" if self.unchanged_tables else ""
        size = f"{mebibytes(self.bytes)}, of which {mebibytes(self.new_bytes)} are new"
        return f"Backup {self.id} has {what}{words}, {size}."


def run(settings: Settings, params: BackupParams, progress: Progress) -> BackupReport:
    """Run the operation as its job does, with the log's server, which is started if needed."""
    from millrace.client.append_client import AppendClient
    from millrace.rpc.launch import launch_of

    root = backup_folder(settings, params)  # fail before anything is started
    with AppendClient.connect(
        settings.data_dir, deadline=settings.start_deadline, launch=launch_of(settings)
    ) as client:
        return backup(settings, client.service, params, progress, root=root)


def backup_folder(settings: Settings, params: BackupParams) -> BackupPlace:
    """Return the folder of backups.

    Raises InvalidArgument if none is set, or if it lies inside the data folder or among the tables.
    """
    named = params.to or settings.backup_dir
    if not named:
        raise InvalidArgument("no folder for the backup: give the folder (to), or set backup_dir")
    root, data = backup_place(named), settings.data_dir.resolve()
    if isinstance(root, BucketFolder):
        tables = settings.tables_uri.rstrip("/")
        if f"{root.uri}/".startswith(f"{tables}/") or f"{tables}/".startswith(f"{root.uri}/"):
            raise InvalidArgument(f"{root} and the tables at {tables} lie in each other: choose another prefix")
        if started_by_launcher():
            check_uri_within(root.uri, backup_root_names(settings), setting="backup_roots")
        return root
    if data == root.resolve() or data in root.resolve().parents:
        raise InvalidArgument(f"{root} lies in the data folder and would be lost with it: choose another folder")
    if started_by_launcher():
        check_within(str(root), backup_roots(settings), setting="backup_roots")
    return root


def backup(
    settings: Settings,
    service: LogService,
    params: BackupParams,
    progress: Progress,
    *,
    root: BackupPlace | None = None,
) -> BackupReport:
    """Run the operation on an open log.

    Raises BackupBusy, BackupRefused, LogBusy, TableUnavailable, InvalidArgument.
    """
    started = time.monotonic()
    root = root or backup_folder(settings, params)
    if params.dry_run:
        return _dry_run(settings, root, started)
    with _locked(settings, root):
        own = ensure_deployment_id(settings)
        left = remove_unfinished_backups(root, own)
        for attempt in range(ATTEMPTS):
            folder = begin_backup(root, own)
            hit("backup.begun")
            try:
                with _files(settings, folder, own) as files:
                    manifest, covered = _take(settings, service, folder, own, files, params, progress)
                break
            except FileGone:
                remove_backup(folder)
                if attempt + 1 == ATTEMPTS:
                    raise
        if params.verify:
            progress.update("reading the backup again")
            problems = verify_backup(folder).problems
            if problems:
                raise BackupDamaged(f"{folder} does not read back as written: {'; '.join(problems[:5])}")
        dropped = [old for old, _ in list(list_backups(root, of=own))[params.keep :]]
        for old in dropped:
            remove_backup(old)
            hit("backup.dropped")
        if isinstance(root, BucketFolder) and (dropped or params.full):
            remove_unused_contents(root, own)
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
        unchanged_tables=covered.unchanged,
        verified=params.verify,
        seconds=round(time.monotonic() - started, 3),
    )


@contextmanager
def _locked(settings: Settings, root: BackupPlace) -> Iterator[None]:
    """Hold the lock of the folder; of a bucket, that of this deployment, which alone removes what it put there."""
    busy = f"another backup is being made in {root}: try again when it is done"
    if isinstance(root, Path):
        make_folder(root)
    else:
        make_folder(settings.run_path)
    with exclusive_lock(root / LOCK if isinstance(root, Path) else settings.run_path / LOCK, busy=busy):
        yield


@contextmanager
def _files(settings: Settings, folder: BackupPlace, own: str) -> Iterator[BackupFiles]:
    """Yield the files of a new backup, which may share those of the previous one."""
    earlier, known = next(list_backups(folder.parent, of=own), (None, None))
    if isinstance(folder, BucketFolder):
        scratch = ScratchFolder(settings.run_path / "backups" / uuid.uuid4().hex, pattern="[0-9a-f]{32}")
        try:
            yield BucketFiles(scratch.path, None, known, pool=ContentPool(folder.parent, own))
        finally:
            scratch.discard()
    else:
        assert not isinstance(earlier, BucketFolder)
        yield BackupFiles(folder, earlier, known)


def _take(
    settings: Settings,
    service: LogService,
    folder: BackupPlace,
    own: str,
    files: BackupFiles,
    params: BackupParams,
    progress: Progress,
) -> tuple[BackupManifest, Coverage]:
    begun = datetime.now(UTC).isoformat()
    known = files.earlier_manifest
    # The records say what the previous backup has: they are of no use beside another one.
    covered = Coverage.load(settings, "backup", depends=_depends(known), ignore=params.full or known is None)
    flows = HeldFlows(settings, files)

    @contextmanager
    def at_ends() -> Iterator[None]:
        with flows.held():
            pinned.update(pin_outputs(settings, files, covered))
            hit("backup.held")
            yield

    with TablePins(settings.pins_uri).pinned():
        with removals_blocked(settings, deadline=WAIT_SECONDS), held_spools(settings):
            progress.update("pinning the tables")
            take_documents(settings, files)
            pinned = pin_tables(settings, files, covered, outputs=False)
            files.flush()
            hit("backup.pinned")
            # Before the log's end is read: the log then has everything that the records call sent.
            _take_records(settings, files)
            progress.update("copying the log")
            log = copy_log(settings, service, pinned, files, at_ends=at_ends)
            hit("backup.log")
            progress.update("copying what flows keep")
            flows.take_rest()
            take_spools(settings, files)
            # After the log: files that its messages name were staged before them.
            _take_staged(_staged_stores(settings), files)
        _take_tables(pinned, files, progress)
    files.sync_folders()
    hit("backup.copied")
    manifest = _manifest(settings, folder.name, begun, pinned, log)
    manifest = replace(manifest, deployment=own, files=dict(sorted(files.stored.items())))
    manifest.write(folder)
    hit("backup.written")
    for name in pinned:
        covered.record(name)
    covered.retain(pinned)
    covered.save(depends=_depends(manifest))
    return manifest, covered


def _depends(manifest: BackupManifest | None) -> dict[str, Any]:
    return {"format": 1, "backup": None if manifest is None else manifest.id}


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
    """Take the data files of all tables, several at a time. The first error ends it."""
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
                progress.update("taking the files of the tables", done=done / total, files=number, bytes=done)


def _take_staged(stores: Iterable[TableStore], files: BackupFiles) -> None:
    """Take what loads have staged, because messages of the log may name it. Skips loads that are still staging."""
    for store in stores:
        for name, size in list_below(store).items():
            first, _, last = name.partition("/")
            if (first.startswith(".") and first != TRIM_NOTES_FOLDER) or last == STATE_FILE:
                continue
            if not name.endswith(".parquet"):
                files.copy_table_file(store, name, STAGED)
            # Outside of a disk the name is of one attempt.
            elif isinstance(store, LocalStore) or not files.reuse(f"{STAGED}/{name}", size):
                files.take_staged(store, name, f"{STAGED}/{name}")


def take_staged_files(settings: Settings, files: BackupFiles, *, outside: str) -> None:
    """Take what loads have staged and appended, and their notes, except what is at `outside`."""
    stores = [each for each in _staged_stores(settings) if each.uri != outside]
    _take_notes(stores, files)
    _take_staged(stores, files)


def _take_notes(stores: Iterable[TableStore], files: BackupFiles) -> None:
    for store in stores:
        for folder in store.folders():
            if not folder.startswith(".") and store.size(f"{folder}/{STATE_FILE}") is not None:
                files.copy_table_file(store, f"{folder}/{STATE_FILE}", STAGED)


def _staged_stores(settings: Settings) -> list[TableStore]:
    staged = StagedFiles.of(settings)
    return [store_at(place) for place in (staged.place, staged.earlier) if place is not None]


def _take_records(settings: Settings, files: BackupFiles) -> None:
    """Copy small files that are replaced whole.

    They are the notes of loads and restores, and the users' expectation suites.
    """
    _take_notes(_staged_stores(settings), files)
    tables = {Path(quality_results_uri(settings)), Path(quarantine_uri(settings)), quality_path(settings) / "docs"}
    for path in (restores_path(settings), quality_path(settings)):
        for each in sorted(path.rglob("*")) if path.is_dir() else []:
            if each.is_file() and not tables.intersection(each.parents):
                files.copy(each, str(each.relative_to(settings.data_dir)))


def _dry_run(settings: Settings, root: BackupPlace, started: float) -> BackupReport:
    pinned = pin_tables(settings, None, Coverage.load(settings, "backup", ignore=True))
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
