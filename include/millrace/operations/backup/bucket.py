"""Backups in an object store: each content lies there once, however many backups have it.

    <root>/backup-<id>/backup.json           the owner, written first
    <root>/backup-<id>/manifest.json         completes the backup
    <root>/files/<deployment>/<sha256>       the contents of all backups of a deployment

A backup is complete by itself all the same: contents are removed only if no manifest of their deployment names them.
One backup of a deployment is made at a time (the caller holds its lock), and a deployment removes only its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from millrace.base.errors import BackupDamaged, StoreCannotPublish
from millrace.storage.local import local_path
from millrace.storage.store import TableStore, put_stream, store_at

POOL_FOLDER: Final = "files"
UNUSED_SECONDS: Final = 86_400.0
"""Age from which on a content that no manifest names is removed."""
MEMORY_BYTES: Final = 16 << 20
"""Of a file that is read before its digest, and so its name, is known. The rest waits in a temporary file."""

_READ_BYTES: Final = 8 << 20
_DEPLOYMENT: Final = re.compile(r"[0-9a-f]{32}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class BucketFolder:
    """A folder of backups, or one backup, in an object store."""

    uri: str

    @property
    def name(self) -> str:
        return self.uri.rpartition("/")[2]

    @property
    def parent(self) -> BucketFolder:
        return BucketFolder(self.uri.rpartition("/")[0])

    @property
    def store(self) -> TableStore:
        return store_at(self.uri)

    def __truediv__(self, name: str) -> BucketFolder:
        return BucketFolder(f"{self.uri}/{name}")

    def __str__(self) -> str:
        return self.uri

    def open(self, name: str) -> BinaryIO:
        """Open a file below this folder for reading from its beginning. Raises OSError."""
        source = self.store.filesystem.open_input_file(name)
        return cast(BinaryIO, io.BufferedReader(_Raw(source), _READ_BYTES))


BackupPlace = Path | BucketFolder
"""A folder of backups, or one backup."""


class _Raw(io.RawIOBase):
    """A file of a store as Python's buffered readers want it."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._source.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._source.seek(offset, whence)
        return int(self._source.tell())

    def close(self) -> None:
        self._source.close()
        super().close()


def backup_place(text: str) -> BackupPlace:
    """Return the place that a path or a URI names."""
    scheme, separator, _ = text.partition("://")
    if not separator or scheme == "file":
        return local_path(text)
    store = store_at(text)  # raises for a scheme that nobody knows
    if not callable(getattr(store, "replace", None)):
        raise StoreCannotPublish(f"the store of {text} cannot replace a file, so it takes no backups")
    return BucketFolder(text.rstrip("/"))


def content_name(deployment: str, sha256: str) -> str:
    """Return the name of a content below the folder of backups.

    Raises BackupDamaged if a manifest's words are no such name.
    """
    if not _DEPLOYMENT.fullmatch(deployment) or not _SHA256.fullmatch(sha256):
        raise BackupDamaged(f"the manifest has the digest {sha256[:80]!r} of {deployment[:80]!r}: it was altered")
    return f"{POOL_FOLDER}/{deployment}/{sha256}"


class ContentPool:
    """The contents of a deployment's backups. Thread-safe."""

    def __init__(self, root: BucketFolder, deployment: str) -> None:
        self._store = store_at(f"{root.uri}/{POOL_FOLDER}/{deployment}")
        self._known = set(self._store.list(""))

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._known

    def add(self, source: BinaryIO) -> tuple[int, str]:
        """Add what `source` yields, unless it is there. Returns its size and SHA-256."""
        digest, size = hashlib.sha256(), 0
        with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as held:
            while block := source.read(_READ_BYTES):
                digest.update(block)
                held.write(block)
                size += len(block)
            name = digest.hexdigest()
            if name not in self._known:
                held.seek(0)
                self._put(name, cast(BinaryIO, held))
        return size, name

    def add_file(self, path: Path, sha256: str) -> None:
        """Add a file of this machine, unless it is there."""
        if sha256 not in self._known:
            with path.open("rb") as source:
                self._put(sha256, source)

    def _put(self, name: str, source: BinaryIO) -> None:
        put_stream(self._store, name, source)
        self._known.add(name)

    def remove_unused(self, used: Collection[str]) -> int:
        """Remove contents that are not `used` and older than UNUSED_SECONDS. Returns their number."""
        gone = [name for name in self._store.list("", age=UNUSED_SECONDS) if name not in used]
        self._store.delete(gone)
        self._known.difference_update(gone)
        return len(gone)


def folders_of(root: BucketFolder, fits: Callable[[str], Any]) -> Iterator[BucketFolder]:
    """Yield the folders in `root` whose names fit."""
    for name in root.store.folders():
        if fits(name):
            yield root / name


def read_owner(folder: BucketFolder, marker: str) -> Any:
    """Return what the file `marker` of a backup says, or None."""
    text = folder.store.read(marker)
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None
