"""Files on their way into a backup: linked where that is right, else copied; each with its digest, each durable.

A Delta table's data files have names that are given once and are never written to again, so one that an earlier backup has is
linked from there, and one of the deployment is linked where both lie on one file system. Everything else is written to
in place (log segments, databases) or has a name that comes again (entries of a Delta log), and is copied.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from millrace.base.errors import BackupBusy, BackupRefused, TableUnavailable
from millrace.base.files import make_folder, sha256_file, sync
from millrace.operations.backup.manifest import DATA_FOLDER, BackupManifest, StoredFile
from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore

CHUNK: Final = 1 << 20


class FileGone(TableUnavailable):
    """A file was removed while it was backed up."""

    code = TableUnavailable.code


@dataclass(slots=True)
class BackupFiles:
    """The files of one backup. Thread-safe."""

    folder: Path
    """Of the backup."""
    earlier_folder: Path | None = None
    """Folder of the backup before, and its manifest."""
    earlier_manifest: BackupManifest | None = None
    stored: dict[str, StoredFile] = field(default_factory=dict)
    linked: int = 0
    """Files that the backup before had."""
    new_bytes: int = 0
    """Bytes of the others."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare_path(self, name: str) -> Path:
        """Where the file `name` (below the data folder) lies in the backup; its folder is made."""
        path = self.folder / DATA_FOLDER / name
        make_folder(path.parent)
        return path

    def link_table_file(self, store: TableStore, file: str, table: str, size: int) -> None:
        """Take over an immutable file of a table. Raises FileGone; BackupRefused where its size is not `size`."""
        name = f"{table}/{file}"
        if self.reuse(name, size):
            return
        found = store.size(file)
        if found is not None and found != size:
            raise BackupRefused(f"{file} of {store.uri} has {found} bytes, and should have {size}: run recovery first")
        target = self.prepare_path(name)
        if found is None or not LocalStore(self.folder / DATA_FOLDER / table).take(store, file, "link"):
            raise FileGone(f"{file} of {store.uri} was removed while it was backed up: try again")
        sync(target)
        self.add(name, StoredFile(size, sha256_file(target)))

    def copy_table_file(self, store: TableStore, file: str, table: str) -> None:
        """Copy a file of a table's log, whose name may come again. Raises FileGone."""
        if not LocalStore(self.folder / DATA_FOLDER / table).take(store, file, "copy"):
            raise FileGone(f"{file} of {store.uri} was removed while it was backed up: try again")
        self.add_written(f"{table}/{file}")

    def link_by_digest(self, source: Path, name: str) -> None:
        """Take over a file that is not written to, but whose name may come again with other bytes. Raises FileGone."""
        try:
            found = StoredFile(source.stat().st_size, sha256_file(source))
        except FileNotFoundError:
            raise FileGone(f"{source} was removed while it was backed up: try again") from None
        if (
            self.earlier_manifest is not None
            and self.earlier_manifest.files.get(name) == found
            and self.reuse(name, found.size)
        ):
            return
        try:
            link_file(source, self.prepare_path(name))
        except OSError:
            self.copy(source, name)
            return
        sync(self.prepare_path(name))
        self.add(name, found)

    def reuse(self, name: str, size: int) -> bool:
        """Link `name` from the backup before; False where that has none of this size."""
        known = None if self.earlier_manifest is None else self.earlier_manifest.files.get(name)
        if self.earlier_folder is None or known is None or known.size != size:
            return False
        try:
            if (self.earlier_folder / DATA_FOLDER / name).stat().st_size != size:
                return False
            link_file(self.earlier_folder / DATA_FOLDER / name, self.prepare_path(name))
        except OSError:  # taken away, or as many links as the file system allows
            return False
        with self._lock:
            self.stored[name] = known
            self.linked += 1
        return True

    def copy(self, source: Path, name: str, *, size: int | None = None) -> None:
        """Copy a file, or its first `size` bytes. Raises FileGone; BackupRefused where there are fewer."""
        try:
            self.add(name, copy_file(source, self.prepare_path(name), size=size))
        except FileNotFoundError:
            raise FileGone(f"{source} was removed while it was backed up: try again") from None
        except EOFError as error:
            raise BackupRefused(str(error)) from None

    def add_written(self, name: str) -> None:
        """Take in a file that was written into its place."""
        path = self.folder / DATA_FOLDER / name
        sync(path)
        self.add(name, StoredFile(path.stat().st_size, sha256_file(path)))

    def add(self, name: str, stored: StoredFile) -> None:
        with self._lock:
            self.stored[name] = stored
            self.new_bytes += stored.size

    def sync_folders(self) -> None:
        """Make the names of all files durable."""
        for folder, _, _ in os.walk(self.folder):
            sync(Path(folder))


@contextmanager
def exclusive_lock(path: Path, *, busy: str) -> Iterator[None]:
    """Hold the lock in the file `path`, which ends with the process. Raises BackupBusy, with those words."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino != os.stat(path).st_ino:
                raise BackupBusy(busy)  # its holder took the file away when it was done
        except (BlockingIOError, FileNotFoundError):
            raise BackupBusy(busy) from None
        yield
    finally:
        os.close(handle)


def link_file(source: Path, target: Path) -> None:
    """Link a file, but never a link: it would lead out of the backup. Raises OSError where it is one, or cannot be linked."""
    os.link(source, target, follow_symlinks=False)
    if not stat.S_ISREG(target.lstat().st_mode):
        target.unlink()
        raise OSError(errno.EMLINK, f"{source} is a link itself")


def copy_file(source: Path, target: Path, *, size: int | None = None) -> StoredFile:
    """Copy `source` (or its first `size` bytes) to the new file `target`, durably. Raises EOFError where there are fewer."""
    with source.open("rb", buffering=0) as read:
        return copy_stream(read, target, size=size)


def copy_stream(read: BinaryIO, target: Path, *, size: int | None = None) -> StoredFile:
    """:func:`copy_file` of an open file."""
    digest, done = hashlib.sha256(), 0
    with target.open("xb", buffering=0) as write:
        while size is None or done < size:
            piece = read.read(CHUNK if size is None else min(CHUNK, size - done))
            if not piece:
                break
            digest.update(piece)
            view = memoryview(piece)
            while view:
                view = view[write.write(view) :]
            done += len(piece)
        if size is not None and done < size:
            raise EOFError(f"{read.name} has {done} bytes, and should have {size}")
        sync(write.fileno())
    return StoredFile(done, digest.hexdigest())
