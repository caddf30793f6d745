"""Files of a backup: linked where that is safe, copied otherwise. Each has a digest and is durable.

The data files of a Delta table have unique names and never change. They are linked from an earlier backup that has
them, or from the deployment if both are on one file system. Everything else is copied: log segments and databases are
written in place, and names in a Delta log may be reused.
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
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Final

from millrace.base.errors import BackupBusy, BackupRefused, TableUnavailable
from millrace.base.files import make_folder, sha256_file, sync
from millrace.operations.backup.manifest import DATA_FOLDER, BackupManifest, StoredFile
from millrace.storage.delta_log import is_log_file
from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore
from millrace.tables.collections.layout import earlier_name

CHUNK: Final = 1 << 20


class FileGone(TableUnavailable):
    """A file was removed while it was being backed up."""

    code = TableUnavailable.code


@dataclass
class BackupFiles:
    """The files of one backup. Thread-safe."""

    folder: Path
    """Folder of the backup."""
    earlier_folder: Path | None = None
    """Folder of the previous backup. Its manifest is the next field."""
    earlier_manifest: BackupManifest | None = None
    stored: dict[str, StoredFile] = field(default_factory=dict)
    linked: int = 0
    """Number of files linked from the previous backup."""
    new_bytes: int = 0
    """Bytes of all other files."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare_path(self, name: str) -> Path:
        """Return the path in the backup of the file `name` (relative to the data folder), and create its folder."""
        path = self.folder / DATA_FOLDER / name
        make_folder(path.parent)
        return path

    def link_table_file(self, store: TableStore, file: str, table: str, size: int) -> None:
        """Link an immutable file of a table.

        Raises FileGone, and BackupRefused if its size is not `size`.
        """
        name = f"{table}/{file}"
        if self.reuse(name, size):
            return
        found = store.size(file)
        if found is not None and found != size:
            raise BackupRefused(f"{file} of {store.uri} has {found} bytes instead of {size}: run recovery first")
        target = self.prepare_path(name)
        if found is None or not LocalStore(self.folder / DATA_FOLDER / table).take(store, file, "link"):
            raise FileGone(f"{file} of {store.uri} was removed during the backup: try again")
        sync(target)
        self.add(name, StoredFile(size, sha256_file(target)))

    def copy_table_file(self, store: TableStore, file: str, table: str) -> None:
        """Copy a file of a table's log, whose name may be reused. Raises FileGone."""
        if not LocalStore(self.folder / DATA_FOLDER / table).take(store, file, "copy"):
            raise FileGone(f"{file} of {store.uri} was removed during the backup: try again")
        self.add_written(f"{table}/{file}")

    def link_by_digest(self, source: Path, name: str) -> None:
        """Link a file that does not change but whose name may be reused with other bytes. Raises FileGone."""
        try:
            found = StoredFile(source.stat().st_size, sha256_file(source))
        except FileNotFoundError:
            raise FileGone(f"{source} was removed during the backup: try again") from None
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

    def take_staged(self, store: TableStore, file: str, name: str) -> None:
        """Take a staged file as `name`. It does not change, but its name may be reused with other bytes.

        Raises FileGone.
        """
        if isinstance(store, LocalStore):
            self.link_by_digest(store.folder / file, name)
        else:
            self.copy_table_file(store, file, name.removesuffix(f"/{file}"))

    def reuse_here(self, name: str, size: int) -> bool:
        """Like :meth:`reuse`, if the file is then at :meth:`prepare_path`."""
        return self.reuse(name, size)

    def flush(self) -> None:
        """Move the files written so far to where the backup lies. They are no longer at :meth:`prepare_path`."""

    def reuse(self, name: str, size: int) -> bool:
        """Link `name` from the previous backup. Return False if that has no such file of this size."""
        files = {} if self.earlier_manifest is None else self.earlier_manifest.files
        there = name if name in files else earlier_name(name)
        known = files.get(there)
        if self.earlier_folder is None or known is None or known.size != size:
            return False
        try:
            if (self.earlier_folder / DATA_FOLDER / there).stat().st_size != size:
                return False
            link_file(self.earlier_folder / DATA_FOLDER / there, self.prepare_path(name))
        except OSError:  # removed, or the file system's limit of links is reached
            return False
        with self._lock:
            self.stored[name] = known
            self.linked += 1
        return True

    def reuse_table(self, name: str) -> tuple[int, dict[str, int]] | None:
        """Link the log of the table `name` from the previous backup, and return its version and its data files there.

        Returns None if that backup does not have all of it.
        """
        known = self.earlier_manifest
        if known is None or name not in known.tables:
            return None
        names = self._tables.get(name, [])
        log = [each for each in names if is_log_file(each)]
        if not log or not all(self.reuse(each, known.files[each].size) for each in log):
            return None
        data = {each.removeprefix(f"{name}/"): known.files[each].size for each in names if not is_log_file(each)}
        return known.tables[name], data

    @cached_property
    def _tables(self) -> dict[str, list[str]]:
        """The files of the previous backup by table."""
        found: dict[str, list[str]] = {}
        known = self.earlier_manifest
        for each in known.files if known is not None else ():
            parts = each.split("/")
            names = ("/".join(parts[:count]) for count in (1, 2, 3))
            name = next((one for one in names if known is not None and one in known.tables), "")
            found.setdefault(name, []).append(each)
        return found

    def copy(self, source: Path, name: str, *, size: int | None = None) -> None:
        """Copy a file, or its first `size` bytes. Raises FileGone, and BackupRefused if there are fewer."""
        try:
            self.add(name, copy_file(source, self.prepare_path(name), size=size))
        except FileNotFoundError:
            raise FileGone(f"{source} was removed during the backup: try again") from None
        except EOFError as error:
            raise BackupRefused(str(error)) from None

    def add_written(self, name: str) -> None:
        """Register a file that was written to its path in the backup."""
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
    """Hold the lock in the file `path`, which is released with the process.

    Raises BackupBusy with the message `busy`.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_ino != os.stat(path).st_ino:
                raise BackupBusy(busy)  # its holder removed the file when it was done
        except (BlockingIOError, FileNotFoundError):
            raise BackupBusy(busy) from None
        yield
    finally:
        os.close(handle)


def link_file(source: Path, target: Path) -> None:
    """Hard-link a regular file. A symbolic link is refused, because it would lead out of the backup.

    Raises OSError if `source` is a link or cannot be linked.
    """
    os.link(source, target, follow_symlinks=False)
    if not stat.S_ISREG(target.lstat().st_mode):
        target.unlink()
        raise OSError(errno.EMLINK, f"{source} is a symbolic link")


def copy_file(source: Path, target: Path, *, size: int | None = None) -> StoredFile:
    """Copy `source` (or its first `size` bytes) to the new file `target`, durably.

    Raises EOFError if there are fewer.
    """
    with source.open("rb", buffering=0) as read:
        return copy_stream(read, target, size=size)


def copy_stream(read: BinaryIO, target: Path, *, size: int | None = None) -> StoredFile:
    """Copy an open file; see :func:`copy_file`."""
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
            raise EOFError(f"{read.name} has {done} bytes instead of {size}")
        sync(write.fileno())
    return StoredFile(done, digest.hexdigest())
