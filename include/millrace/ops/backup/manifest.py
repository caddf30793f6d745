"""The manifest of a backup: what it holds, with size and digest of each file. Written last: without it there is no backup.

    <folder of backups>/<id>/manifest.json
    <folder of backups>/<id>/data/...        the files, as they lie in a data folder

The id is the backup's moment, so that names sort by time. Files of several backups may be one (hard links); each backup stands
by itself all the same, and removing one takes nothing from another.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from millrace.errors import BackupDamaged, BackupNotFound, UnsupportedVersion
from millrace.ops.operation import write_json
from millrace.tables.fsync import sync

FILE: Final = "manifest.json"
DATA: Final = "data"
PREFIX: Final = "backup-"
"""Begins the id of every backup."""
VERSION: Final = 1


class Stored(NamedTuple):
    """A file of a backup."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ChannelPart:
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
class Manifest:
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
    channels: Mapping[str, ChannelPart]
    incarnations: Mapping[str, int]
    """By folder of a channel of the embedded log: which channel of that name it is."""
    files: Mapping[str, Stored] = field(default_factory=dict)
    """By path below ``data``."""

    @property
    def bytes(self) -> int:
        return sum(each.size for each in self.files.values())

    def write(self, folder: Path) -> None:
        """Write it into the backup's folder, durably; with this the backup is there."""
        body = asdict(self)
        write_json(folder / FILE, {"version": VERSION, "sha256": _digest(body), "body": body})
        for path in (folder / FILE, folder, folder.parent):
            sync(path)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of the backup in `folder`. Raises BackupNotFound, BackupDamaged, UnsupportedVersion."""
        try:
            document = json.loads((folder / FILE).read_bytes())
            version, body = document["version"], document["body"]
            if version != VERSION:
                raise UnsupportedVersion(f"{folder / FILE} has version {version}; this build knows {VERSION}")
            if _digest(body) != document["sha256"]:
                raise BackupDamaged(f"{folder / FILE} was changed since it was written: restore another backup")
            channels = {name: ChannelPart(**each) for name, each in body["channels"].items()}
            files = {name: Stored(*each) for name, each in body["files"].items()}
            return cls(**{**body, "channels": channels, "files": files})
        except (FileNotFoundError, NotADirectoryError):
            raise BackupNotFound(f"{folder} has no {FILE}: it is no backup, or one that was never finished") from None
        except (ValueError, KeyError, TypeError) as error:
            raise BackupDamaged(f"{folder / FILE} does not read ({error}): restore another backup") from error


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def backups(root: Path) -> Iterator[tuple[Path, Manifest]]:
    """The whole backups in a folder of backups, the newest first. One whose manifest does not read is left out."""
    for folder in sorted(_folders(root), reverse=True):
        try:
            yield folder, Manifest.read(folder)
        except (BackupNotFound, BackupDamaged, UnsupportedVersion):
            continue


def find(path: Path) -> tuple[Path, Manifest]:
    """The backup at `path`, or the newest one where that is a folder of backups. Raises BackupNotFound, BackupDamaged."""
    if (path / FILE).exists():
        return path, Manifest.read(path)
    for found in backups(path):
        return found
    raise BackupNotFound(f"{path} is no backup, and there is none in it")


def drop(folder: Path) -> None:
    """Remove a backup: its manifest first, so that what a kill leaves is none any more."""
    (folder / FILE).unlink(missing_ok=True)
    sync(folder)
    shutil.rmtree(folder)


def sweep(root: Path) -> int:
    """Remove what backups that were killed left behind; how many. The caller holds the folder's lock."""
    left = [folder for folder in _folders(root) if not (folder / FILE).exists()]
    for folder in left:
        shutil.rmtree(folder)
    return len(left)


def _folders(root: Path) -> list[Path]:
    """Folders with the name of a backup: nothing else in there is ours to touch."""
    if not root.is_dir():
        return []
    return [each for each in root.iterdir() if each.is_dir() and each.name.startswith(PREFIX)]
