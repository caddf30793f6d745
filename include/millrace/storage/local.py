"""A table in a folder of this machine's file system.

Files are written past the page cache (millrace.storage.direct_file) and synced with their names and parent folders.
delta-rs makes no fsync, so its files are synced afterwards. The lease is a lock on a file in the table's folder, which
the kernel releases with the process. A suspended process can therefore delay only the clean-up of the log.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit

from millrace.base.files import make_folder, sync
from millrace.storage.direct_file import DirectFile
from millrace.storage.store import TableStore

if TYPE_CHECKING:  # names of tables are looked for by DAG files too, which load neither
    import pyarrow.fs as fs
    from deltalake import DeltaTable

_LOCK: Final = "_commits.lock"


def local_path(uri: object) -> Path:
    """Return the folder of a path or a ``file://`` URI."""
    text = str(uri)
    return Path(unquote(urlsplit(text).path) if text.startswith("file://") else text).absolute()


class LocalStore:
    """The table in the folder `uri`, a path or a ``file://`` URI. It need not exist yet."""

    options: Mapping[str, str] = {}
    spark_options: Mapping[str, str] = {}

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

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(entry.name for entry in os.scandir(self.folder / folder) if entry.is_file())
        except FileNotFoundError:
            return []

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


class _LocalSink(DirectFile):
    """A file whose name is made durable with its data."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path.parent

    def sync(self) -> int:
        size = super().sync()
        sync(self._folder)
        return size
