"""Files of a backup in an object store. They go through a folder of this machine only if they are written here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, cast

from millrace.base.errors import BackupRefused
from millrace.operations.backup.bucket import ContentPool
from millrace.operations.backup.files import BackupFiles, FileGone
from millrace.operations.backup.manifest import DATA_FOLDER, StoredFile
from millrace.storage.store import TableStore
from millrace.tables.collections.layout import earlier_name

_THREADS: Final = 4


@dataclass
class BucketFiles(BackupFiles):
    """The files of one backup, whose `folder` is scratch space that :meth:`flush` empties. Thread-safe."""

    pool: ContentPool = field(kw_only=True)

    def link_table_file(self, store: TableStore, file: str, table: str, size: int) -> None:
        name = f"{table}/{file}"
        if self.reuse(name, size):
            return
        stored = self._stream(store, file)
        if stored.size != size:
            raise BackupRefused(f"{file} of {store.uri} has {stored.size} bytes instead of {size}: run recovery first")
        self.add(name, stored)

    def take_staged(self, store: TableStore, file: str, name: str) -> None:
        self.add(name, self._stream(store, file))

    def reuse(self, name: str, size: int) -> bool:
        files = {} if self.earlier_manifest is None else self.earlier_manifest.files
        known = files.get(name) or files.get(earlier_name(name))
        if known is None or known.size != size or known.sha256 not in self.pool:
            return False
        with self._lock:
            self.stored[name] = known
            self.linked += 1
        return True

    def reuse_here(self, name: str, size: int) -> bool:
        return False  # it is needed on this machine; its content is uploaded once all the same

    def flush(self) -> None:
        here = self.folder / DATA_FOLDER
        paths = [path for path in here.rglob("*") if path.is_file()]

        def upload(path: Path) -> None:
            self.pool.add_file(path, self.stored[str(path.relative_to(here))].sha256)
            path.unlink()

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="backup") as threads:
            list(threads.map(upload, paths))

    def sync_folders(self) -> None:
        self.flush()

    def _stream(self, store: TableStore, file: str) -> StoredFile:
        try:
            with store.filesystem.open_input_stream(file) as source:
                return StoredFile(*self.pool.add(cast(BinaryIO, source)))
        except FileNotFoundError:
            raise FileGone(f"{file} of {store.uri} was removed during the backup: try again") from None
