"""Restores a backup as a deployment: copy and verify the files, check them against the log, publish them.

Everything is assembled in a hidden folder beside the data folder, which gets its final name last. A killed restore
leaves no deployment, and the next one starts again. The hidden folder first identifies itself as a restore's; another
folder of that name is left alone. Nothing is linked, so that the restored deployment cannot change the backup.

With the setting `tables`, tables and staged files go there, to a place that is empty but for what a killed restore
into the same data folder left: its marker says so, until the data folder has its name.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final, cast
from urllib.parse import unquote

from pydantic import Field

from millrace.base.errors import BackupDamaged, BackupRefused, ChannelNotFound, PositionTruncated
from millrace.base.failpoint import hit
from millrace.base.files import make_folder, sync
from millrace.base.log_backends import backend_of
from millrace.base.settings import Settings, non_default_settings
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.store_factory import require_unused_store
from millrace.flows.sinks.collection.lane import LANES
from millrace.log.generations.generation_file import FILE, GenerationFile, Generations, same_log
from millrace.log.generations.service import open_deployment_log
from millrace.log.protocol import LogService
from millrace.message.ids import LogId
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.node.ingest.ingester import check_not_regressed
from millrace.operations.backup.bucket import BackupPlace
from millrace.operations.backup.deployment_id import write_deployment_id as write_id
from millrace.operations.backup.files import CHUNK, copy_stream, exclusive_lock
from millrace.operations.backup.flow_state import bring_back, is_of_tables, restored_name
from millrace.operations.backup.log_copy import COORDINATOR_DB
from millrace.operations.backup.manifest import (
    DATA_FOLDER,
    BackedUpChannel,
    BackupManifest,
    StoredFile,
    find_backup,
    open_stored,
)
from millrace.operations.backup.safe_paths import open_beneath, unsafe_references
from millrace.operations.operation import OperationReport
from millrace.runtime.progress import Progress
from millrace.storage.store import TableStore, list_below, store_at
from millrace.storage.table import table_at
from millrace.tables.wal.table import WalTable

_THREADS: Final = 4
_MARKER: Final = "restore.lock"
_DRAFT: Final = "data"
STAGED: Final = "staged"
RESTORING: Final = "_restoring.json"
"""File at the place of the tables while a restore writes them."""


class BackupRestoreReport(OperationReport):
    """The result of a restore."""

    id: str
    data: str
    """The data folder."""
    tables: int
    files: int
    bytes: int
    ticks: dict[str, int] = Field(
        description="By PChannel: tick up to which the WAL is complete. The log continues from there."
    )
    notes: tuple[str, ...] = Field(
        default=(), description="What flows do next whose source or sink is not in the backup and may have gone on."
    )
    settings: dict[str, Any] = Field(description="Settings of the deployment that differ from the current ones.")
    seconds: float


def restore_backup(settings: Settings, path: BackupPlace, progress: Progress | None = None) -> BackupRestoreReport:
    """Restore the backup at `path`, or the newest in it, into ``settings.data_dir``, which must be empty or not exist.

    Its tables go to ``settings.tables`` if that is set, which must be empty too.

    Raises:
    - BackupNotFound
    - BackupDamaged if a file has changed
    - BackupRefused if the data folder or the place of the tables is not empty, or if the log is not in the backup and
      the current one does not match
    - LogBusy if nodes of the meta store in the settings are running, which would take over the deployment
    - LogRegressed, LogCorrupted
    """
    started = time.monotonic()
    progress = progress or Progress()
    folder, manifest = find_backup(path)
    target = settings.data_dir.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupRefused(f"{target} is not empty: restore the backup into a new data folder (--data)")
    if not same_log(manifest.log, settings.log):
        raise BackupRefused(
            f"the deployment's log was {manifest.log}, but the setting log is {settings.log}: set "
            f"MILLRACE_LOG={manifest.log} (to move the log afterwards: millrace log switch)"
        )
    require_unused_store(settings)
    try:
        with _draft(target) as draft, _tables(settings, target) as tables:
            drafted = replace(settings, data_dir=draft)
            # A new id: the original may keep running, and neither may remove the other's backups.
            write_id(draft, deployment=manifest.deployment, backup=manifest.id)
            _copy(settings, folder, manifest, draft, tables, progress)
            hit("restore_backup.copied")
            _leave_ids(draft)
            _begin_log(drafted, manifest)
            progress.update("checking the tables against the log")
            check_restored(drafted, manifest)
            notes = bring_back(settings, drafted, manifest.files)
            for place in (draft, *(each for each in draft.rglob("*") if each.is_dir())):
                sync(place)
            if tables is not None:
                tables.replace(RESTORING, _mark(target, complete=True))
            hit("restore_backup.complete")
            draft.replace(target)
            sync(target.parent)
            if tables is not None:
                tables.delete([RESTORING])
    except OSError as error:
        raise BackupRefused(f"{target} cannot be created: {error}; restore into a folder on this disk") from error
    now = non_default_settings(settings)
    return BackupRestoreReport(
        id=manifest.id,
        data=str(target),
        tables=len(manifest.tables),
        files=len(manifest.files),
        bytes=manifest.bytes,
        ticks={name: each.tick for name, each in manifest.channels.items()},
        notes=notes,
        settings={name: value for name, value in manifest.settings.items() if now.get(name) != value},
        seconds=round(time.monotonic() - started, 3),
    )


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Yield the empty folder that becomes `target`, and remove what remains of it at the end.

    Raises BackupRefused, BackupBusy.
    """
    home = target.with_name(f".{target.name}.restoring")
    if home.is_symlink() or (home.exists() and any(home.iterdir()) and not (home / _MARKER).is_file()):
        raise BackupRefused(f"{home} exists and was not left by a restore: move it, or restore into another folder")
    make_folder(home)
    with exclusive_lock(home / _MARKER, busy=f"another restore into {target} is under way: try again when it is done"):
        shutil.rmtree(home / _DRAFT, ignore_errors=True)
        (home / _DRAFT).mkdir(mode=0o700)
        try:
            yield home / _DRAFT
        finally:
            shutil.rmtree(home / _DRAFT, ignore_errors=True)
            (home / _MARKER).unlink(missing_ok=True)
            with suppress(OSError):  # it holds other files, which stay
                home.rmdir()


