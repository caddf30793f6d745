"""Files of a move: each is copied once, read back, and compared by SHA-256.

As in a backup, the logs of tables go through a scratch folder, and data files directly (millrace.operations.backup).
The journal lists what was written at the target: a line before a file is written, and one with its digest after it was
compared. So a move that was killed continues with the files that lack a digest, and knows what it may remove there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from millrace.base.closeable import Closeable
from millrace.base.errors import BackupRefused, MoveRefused, TableUnavailable
from millrace.base.failpoint import hit
from millrace.base.files import make_folder, sync
from millrace.operations.backup.files import BackupFiles, FileGone
from millrace.operations.backup.manifest import DATA_FOLDER, StoredFile
from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore

_BLOCK: Final = 4 << 20
_THREADS: Final = 4
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class MoveJournal(Closeable):
    """The files that a move has written at its target. Thread-safe."""

    def __init__(self, path: Path, target: str) -> None:
        """Read the journal at `path`, and go on with it if it is of a move to `target`."""
        self._path = path
        self._lock = threading.Lock()
        self.files: dict[str, tuple[StoredFile, str] | None] = {}
        """For each file, its proven copy, with the mark that the source had; None if begun, or not compared."""
        continued = self._read(target)
        make_folder(path.parent)
        self._file = path.open("a" if continued else "w", encoding="utf-8")
        if not continued:
            self._write({"target": target})

    def _read(self, target: str) -> bool:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
            if json.loads(lines[0]) != {"target": target}:
                return False
        except (FileNotFoundError, ValueError, IndexError):
            return False
        for line in lines[1:]:
            try:
                name, size, sha256, mark = json.loads(line)
            except (ValueError, TypeError):
                continue  # torn by a kill: the file is compared again
            self.files[name] = None if sha256 is None else (StoredFile(size, sha256), mark)
        return True

    def _write(self, value: Any) -> None:
        self._file.write(f"{json.dumps(value)}\n")
        self._file.flush()

    def begin(self, name: str) -> bool:
        """Note that `name` is about to be written. Returns whether an earlier attempt may have written it."""
        with self._lock:
            known = name in self.files
            self.files[name] = None
            self._write([name, 0, None, ""])
            return known

    def prove(self, name: str, stored: StoredFile, mark: str) -> None:
        """Note that the target has `name` as `stored`."""
        with self._lock:
            self.files[name] = stored, mark
            self._write([name, *stored, mark])

    def withdraw(self, names: Iterable[str]) -> None:
        """Note durably that the target may have lost files, before they are removed there."""
        with self._lock:
            for name in names:
                self.files[name] = None
                self._write([name, 0, None, ""])
            sync(self._file.fileno())

    def seed(self, names: Iterable[str]) -> None:
        """Count files that are there and not in the journal as begun: it was lost, or is on another machine."""
        for name in names:
            self.files.setdefault(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """Forget files that were removed from the target. The file lists them until the move ends."""
        for name in names:
            self.files.pop(name, None)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _space(target: TableStore) -> Iterator[None]:
    """Raise MoveRefused if the target is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise MoveRefused(
            f"no space is left at {target.uri}: what was copied stays there; make room and run the move again, or give"
            " it up (--cancel)"
        ) from None


@dataclass
class MovedFiles(BackupFiles):
    """The files of one pass of a move. `folder` is scratch space that :meth:`flush` empties. Thread-safe."""

    target: TableStore = field(kw_only=True)
    journal: MoveJournal = field(kw_only=True)

    sent_bytes: int = 0
    """Bytes that were written at the target, without those that an earlier pass had written."""

    def link_table_file(self, store: TableStore, file: str, table: str, size: int) -> None:
        stored = self._take(store, file, f"{table}/{file}", "")
        if stored.size != size:
            raise BackupRefused(f"{file} of {store.uri} has {stored.size} bytes instead of {size}: run recovery first")

    def take_file(self, store: TableStore, file: str, table: str, *, required: bool = True) -> None:
        """Take a file whose size the table's log does not say; without a `table`, of the root of all tables.

        Raises FileGone if it is `required`.
        """
        try:
            self._take(store, file, f"{table}/{file}" if table else file, "")
        except FileGone:
            if required:
                raise

    def take_staged(self, store: TableStore, file: str, name: str) -> None:
        mark = ""
        if isinstance(store, LocalStore):  # where a name may be reused with other bytes
            try:
                mark = str((store.folder / file).stat().st_mtime_ns)
            except FileNotFoundError:
                raise FileGone(f"{file} of {store.uri} was removed during the move: try again") from None
        self._take(store, file, name, mark)

    def flush(self) -> None:
        here = self.folder / DATA_FOLDER
        paths = [path for path in here.rglob("*") if path.is_file()]

        def upload(path: Path) -> None:
            name = str(path.relative_to(here))
            stored, known = self.stored[name], self.journal.files.get(name)
            if known is None or known[0] != stored:
                self.journal.begin(name)
                with _space(self.target):
                    self.target.replace(name, path.read_bytes())
                self._prove(name, stored, "")
                self._count(stored.size)
            path.unlink()

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="move") as threads:
            list(threads.map(upload, paths))

    def sync_folders(self) -> None:
        self.flush()

    def surplus(self) -> list[str]:
        """Return what earlier passes wrote at the target and the tables no longer have."""
        return sorted(self.journal.files.keys() - self.stored.keys())

    def _take(self, store: TableStore, file: str, name: str, mark: str) -> StoredFile:
        known = self.journal.files.get(name)
        if known is not None and known[1] == mark:
            with self._lock:
                self.stored[name] = known[0]
                self.linked += 1
            return known[0]
        digest, size = hashlib.sha256(), 0
        try:
            # Open the source first: if it is gone, what is at the target may be all that is left.
            with store.filesystem.open_input_stream(file) as source, _space(self.target):
                if self.journal.begin(name):
                    self.target.delete([name])
                hit("move.file")
                sink = self.target.put(name)
                try:
                    while block := source.read(_BLOCK):
                        digest.update(block)
                        sink.write(block)
                        size += len(block)
                    sink.sync()
                finally:
                    sink.close()
        except FileNotFoundError:
            raise FileGone(f"{file} of {store.uri} was removed during the move: try again") from None
        stored = StoredFile(size, digest.hexdigest())
        self._prove(name, stored, mark)
        self.add(name, stored)
        self._count(size)
        return stored

    def _count(self, size: int) -> None:
        with self._lock:
            self.sent_bytes += size

    def _prove(self, name: str, stored: StoredFile, mark: str) -> None:
        digest, size = hashlib.sha256(), 0
        with self.target.filesystem.open_input_stream(name) as written:
            while block := written.read(_BLOCK):
                digest.update(block)
                size += len(block)
        if StoredFile(size, digest.hexdigest()) != stored:
            raise TableUnavailable(
                f"{name} does not read back from {self.target.uri} as it was written: run the move again"
            )
        self.journal.prove(name, stored, mark)
