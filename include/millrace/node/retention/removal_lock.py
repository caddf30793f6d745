"""A lock against removals: while a backup reads log and tables together, nothing of them is removed.

Truncation of the log, its retention and the retention of the WAL run concurrently under a shared lock. A backup takes
the lock exclusively for the seconds in which it pins the tables and copies the log's tail. A removal that finds it
taken waits for its next pass. The kernel releases the lock when its process ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import BackupBusy
from millrace.base.settings import Settings

LOCK: Final = "removal.lock"
_POLL: Final = 0.02

_log = logging.getLogger(__name__)


@contextmanager
def removal_permit(settings: Settings) -> Iterator[bool]:
    """Yield whether the caller may remove something now. If so, no backup starts inside."""
    handle = _open(settings)
    try:
        free = _take(handle, fcntl.LOCK_SH)
        if not free:
            _log.info("a backup blocks removals in %s: the next pass retries", settings.data_dir)
        yield free
    finally:
        os.close(handle)


@contextmanager
def removals_blocked(settings: Settings, *, deadline: float) -> Iterator[None]:
    """Block removals inside.

    Raises BackupBusy if a removal or another backup holds the lock for `deadline` seconds.
    """
    handle = _open(settings)
    end = Deadline.after(deadline)
    try:
        while not _take(handle, fcntl.LOCK_EX):
            if not end.pause(_POLL):
                raise BackupBusy(
                    f"for {deadline:.0f} s a removal (truncation of the log, trim of the WAL) or another "
                    "backup was running in"
                    f" {settings.data_dir}: try again"
                )
        yield
    finally:
        os.close(handle)


def _open(settings: Settings) -> int:
    settings.run_path.mkdir(parents=True, exist_ok=True)
    return os.open(settings.run_path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _take(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