@contextmanager
def _tables(settings: Settings, target: Path) -> Iterator[TableStore | None]:
    """Yield the place of the tables, if that is not the data folder, and clear it again after a failure.

    Raises BackupRefused if it has files.
    """
    if not settings.tables:
        yield None
        return
    store = store_at(settings.tables)
    mark = store.read(RESTORING)
    if (mark is None or mark != _mark(target)) and (store.folders() or store.list("")):
        why = "a finished restore" if mark == _mark(target, complete=True) else "files"
        raise BackupRefused(
            f"{settings.tables} has {why}: set MILLRACE_TABLES to a place that is empty, or remove what lies there"
        )
    _clear(store)
    store.replace(RESTORING, _mark(target))
    try:
        yield store
    except BaseException:
        if store.read(RESTORING) == _mark(target):
            _clear(store)
            store.delete([RESTORING])
        raise


def _mark(target: Path, *, complete: bool = False) -> bytes:
    return json.dumps({"host": socket.gethostname(), "data": str(target), "complete": complete}).encode()


def _clear(store: TableStore) -> None:
    names = [name for name in list_below(store) if name != RESTORING]
    for first in range(0, len(names), 1000):
        store.delete(names[first : first + 1000])


def _copy_object(source: BinaryIO, store: TableStore, name: str, stored: StoredFile) -> bool:
    """Copy an open file into a store. Returns False, and leaves nothing, if it is not as `stored` says."""
    digest, sink = hashlib.sha256(), store.put(name)
    try:
        while piece := source.read(CHUNK):
            digest.update(piece)
            sink.write(piece)
        if (sink.tell(), digest.hexdigest()) != stored:
            return False
        sink.sync()
        return True
    finally:
        sink.close()


