"""The manifest of a backup: what it holds, with size and digest of each file. Written last: without it there is no backup.

    <folder of backups>/<id>/backup.json     whose it is, written first
    <folder of backups>/<id>/data/...        the files, as they lie in a data folder
    <folder of backups>/<id>/manifest.json

The id is the backup's moment, so that names sort by time. Files of several backups may be one (hard links); each backup stands
by itself all the same, and removing one takes nothing from another.

Only what a deployment knows as its own is ever removed: the folder has the whole id as its name, and its ``backup.json`` names
that id and the deployment's. Of such a folder the three things above go, and what somebody else put beside them stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from millrace.base.errors import BackupDamaged, BackupNotFound, UnsupportedVersion
from millrace.base.failpoint import hit
from millrace.base.files import make_folder, replace_json, sync
from millrace.operations.backup.safe_paths import check_paths, open_beneath

MANIFEST_FILE: Final = "manifest.json"
MARKER_FILE: Final = "backup.json"
DATA_FOLDER: Final = "data"
_ID: Final = re.compile(r"backup-\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{4}")
VERSION: Final = 1


class StoredFile(NamedTuple):
    """A file of a backup."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BackedUpChannel:
    """One PChannel in a backup. Positions and ticks are those of the deployment."""

    tick: int
    """The WAL of the backup is whole up to here."""
    flushed_tick: int
    """The collections' tables have everything up to here."""
    position: str
    """The log is in the WAL before this position; empty: nothing of it."""
    begin: str
    """Where the log of the backup begins (of one that is not in it: from where on it is needed)."""
    end: str
    """Where it ends: everything that was acknowledged before the backup lies before."""


@dataclass(frozen=True, slots=True)
class BackupManifest:
    """What one backup is."""

    id: str
    started: str
    """UTC, ISO 8601."""
    finished: str
    millrace: str
    """Version of the program that made it."""
    log: str
    """The setting ``log`` of the deployment."""
    log_included: bool
    """False: the log lies on brokers, and is not in the backup."""
    settings: Mapping[str, Any]
    """Settings that differed from their defaults; no folders, no secrets (settings hold none)."""
    tables: Mapping[str, int]
    """Delta tables with their versions."""
    channels: Mapping[str, BackedUpChannel]
    incarnations: Mapping[str, int]
    """By folder of a channel of the embedded log: which channel of that name it is."""
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    """By path below ``data``."""
    deployment: str = ""
    """Id of the deployment it is of; empty: made by a version that knew none."""

    @property
    def bytes(self) -> int:
        return sum(each.size for each in self.files.values())

    def write(self, folder: Path) -> None:
        """Write it into the backup's folder, durably; with this the backup is there."""
        body = asdict(self)
        replace_json(folder / MANIFEST_FILE, {"version": VERSION, "sha256": _digest(body), "body": body}, synced=True)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of the backup in `folder`, which names nothing outside of a data folder.

        Raises BackupNotFound, BackupDamaged, UnsupportedVersion.
        """
        try:
            with open_beneath(folder, MANIFEST_FILE) as file:
                document = json.loads(file.read())
            version, body = document["version"], document["body"]
            if version != VERSION:
                raise UnsupportedVersion(f"{folder / MANIFEST_FILE} has version {version}; this build knows {VERSION}")
            if _digest(body) != document["sha256"]:
                raise BackupDamaged(
                    f"{folder / MANIFEST_FILE} was changed since it was written: restore another backup"
                )
            channels = {name: BackedUpChannel(**each) for name, each in body["channels"].items()}
            files = {name: StoredFile(*each) for name, each in body["files"].items()}
            check_paths(folder / MANIFEST_FILE, [*files, *body["tables"]])
            if not all(type(each.size) is int and each.size >= 0 for each in files.values()):
                raise ValueError("a file's size")
            return cls(**{**body, "channels": channels, "files": files})
        except (FileNotFoundError, NotADirectoryError):
            raise BackupNotFound(
                f"{folder} has no {MANIFEST_FILE}: it is no backup, or one that was never finished"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BackupDamaged(f"{folder / MANIFEST_FILE} does not read ({error}): restore another backup") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def begin_backup(root: Path, deployment: str) -> Path:
    """Make the folder of a new backup of `deployment`; before anything else is in it, it says whose it is."""
    folder = root / f"backup-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(2)}"
    make_folder(root)
    folder.mkdir(mode=0o700)
    with (folder / MARKER_FILE).open(
        "xb", buffering=0
    ) as file:  # one write: a kill leaves all of it, or an empty folder
        file.write(json.dumps({"id": folder.name, "deployment": deployment}).encode())
        sync(file.fileno())
    for path in (folder, root):
        sync(path)
    return folder


def list_backups(root: Path, *, of: str | None = None) -> Iterator[tuple[Path, BackupManifest]]:
    """The whole backups in a folder of backups (`of`: that deployment's own alone), the newest first.

    One whose manifest does not read is left out.
    """
    for folder in sorted(_folders(root), reverse=True):
        if of is not None and not _is_own(folder, of):
            continue
        try:
            yield folder, BackupManifest.read(folder)
        except (BackupNotFound, BackupDamaged, UnsupportedVersion):
            continue


def find_backup(path: Path) -> tuple[Path, BackupManifest]:
    """The backup at `path`, or the newest one where that is a folder of backups. Raises BackupNotFound, BackupDamaged."""
    if (path / MANIFEST_FILE).exists():
        return path, BackupManifest.read(path)
    for found in list_backups(path):
        return found
    raise BackupNotFound(f"{path} is no backup, and there is none in it")


def remove_backup(folder: Path) -> None:
    """Remove a backup of this deployment: its manifest first, so that what a kill leaves is none any more; what says whose it is
    last, so that the next :func:`remove_unfinished_backups` completes it."""
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    sync(folder)
    if (folder / DATA_FOLDER).exists():
        shutil.rmtree(folder / DATA_FOLDER)
    hit("backup.dropping")
    (folder / MARKER_FILE).unlink(missing_ok=True)
    with suppress(OSError):  # somebody else's files are in it, and stay
        folder.rmdir()


def remove_unfinished_backups(root: Path, deployment: str) -> tuple[str, ...]:
    """Remove what killed backups of `deployment` left behind; the caller holds the folder's lock.

    Names of the unfinished ones that are not known as its own: they are left to a person.
    """
    strange = []
    for folder in sorted(_folders(root)):
        if (folder / MANIFEST_FILE).exists():
            continue
        if _is_own(folder, deployment):
            remove_backup(folder)
        else:
            try:
                folder.rmdir()  # killed before it said whose it is: empty, or not a killed backup's
            except OSError:
                strange.append(folder.name)
    return tuple(strange)


def _is_own(folder: Path, deployment: str) -> bool:
    """Whether `folder` says that it is a backup of `deployment`, under the name that it was given."""
    try:
        found = json.loads((folder / MARKER_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(deployment) and found == {"id": folder.name, "deployment": deployment}


def _folders(root: Path) -> list[Path]:
    """Folders (no links to others) with a whole id for a name: nothing else in there is looked at."""
    if not root.is_dir():
        return []
    return [Path(each) for each in os.scandir(root) if _ID.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
