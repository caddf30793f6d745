"""File locks that prove which process is at work, and that a file speaks for a running process.

Many locks of one process can share few open files (:class:`NamedLocks`).

A process id in a file proves nothing: `cp -a` of a data folder copies the file while the process lives on. The kernel's
lock on an open file is not copied. So a file about a process (:class:`LockedFile`) counts only while that process holds
its lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from millrace.base.deadline import Deadline
from millrace.base.errors import LogBusy, MillraceError
from millrace.base.files import make_folder
from millrace.base.process import current_process, find_process, is_writer_alive

_POLL: Final = 0.01
FLOCK: Final = "hhqqi4x"
"""The struct flock of 64-bit Linux, for locks of an open file's bytes: kind, whence, start, length, and 0."""


@contextmanager
def exclusive_lock(path: Path, *, deadline: Deadline, busy: MillraceError | None = None) -> Iterator[BinaryIO]:
    """Hold an exclusive lock on `path`, and yield the open file; the kernel releases it when the process ends.

    Raises `busy` (default: LogBusy) if the lock is not free by `deadline`.
    """
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not deadline.pause(_POLL):
                    raise busy or LogBusy(f"another process holds {path}: try again when it is done") from None
        yield file


class NamedLocks:
    """Exclusive locks by name, each on one byte of one of few files in a folder.

    The kernel releases them when the process ends. Two objects exclude each other, also within a process. Thread-safe.
    """

    FILES: Final = 16
    """The kernel scans a file's locks one by one."""

    def __init__(self, folder: Path) -> None:
        """Make the folder and its files where they are missing. Raises OSError."""
        make_folder(folder)
        self._guard = threading.Lock()
        self._held: set[str] = set()
        with ExitStack() as opened:
            self._files: list[int] = []
            for number in range(self.FILES):
                self._files.append(os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                opened.callback(os.close, self._files[-1])
            self._close = weakref.finalize(self, opened.pop_all().close)

    def acquire(self, name: str) -> bool:
        """Take a lock. Returns False if this object or another has it."""
        with self._guard:
            if not self._close.alive:
                raise ValueError("these locks are closed")
            if name in self._held:
                return False
            try:
                self._set(name, fcntl.F_WRLCK)
            except BlockingIOError:
                return False
            self._held.add(name)
            return True

    def release(self, name: str) -> None:
        """Release a lock that this object has; otherwise nothing happens."""
        with self._guard:
            if name in self._held:
                self._held.remove(name)
                self._set(name, fcntl.F_UNLCK)

    def close(self) -> None:
        """Release all locks for good. Idempotent."""
        with self._guard:
            self._held.clear()
            self._close()

    def __contains__(self, name: str) -> bool:
        """Return whether this object has the lock."""
        return name in self._held

    def _set(self, name: str, kind: int) -> None:
        place, number = divmod(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1, self.FILES)
        fcntl.fcntl(self._files[number], fcntl.F_OFD_SETLK, struct.pack(FLOCK, kind, os.SEEK_SET, place, 1, 0))


class LockedFile:
    """A JSON file in which a process describes itself; it stays locked until `close` or the end of the process."""

    def __init__(self, path: Path, value: Any) -> None:
        """Replace `path` atomically, readable by its owner only. Raises OSError."""
        self.path = path
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # before the rename: no reader may see the file unlocked
            os.write(file, json.dumps(value).encode() + b"\n")
            draft.replace(path)
        except BaseException:
            os.close(file)
            draft.unlink(missing_ok=True)
            raise
        self.close = weakref.finalize(self, os.close, file)
        """Release the lock; the file stays. Idempotent."""


def read_locked_file(path: Path) -> tuple[bytes, bool]:
    """Return the bytes of a :class:`LockedFile` and whether a process holds its lock.

    Raises OSError if the file does not exist.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(file, os.fstat(file).st_size)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two readers do not block each other
        except BlockingIOError:
            return data, True
        return data, False
    finally:
        os.close(file)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock file `path` (:func:`exclusive_lock`)."""
    try:
        return read_locked_file(path)[1]
    except OSError:
        return False


PROCESSES: Final = "processes"
"""The folder, in a data folder's ``run``, that registers reporting processes."""


class ProcessRegistration:
    """Register this process as a writer of reports (heartbeats, progress) in the folder `run`, while the object
    lives.
    """

    def __init__(self, run: Path) -> None:
        folder = run / PROCESSES
        make_folder(folder)
        for path in folder.iterdir():  # files of killed processes
            if (pid := path.name.partition(".")[0]).isdigit() and find_process(int(pid)) is None:
                path.unlink(missing_ok=True)
        me = current_process()
        self._file = LockedFile(folder / f"{me.pid}.{secrets.token_hex(4)}", {"pid": me.pid})
        weakref.finalize(self, self._file.path.unlink, missing_ok=True)


def is_report_live(run: Path, pid: int, at: float) -> bool:
    """Return whether the process still runs that wrote a report in `run` under `pid` at wall-clock time `at`.

    Always False in a copy of the folder.
    """
    if not is_writer_alive(pid, at):
        return False
    for path in (run / PROCESSES).glob(f"{pid}.*"):
        with suppress(FileNotFoundError):
            if read_locked_file(path)[1]:
                return True
    return False