def _copy(
    settings: Settings,
    folder: BackupPlace,
    manifest: BackupManifest,
    draft: Path,
    tables: TableStore | None,
    progress: Progress,
) -> None:
    total, done = manifest.bytes or 1, 0
    named = {*manifest.tables, STAGED, LANES}
    of_draft = replace(settings, data_dir=draft)

    def of_tables(name: str) -> bool:
        parts = name.split("/")
        return is_of_tables(settings, name) or any("/".join(parts[:count]) in named for count in (1, 2, 3))

    def one(each: tuple[str, StoredFile]) -> int:
        name, stored = each
        try:
            source = open_stored(folder, manifest, name)
        except FileNotFoundError:
            raise BackupDamaged(f"{folder} has no {name}: restore another backup") from None
        except OSError as error:
            why = error.strerror or error
            raise BackupDamaged(f"{name} cannot be read ({why}): restore another backup") from None
        with source:
            if tables is not None and of_tables(name):
                whole = _copy_object(source, tables, name, stored)
            else:
                path = draft / restored_name(of_draft, name)
                make_folder(path.parent)
                whole = copy_stream(source, path) == stored
        if not whole:
            raise BackupDamaged(
                f"{folder / DATA_FOLDER / name} has changed since it was written: restore another backup"
            )
        return stored.size

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as pool:
        for number, size in enumerate(pool.map(one, manifest.files.items())):
            done += size
            if number % 100 == 0:
                progress.update("copying", done=done / total, bytes=done)

    def copied(name: str) -> BinaryIO:
        if tables is not None and of_tables(name):
            return cast(BinaryIO, io.BytesIO(tables.read(name) or b""))
        return cast(BinaryIO, open_beneath(draft, name))

    for words in unsafe_references(manifest.files, copied):
        raise BackupDamaged(f"{folder}: {words}. The backup was altered: restore another one")


def _leave_ids(draft: Path) -> None:
    """Skip epochs and ids that the deployment, or one restored earlier, may have assigned since the backup."""
    if (draft / COORDINATOR_DB).exists():
        with CatalogStore(draft / COORDINATOR_DB) as store:
            store.raise_id_floor()


def _begin_log(settings: Settings, manifest: BackupManifest) -> None:
    """Mark generations of the log as truncated if the copied list names them but the backup does not have them."""
    if not (settings.log_path / FILE).exists() or not manifest.log_included:
        return
    begins = {name: LogId.parse(part.begin).generation for name, part in manifest.channels.items() if part.begin}

    def begun(generations: Generations) -> Generations:
        for name, generation in begins.items():
            generations = generations.with_first(name, generation)
        return generations

    GenerationFile(settings.log_path, settings.log).change(begun)


def check_restored(settings: Settings, manifest: BackupManifest) -> None:
    """Check the restored tables against the log they continue with: the restored one, or the one on the brokers."""
    for name, number in manifest.tables.items():
        found = table_at(settings.table_uri(name)).version
        if found != number:
            raise BackupDamaged(f"{name} is restored at version {found} instead of {number}: restore another backup")
    for item in GenerationFile(settings.log_path, settings.log).generations.items:
        scheme, separator, place = item.url.partition("://")
        if (
            backend_of(scheme).local
            and separator
            and not (Path(unquote(place.partition("?")[0])) / "channels").is_dir()
        ):
            raise BackupRefused(
                f"the log of the backup lies at {place}, which holds no log. A restore creates nothing outside of the "
                "data folder: put the log's copy there first"
            )
    with open_deployment_log(settings.log_path, settings.log) as service:
        for name, part in manifest.channels.items():
            _check_channel(settings, service, name, part, included=manifest.log_included)


def _check_channel(
    settings: Settings, service: LogService, name: str, part: BackedUpChannel, *, included: bool
) -> None:
    state = WalTable.open(settings.wal_uri).position(name).state if WalTable.exists(settings.wal_uri) else None
    try:
        log = service.open(name)
    except ChannelNotFound as error:
        raise BackupRefused(
            f"{error}: the log of {name} is not in the backup, and no longer at {settings.log}"
        ) from None
    try:
        if state is not None:
            check_not_regressed(log, state)
        end = LogId.parse(part.end)
        described = log.describe()
        if described.end < end:
            raise BackupRefused(
                f"the log of {name} ends at {described.end}, but reached {end} when the backup was made"
            )
        if part.begin and described.begin > LogId.parse(part.begin):
            raise BackupRefused(
                f"the log of {name} begins at {described.begin}, but the tables of the backup need it from "
                f"{part.begin} on. It was truncated since: restore a newer backup"
            )
        if included:
            return
        position = end
        while position < described.end:
            entries = log.read(position, end=described.end)
            types = set(decode_entries(entries.batch).column("type").to_pylist())
            if types - {int(MessageType.TIME_TICK)}:
                raise BackupRefused(
                    f"the log of {name} at {settings.log} has entries after the backup's end {end}, which the "
                    "coordinator's file in the backup does not know. Either use the backup's tables only for reading, "
                    "or restore its files by hand with a coord/ as new as the log (docs/restore.md)"
                )
            position = max(entries.next, position.following())
    except PositionTruncated as error:
        raise BackupRefused(f"{error}: restore a newer backup") from None
    finally:
        log.close()
