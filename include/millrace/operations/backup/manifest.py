"""The manifest of a backup: its contents, with size and digest of each file. Written last, it completes the backup.

    <folder of backups>/<id>/backup.json     the owner, written first
    <folder of backups>/<id>/data/...        the files, with their paths in a data folder
    <folder of backups>/<id>/manifest.json

In an object store the files lie elsewhere (millrace.operations.backup.bucket).

The id is the time of the backup, so names sort by time. Backups may share files (hard links). Each is complete by
itself all the same, and removing one does not affect another.

A deployment removes only its own backups: the folder's name must be a complete id, and its ``backup.json`` must name
that id and the deployment's. Only the three entries above are removed; any other files in the folder stay.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

from millrace.base.errors import BackupDamaged, BackupNotFound, UnsupportedVersion
from millrace.base.failpoint import hit
from millrace.base.files import make_folder, replace_json, sync
from millrace.operations.backup.bucket import (
    BackupPlace,
    BucketFolder,
    ContentPool,
    content_name,
    folders_of,
    read_owner,
)
from millrace.operations.backup.safe_paths import FLOW_FOLDERS, STATE_FOLDERS, check_paths, open_beneath

MANIFEST_FILE: Final = "manifest.json"
MARKER_FILE: Final = "backup.json"
DATA_FOLDER: Final = "data"
_ID: Final = re.compile(r"backup-\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{4}")
VERSIONS: Final = (1, 2, 3, 4)
"""Version 4 has documents, spools and checkpoints of flows; version 3 has their positions; version 2 has rows tables in
``tables/<id>/_rows``, version 1 in ``collections/<id>``."""


class StoredFile(NamedTuple):
    """A file of a backup."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BackedUpChannel:
    """One PChannel in a backup. Positions and ticks are the deployment's."""

    tick: int
    """Tick up to which the WAL of the backup is complete."""
    flushed_tick: int
    """Tick up to which the collections' tables are complete."""
    position: str
    """Position before which the log is in the WAL. Empty: nothing is."""
    begin: str
    """Where the log of the backup begins, or from where on a log that is not included is needed."""
    end: str
    """Where the log ends. Everything acknowledged before the backup lies before it."""


