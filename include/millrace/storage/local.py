"""A table in a folder of this machine's file system.

Files are written past the page cache (:class:`DirectFile`) and synced with their names and parent folders.
delta-rs makes no fsync, so its files are synced afterwards. The lease is a lock on a file in the table's folder, which
the kernel releases with the process. A suspended process can therefore delay only the clean-up of the log.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit

from millrace.base.files import make_folder, replace_file, sync, sync_data
from millrace.storage.store import TableStore

if TYPE_CHECKING:  # names of tables are looked for by DAG files too, which load neither
    import pyarrow.fs as fs
    from deltalake import DeltaTable

ALIGNMENT: Final = 4096
"""O_DIRECT requires offsets, sizes and memory in multiples of the device's block; 4 KiB covers common ones."""
BUFFER_BYTES: Final = 4 << 20
"""Bytes per direct write: large ones keep the disk busy without the page cache."""
PLAIN_BYTES: Final = 1 << 20
"""Leading bytes of each file that go through the page cache; a multiple of ALIGNMENT.

For a small file, a buffer's pages and a second wait for the disk would cost more than the cache's pages.
"""

DRAFT: Final = ".draft-"
"""Beginning of the name of a file that :meth:`LocalStore.put_if_absent` has not named yet."""
_LOCK: Final = "_commits.lock"


def local_path(uri: object) -> Path:
    """Return the folder of a path or a ``file://`` URI."""
    text = str(uri)
    return Path(unquote(urlsplit(text).path) if text.startswith("file://") else text).absolute()


