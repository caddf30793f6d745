"""A backup becomes a deployment: verified while it is copied, durable, held against its log, and there all at once.

Everything is put together in a hidden folder beside the data folder and gets its name last: a restore that is killed leaves no
deployment, and the next one begins anew. That folder says first that it is a restore's; one of its name that does not is left
alone. Nothing is linked, so that what runs then cannot touch the backup.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from pydantic import Field

from millrace.base.errors import BackupDamaged, BackupRefused, ChannelNotFound, PositionTruncated
from millrace.base.failpoint import hit
from millrace.base.files import make_folder, sync
from millrace.base.log_backends import backend_of
from millrace.base.settings import Settings, non_default_settings
from millrace.coord.catalog_store import CatalogStore
from millrace.coord.store_factory import require_unused_store
from millrace.log.generations.generation_file import FILE, GenerationFile, Generations, same_log
from millrace.log.generations.service import open_deployment_log
from millrace.log.protocol import LogService
from millrace.message.ids import LogId
from millrace.message.types import MessageType
from millrace.message.wire.decode import decode_entries
from millrace.node.ingest.ingester import check_not_regressed
from millrace.operations.backup.deployment_id import write_deployment_id as write_id
from millrace.operations.backup.files import copy_stream, exclusive_lock
from millrace.operations.backup.log_copy import COORDINATOR_DB
from millrace.operations.backup.manifest import DATA_FOLDER, BackedUpChannel, BackupManifest, StoredFile, find_backup
from millrace.operations.backup.safe_paths import open_beneath, unsafe_references
from millrace.operations.operation import OperationReport
from millrace.runtime.progress import Progress
from millrace.storage.table import table_at
from millrace.tables.wal.table import WalTable

_THREADS: Final = 4
_MARKER: Final = "restore.lock"
_DRAFT: Final = "data"


class BackupRestoreReport(OperationReport):
    """What a restore made."""

    id: str
    data: str
    """The data folder."""
    tables: int
    files: int
    bytes: int
    ticks: dict[str, int] = Field(description="By PChannel: the WAL is whole up to there; the log goes on from there.")
    settings: dict[str, Any] = Field(description="Settings that the deployment had otherwise than they are set now.")
    seconds: float


def restore_backup(settings: Settings, path: Path, progress: Progress | None = None) -> BackupRestoreReport:
    """Restore the backup at `path` (or the newest in that folder) into ``settings.data_dir``, which must be empty or not there.

    Raises BackupNotFound; BackupDamaged where a file is not as it was; BackupRefused where the data folder is not empty, or
    where the log is not in the backup and the one that is there does not fit; LogBusy where nodes of the meta store that the settings
    name are at work, which would take it for theirs; LogRegressed, LogCorrupted.
    """
    started = time.monotonic()
    progress = progress or Progress()
    folder, manifest = find_backup(path)
    target = settings.data_dir.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupRefused(f"{target} is not empty: a backup is restored into a data folder of its own (--data)")
    if settings.tables:
        raise BackupRefused(
            f"the setting tables is {settings.tables}: a backup is restored into a data folder that has its tables, too; unset it,"
            " and move them afterwards"
        )
    if not same_log(manifest.log, settings.log):
        raise BackupRefused(
            f"the deployment's log was {manifest.log}, and the setting log is {settings.log}: set MILLRACE_LOG={manifest.log}"
            " (to move it afterwards: millrace log switch)"
        )
    require_unused_store(settings)
    try:
        with _draft(target) as draft:
            # Its own: what it comes from may go on, and the backups of either are the other's to leave alone.
            write_id(draft, deployment=manifest.deployment, backup=manifest.id)
            _copy(folder, manifest, draft, progress)
            hit("restore_backup.copied")
            _leave_ids(draft)
            _begin_log(settings.with_data_dir(draft), manifest)
            progress.update("holding the tables against the log")
            check_restored(settings.with_data_dir(draft), manifest)
            for place in (draft, *(each for each in draft.rglob("*") if each.is_dir())):
                sync(place)
            draft.replace(target)
            sync(target.parent)
    except OSError as error:
        raise BackupRefused(f"{target} cannot be made: {error}; restore into a folder on this disk") from error
    now = non_default_settings(settings)
    return BackupRestoreReport(
        id=manifest.id,
        data=str(target),
        tables=len(manifest.tables),
        files=len(manifest.files),
        bytes=manifest.bytes,
        ticks={name: each.tick for name, each in manifest.channels.items()},
        settings={name: value for name, value in manifest.settings.items() if now.get(name) != value},
        seconds=round(time.monotonic() - started, 3),
    )


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """The folder that becomes `target`, empty; what is left of it in the end goes. Raises BackupRefused, BackupBusy."""
    home = target.with_name(f".{target.name}.restoring")
    if home.is_symlink() or (home.exists() and any(home.iterdir()) and not (home / _MARKER).is_file()):
        raise BackupRefused(
            f"{home} is in the way, and is not what a restore left: move it, or restore into another folder"
        )
    make_folder(home)
    with exclusive_lock(home / _MARKER, busy=f"another restore into {target} is under way: try again when it is done"):
        shutil.rmtree(home / _DRAFT, ignore_errors=True)
        (home / _DRAFT).mkdir(mode=0o700)
        try:
            yield home / _DRAFT
        finally:
            shutil.rmtree(home / _DRAFT, ignore_errors=True)
            (home / _MARKER).unlink(missing_ok=True)
            with suppress(OSError):  # somebody else's files are in it, and stay
                home.rmdir()


def _copy(folder: Path, manifest: BackupManifest, draft: Path, progress: Progress) -> None:
    total, done = manifest.bytes or 1, 0

    def one(each: tuple[str, StoredFile]) -> int:
        name, stored = each
        make_folder((draft / name).parent)
        try:
            source = open_beneath(folder, f"{DATA_FOLDER}/{name}")
        except FileNotFoundError:
            raise BackupDamaged(f"{folder} has no {name}: restore another backup") from None
        except OSError as error:
            raise BackupDamaged(f"{name} does not read ({error.strerror}): restore another backup") from None
        with source:
            found = copy_stream(source, draft / name)
        if found != stored:
            raise BackupDamaged(f"{folder / DATA_FOLDER / name} is not as it was written: restore another backup")
        return stored.size

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as pool:
        for number, size in enumerate(pool.map(one, manifest.files.items())):
            done += size
            if number % 100 == 0:
                progress.update("copying", done=done / total, bytes=done)
    for words in unsafe_references(manifest.files, lambda name: open_beneath(draft, name)):
        raise BackupDamaged(f"{folder}: {words}; somebody changed it: restore another backup")


def _leave_ids(draft: Path) -> None:
    """What the deployment gave since the backup (epochs, ids) is not given again; nor what one gave that was restored before."""
    if (draft / COORDINATOR_DB).exists():
        with CatalogStore(draft / COORDINATOR_DB) as store:
            store.raise_id_floor()


def _begin_log(settings: Settings, manifest: BackupManifest) -> None:
    """The copied list names generations of the log from before what the backup has of it: they are truncated here."""
    if not (settings.log_path / FILE).exists() or not manifest.log_included:
        return
    begins = {name: LogId.parse(part.begin).generation for name, part in manifest.channels.items() if part.begin}

    def begun(generations: Generations) -> Generations:
        for name, generation in begins.items():
            generations = generations.with_first(name, generation)
        return generations

    GenerationFile(settings.log_path, settings.log).change(begun)


def check_restored(settings: Settings, manifest: BackupManifest) -> None:
    """Hold the restored tables against the log that they go on with: the restored one, or the one on the brokers."""
    for name, number in manifest.tables.items():
        found = table_at(settings.table_uri(name)).version
        if found != number:
            raise BackupDamaged(f"{name} comes out at version {found}, not {number}: restore another backup")
    for item in GenerationFile(settings.log_path, settings.log).generations.items:
        scheme, elsewhere, place = item.url.partition("://")
        if (
            backend_of(scheme).local
            and elsewhere
            and not (Path(unquote(place.partition("?")[0])) / "channels").is_dir()
        ):
            raise BackupRefused(
                f"the log of the backup lies at {place}, and there is none: nothing is made outside of the data folder"
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
            f"{error}: the log of {name} is not in the backup, and not at {settings.log} any more"
        ) from None
    try:
        if state is not None:
            check_not_regressed(log, state)
        end = LogId.parse(part.end)
        described = log.describe()
        if described.end < end:
            raise BackupRefused(
                f"the log of {name} ends at {described.end}, and went up to {end} when the backup was made"
            )
        if part.begin and described.begin > LogId.parse(part.begin):
            raise BackupRefused(
                f"the log of {name} begins at {described.begin}, and the tables of the backup need it from {part.begin} on:"
                " it was truncated since; restore a newer backup"
            )
        if included:
            return
        position = end
        while position < described.end:
            entries = log.read(position, end=described.end)
            types = set(decode_entries(entries.batch).column("type").to_pylist())
            if types - {int(MessageType.TIME_TICK)}:
                raise BackupRefused(
                    f"the log of {name} at {settings.log} went on since the backup (behind {end}), and the coordinator's file"
                    " in the backup knows nothing of that. Possible: use the tables of the backup for reading alone, or restore"
                    " its files and a coord/ that is as new as the log by hand (docs/restore.md)"
                )
            position = max(entries.next, position.following())
    except PositionTruncated as error:
        raise BackupRefused(f"{error}: restore a newer backup") from None
    finally:
        log.close()