@dataclass(frozen=True, slots=True)
class BackupManifest:
    """The contents of one backup."""

    id: str
    started: str
    """UTC, ISO 8601."""
    finished: str
    millrace: str
    """Version of Millrace that made the backup."""
    log: str
    """The setting ``log`` of the deployment."""
    log_included: bool
    """False if the log lies on brokers and is not in the backup."""
    settings: Mapping[str, Any]
    """Settings that differed from their defaults. Folders are left out, and settings hold no secrets."""
    tables: Mapping[str, int]
    """Versions of the Delta tables by name."""
    channels: Mapping[str, BackedUpChannel]
    incarnations: Mapping[str, int]
    """By folder of a channel of the embedded log: the incarnation of the channel with that name."""
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    """Files by path below ``data``."""
    deployment: str = ""
    """Id of the deployment. Empty if made by a version without such ids."""

    @property
    def bytes(self) -> int:
        return sum(each.size for each in self.files.values())

    def write(self, folder: BackupPlace) -> None:
        """Write the manifest into the backup's folder, durably. This completes the backup."""
        body = asdict(self)
        named = {name.partition("/")[0] for name in (*self.tables, *self.files)}
        version = 4 if named & STATE_FOLDERS else 3 if named & FLOW_FOLDERS else 2 if "tables" in named else 1
        document = {"version": version, "sha256": _digest(body), "body": body}
        if isinstance(folder, BucketFolder):
            folder.store.replace(MANIFEST_FILE, json.dumps(document).encode())
        else:
            replace_json(folder / MANIFEST_FILE, document, synced=True)

    @classmethod
    def read(cls, folder: BackupPlace) -> Self:
        """Read and check the manifest of the backup in `folder`. Its names must lie inside a data folder.

        Raises BackupNotFound, BackupDamaged, UnsupportedVersion.
        """
        try:
            with _opened(folder, MANIFEST_FILE) as file:
                document = json.loads(file.read())
            version, body = document["version"], document["body"]
            if version not in VERSIONS:
                raise UnsupportedVersion(
                    f"{folder / MANIFEST_FILE} has version {version}, but this build knows {VERSIONS}"
                )
            if _digest(body) != document["sha256"]:
                raise BackupDamaged(
                    f"{folder / MANIFEST_FILE} was changed after it was written: restore another backup"
                )
            channels = {name: BackedUpChannel(**each) for name, each in body["channels"].items()}
            files = {name: StoredFile(*each) for name, each in body["files"].items()}
            check_paths(folder / MANIFEST_FILE, [*files, *body["tables"]])
            if not all(type(each.size) is int and each.size >= 0 for each in files.values()):
                raise ValueError("a file's size")
            return cls(**{**body, "channels": channels, "files": files})
        except (FileNotFoundError, NotADirectoryError):
            raise BackupNotFound(
                f"{folder} has no {MANIFEST_FILE}: it is not a backup, or the backup was never finished"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BackupDamaged(f"{folder / MANIFEST_FILE} is invalid ({error}): restore another backup") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _opened(folder: BackupPlace, name: str) -> BinaryIO:
    return folder.open(name) if isinstance(folder, BucketFolder) else cast(BinaryIO, open_beneath(folder, name))


def open_stored(folder: BackupPlace, manifest: BackupManifest, name: str) -> BinaryIO:
    """Open the file `name` of a backup. Raises OSError, BackupDamaged."""
    if not isinstance(folder, BucketFolder):
        return cast(BinaryIO, open_beneath(folder, f"{DATA_FOLDER}/{name}"))
    try:
        return folder.parent.open(content_name(manifest.deployment, manifest.files[name].sha256))
    except FileNotFoundError:
        return folder.open(f"{DATA_FOLDER}/{name}")  # a backup of a disk that a person copied here


def begin_backup(root: BackupPlace, deployment: str) -> BackupPlace:
    """Create the folder of a new backup of `deployment`. Its first file names the owner."""
    name = f"backup-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(2)}"
    owner = json.dumps({"id": name, "deployment": deployment}).encode()
    if isinstance(root, BucketFolder):
        (root / name).store.replace(MARKER_FILE, owner)
        return root / name
    folder = root / name
    make_folder(root)
    folder.mkdir(mode=0o700)
    # A single write: a kill leaves either all of it or an empty folder.
    with (folder / MARKER_FILE).open("xb", buffering=0) as file:
        file.write(owner)
        sync(file.fileno())
    for path in (folder, root):
        sync(path)
    return folder


def list_backups(root: BackupPlace, *, of: str | None = None) -> Iterator[tuple[BackupPlace, BackupManifest]]:
    """Yield the complete backups in a folder of backups, newest first. `of` restricts them to one deployment.

    Skips backups with an invalid manifest.
    """
    for folder in reversed(_folders(root)):
        if of is not None and not _is_own(folder, of):
            continue
        try:
            yield folder, BackupManifest.read(folder)
        except (BackupNotFound, BackupDamaged, UnsupportedVersion):
            continue


def find_backup(path: BackupPlace) -> tuple[BackupPlace, BackupManifest]:
    """Return the backup at `path`, or the newest one in it. Raises BackupNotFound, BackupDamaged."""
    if _is_complete(path):
        return path, BackupManifest.read(path)
    for found in list_backups(path):
        return found
    raise BackupNotFound(f"{path} is not a backup and contains none")


def remove_backup(folder: BackupPlace) -> None:
    """Remove a backup of this deployment.

    The manifest goes first, so that after a kill the rest is no longer a backup. The owner file goes last, so that the
    next :func:`remove_unfinished_backups` completes the removal.
    """
    if isinstance(folder, BucketFolder):
        folder.store.delete([MANIFEST_FILE])
        hit("backup.dropping")
        folder.store.delete([MARKER_FILE])
        return
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    sync(folder)
    if (folder / DATA_FOLDER).exists():
        shutil.rmtree(folder / DATA_FOLDER)
    hit("backup.dropping")
    (folder / MARKER_FILE).unlink(missing_ok=True)
    with suppress(OSError):  # it holds other files, which stay
        folder.rmdir()


def remove_unused_contents(root: BucketFolder, deployment: str) -> int:
    """Remove contents that no backup of `deployment` names. Returns their number.

    The caller holds the deployment's lock. Does nothing if one of the manifests cannot be read.
    """
    used: set[str] = set()
    for folder in _folders(root):
        if _is_own(folder, deployment) and _is_complete(folder):
            try:
                used.update(each.sha256 for each in BackupManifest.read(folder).files.values())
            except (BackupDamaged, UnsupportedVersion):
                return 0
    return ContentPool(root, deployment).remove_unused(used)


def remove_unfinished_backups(root: BackupPlace, deployment: str) -> tuple[str, ...]:
    """Remove what killed backups of `deployment` left. The caller holds the folder's lock.

    Returns the names of unfinished backups without a known owner. They are left to a person.
    """
    strange = []
    for folder in _folders(root):
        if _is_complete(folder):
            continue
        if _is_own(folder, deployment):
            remove_backup(folder)
        elif isinstance(folder, BucketFolder):
            strange.append(folder.name)
        else:
            try:
                folder.rmdir()  # killed before it named its owner: the folder is empty, or not of a killed backup
            except OSError:
                strange.append(folder.name)
    return tuple(strange)


def _is_complete(folder: BackupPlace) -> bool:
    if isinstance(folder, BucketFolder):
        return folder.store.size(MANIFEST_FILE) is not None
    return (folder / MANIFEST_FILE).exists()


def _is_own(folder: BackupPlace, deployment: str) -> bool:
    """Return whether `folder` names itself a backup of `deployment`, under its original name."""
    try:
        if isinstance(folder, BucketFolder):
            return bool(deployment) and read_owner(folder, MARKER_FILE) == {"id": folder.name, "deployment": deployment}
        found = json.loads((folder / MARKER_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(deployment) and found == {"id": folder.name, "deployment": deployment}


def _folders(root: BackupPlace) -> Sequence[BackupPlace]:
    """Return the folders, except links, whose name is a complete id, in the order of names. Looks at nothing else."""
    if isinstance(root, BucketFolder):
        return sorted(folders_of(root, _ID.fullmatch), key=str)
    if not root.is_dir():
        return []
    found = (each for each in os.scandir(root) if _ID.fullmatch(each.name) and each.is_dir(follow_symlinks=False))
    return sorted(Path(each) for each in found)