class LocalStore:
    """The table in the folder `uri`, a path or a ``file://`` URI. It need not exist yet."""

    options: Mapping[str, str] = {}
    spark_options: Mapping[str, str] = {}
    log_seconds = math.inf

    def __init__(self, uri: object) -> None:
        self.folder = local_path(uri)

    @property
    def uri(self) -> str:
        return str(self.folder)

    @property
    def spark_uri(self) -> str:
        return self.uri

    @cached_property
    def filesystem(self) -> fs.FileSystem:
        import pyarrow.fs as fs

        return fs.SubTreeFileSystem(self.uri, fs.LocalFileSystem())

    def delta(self, version: int | None = None) -> DeltaTable:
        from deltalake import DeltaTable

        return DeltaTable(self.uri, version=version)

    def exists(self) -> bool:
        from deltalake import DeltaTable

        return DeltaTable.is_deltatable(self.uri)

    def create(self, **options: Any) -> None:
        from deltalake import DeltaTable

        make_folder(self.folder)
        DeltaTable.create(self.uri, **options)

    def put(self, name: str) -> _LocalSink:
        path = self.folder / name
        make_folder(path.parent)
        return _LocalSink(path)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self.folder / name
        make_folder(path.parent)
        # The bytes are durable before they get the name, so a torn file never has it. A kill may leave the draft.
        draft = path.with_name(f"{DRAFT}{uuid.uuid4().hex}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            try:
                _write_all(descriptor, memoryview(data))
                sync(descriptor)
            finally:
                os.close(descriptor)
            try:
                os.link(draft, path)
            except FileExistsError:
                return False
            sync(path.parent)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        try:
            return (self.folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self, folder: str, *, age: float = 0.0) -> list[str]:
        before = time.time() - age
        try:
            return sorted(
                entry.name
                for entry in os.scandir(self.folder / folder)
                if entry.is_file() and (not age or entry.stat().st_mtime <= before)
            )
        except FileNotFoundError:
            return []

    def folder_mark(self, folder: str) -> tuple[str, float] | None:
        """Return a text that changes when a file of `folder` is added or removed, and when it last did (Unix seconds).

        None if there is no such folder.
        """
        try:
            found = os.stat(self.folder / folder)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return f"{found.st_ino}-{found.st_mtime_ns}", found.st_mtime

    def folders(self) -> Sequence[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        except FileNotFoundError:
            return []

    def take(self, other: TableStore, name: str, how: Literal["copy", "link", "move"]) -> bool:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if how == "copy" or not isinstance(other, LocalStore) or not _linked(other.folder / name, target, how):
                with other.filesystem.open_input_stream(name) as source, target.open("xb") as copy:
                    shutil.copyfileobj(source, copy)
        except FileNotFoundError:
            return False
        except FileExistsError:
            pass
        return True

    def replace(self, name: str, data: bytes) -> None:
        replace_file(self.folder / name, data, synced=True)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def sync(self, names: Iterable[str]) -> None:
        folders: set[Path] = set()
        for name in names:
            path = self.folder / name
            sync(path)
            folders.add(path.parent)
        for folder in folders:
            sync(folder)

    @contextmanager
    def lease(self) -> Iterator[None]:
        handle = self._lock()
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        handle = self._lock()
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(handle)

    def _lock(self) -> int:
        return os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _linked(source: Path, target: Path, how: Literal["link", "move"]) -> bool:
    """Link or move a file. Returns False if only a copy works. Never links a link, which could point elsewhere."""
    try:
        if how == "move":
            source.replace(target)
            return True
        os.link(source, target, follow_symlinks=False)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:  # another file system, no support for links, or too many links
        return False
    if stat.S_ISREG(target.lstat().st_mode):
        return True
    target.unlink()
    return False


class DirectFile:
    """A new file at `path` that is written past the page cache, if the file system allows it.

    It has the interface of a Python file that pyarrow needs: write, tell, flush, close. First-touched page-cache pages
    cost a writer more CPU than the disk costs time (docs/performance.md, "The log"), and files that are written and
    synced once gain nothing from them. Everything after the first PLAIN_BYTES is buffered in one aligned buffer and
    written with O_DIRECT; the unaligned rest goes through the page cache. If O_DIRECT is refused, everything does. Not
    thread-safe. Durable only after :meth:`sync`.
    """

    def __init__(self, path: Path, *, buffer_bytes: int = BUFFER_BYTES, plain_bytes: int = PLAIN_BYTES) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._buffer_bytes = buffer_bytes
        self._plain_bytes = plain_bytes
        self._buffer: mmap.mmap | None = None
        """Used from `plain_bytes` on."""
        self._view = memoryview(b"")
        self._plain = bytearray()
        """The first `plain_bytes`, until they are complete: pyarrow writes a small file in some 80 pieces."""
        self._held = 0
        self._written = 0
        self._direct = False
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        """Add `data`. Returns its number of bytes."""
        source = memoryview(data).cast("B")
        size = len(source)
        if self._buffer is None:
            plain = source[: self._plain_bytes - len(self._plain)]
            self._plain += plain
            if len(self._plain) < self._plain_bytes:
                return size
            self._write_plain()
            self._grow()
            source = source[len(plain) :]
        self._collect(source)
        return size

    def tell(self) -> int:
        return self._written + len(self._plain) + self._held

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        """Do nothing: the buffer is written when it is full, or by :meth:`sync`."""

    def sync(self) -> int:
        """Write the buffer and make the whole file durable. Returns its size in bytes."""
        self._write_plain()
        held = self._held
        # The last part of a file is rarely a multiple of the block: write it through the page cache, and sync once for
        # both.
        aligned = held - held % ALIGNMENT
        if aligned:
            self._drain(aligned)
        if self._direct:
            _set_direct(self._descriptor, False)
            self._direct = False
        with self._view[aligned:held] as rest:
            _write_all(self._descriptor, rest)
            self._written += len(rest)
        self._held = 0
        sync_data(self._descriptor)
        return self._written

    def _write_plain(self) -> None:
        _write_all(self._descriptor, memoryview(self._plain))
        self._written += len(self._plain)
        self._plain = bytearray()

    def close(self) -> None:
        """Release all resources. Unsynced data may be lost. Idempotent."""
        if self.closed:
            return
        self.closed = True
        # After a failed write its traceback still holds a view, so the buffer is freed with the last view.
        self._view, self._buffer = memoryview(b""), None
        os.close(self._descriptor)

    def _grow(self) -> None:
        """Switch to the buffer: the file is not small."""
        self._buffer = mmap.mmap(-1, self._buffer_bytes)  # a mapping begins at a page, so it is aligned
        self._view = memoryview(self._buffer)
        self._direct = _set_direct(self._descriptor, True)

    def _collect(self, source: memoryview) -> None:
        size, taken = len(source), 0
        while taken < size:
            part = min(size - taken, len(self._view) - self._held)
            self._view[self._held : self._held + part] = source[taken : taken + part]
            self._held += part
            taken += part
            if self._held == len(self._view):
                self._drain(self._held)

    def _drain(self, size: int) -> None:
        with self._view[:size] as part:
            try:
                _write_all(self._descriptor, part)
            except OSError as error:
                # Some file systems accept the flag and refuse the write.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                _set_direct(self._descriptor, False)
                self._direct = False
                _write_all(self._descriptor, part)
        self._written += size
        self._held = 0


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Switch O_DIRECT on or off. Returns whether it is on."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
    except OSError:
        return False
    return wanted


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        written = os.write(descriptor, data)
        if written == len(data):
            return
        data = data[written:]


class _LocalSink(DirectFile):
    """A file whose name is made durable with its data."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path.parent

    def sync(self) -> int:
        size = super().sync()
        sync(self._folder)
        return size
