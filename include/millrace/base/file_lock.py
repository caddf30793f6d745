"""File locks that prove which process is at work, and that a file speaks for a running process.

A process id in a file proves nothing: `cp -a` of a data folder copies the file while the process lives on. The kernel's
lock on an open file is not copied. So a file about a process (:class:`LockedFile`) counts only while that process holds
its lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from millrace.base.deadline import Deadline
from millrace.base.errors import LogBusy, MillraceError
from millrace.base.files import make_folder
from millrace.base.process import current_process, find_process, is_writer_alive

_POLL: Final = 0.01


@contextmanager
def exclusive_lock(path: Path, *, deadline: Deadline, busy: MillraceError | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it when the process ends.

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
        yield


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
