"""Locks that prove something about the process that holds them: that it is alone at work, or that a file speaks of it.

A process id in a file proves nothing: `cp -a` of a data folder copies it while the process lives on. The kernel's lock on an open
file is not copied. So what a process says of itself (:class:`LockedFile`) counts only while it holds that very file.
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
    """Hold an exclusive lock on `path`; the kernel releases it with the process. Raises `busy` (LogBusy) at `deadline`."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not deadline.pause(_POLL):
                    raise busy or LogBusy(f"another process holds {path}: it is at work there, try again") from None
        yield


class LockedFile:
    """A file of JSON that a process publishes about itself and holds locked until it closes it or ends, however it ends."""

    def __init__(self, path: Path, value: Any) -> None:
        """Replace `path`, whole, readable by its owner alone. Raises OSError."""
        self.path = path
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # before the name is there: no reader sees it without its lock
            os.write(file, json.dumps(value).encode() + b"\n")
            draft.replace(path)
        except BaseException:
            os.close(file)
            draft.unlink(missing_ok=True)
            raise
        self.close = weakref.finalize(self, os.close, file)
        """Release the lock; the file stays. Idempotent."""


def read_locked_file(path: Path) -> tuple[bytes, bool]:
    """The bytes of a :class:`LockedFile` and whether a process holds it. Raises OSError where there is no such file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(file, os.fstat(file).st_size)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two readers are not in each other's way
        except BlockingIOError:
            return data, True
        return data, False
    finally:
        os.close(file)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file `path` (:func:`exclusive_lock`) now."""
    try:
        return read_locked_file(path)[1]
    except OSError:
        return False


PROCESSES: Final = "processes"
"""The folder, in a data folder's ``run``, of the processes that report there."""


class ProcessRegistration:
    """This process as one that writes reports (heartbeats, progress) below the folder `run`, while the object lives."""

    def __init__(self, run: Path) -> None:
        folder = run / PROCESSES
        make_folder(folder)
        for path in folder.iterdir():  # what killed processes left behind
            if (pid := path.name.partition(".")[0]).isdigit() and find_process(int(pid)) is None:
                path.unlink(missing_ok=True)
        me = current_process()
        self._file = LockedFile(folder / f"{me.pid}.{secrets.token_hex(4)}", {"pid": me.pid})
        weakref.finalize(self, self._file.path.unlink, missing_ok=True)


def is_report_live(run: Path, pid: int, at: float) -> bool:
    """Whether the process lives that wrote a report below `run` at `at` (wall clock) under `pid`; of a copied folder it does not."""
    if not is_writer_alive(pid, at):
        return False
    for path in (run / PROCESSES).glob(f"{pid}.*"):
        with suppress(FileNotFoundError):
            if read_locked_file(path)[1]:
                return True
    return False
