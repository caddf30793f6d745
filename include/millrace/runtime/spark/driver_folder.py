"""Temporary folders of Spark drivers, in the data folder.

A driver's JVM puts what it unpacks, spills and caches there instead of in ``/tmp``. It removes that when it ends, but
not when it is killed, and an unpacked environment takes 700 MB. Each new driver removes the folders of drivers that
are gone. A lock shows which are alive: the kernel releases it when the driver's Python process ends, and its JVM ends
with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from millrace.base.settings import Settings


def make_driver_folder(settings: Settings) -> Path | None:
    """Return a new temporary folder for the driver in this process, and remove those of drivers that are gone.

    The folder is this process's until it ends. None if there is no data folder, or this user may not write there.
    """
    if not settings.data_dir.is_dir():
        return None
    folders = settings.data_dir / "spark" / "drivers"
    try:
        folders.mkdir(mode=0o700, parents=True, exist_ok=True)
        guard = _open(folders / "guard")
    except OSError:
        return None
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for lock in folders.glob("*.lock"):
            _remove_unless_locked(lock)
        made = folders / uuid.uuid4().hex
        # Open until this process ends. The guard keeps others from it before it is locked.
        fcntl.flock(_open(made.with_suffix(".lock")), fcntl.LOCK_EX)
        made.mkdir(mode=0o700)
        return made
    finally:
        os.close(guard)


def _remove_unless_locked(lock: Path) -> None:
    """Remove a folder and its lock if its driver is gone."""
    handle = _open(lock)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally:
        os.close(handle)
    folder = lock.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)  # a JVM that has just lost its driver may still write there
    if not folder.exists():
        with suppress(FileNotFoundError):
            lock.unlink()


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
