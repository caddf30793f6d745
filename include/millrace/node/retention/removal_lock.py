"""Holding back what is given up: while a backup looks at log and tables together, nothing of them is removed.

Truncation of the log, its retention and the retention of the WAL go on beside each other; a backup goes alone, for the seconds
in which it pins the tables and copies the log's tail. Who gives something up and finds it held back leaves it for its next
pass. The kernel gives the hold back with the process that has it.
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
    """For who gives something up: whether that may be done now. Where it may, nobody begins to hold it back meanwhile."""
    handle = _open(settings)
    try:
        free = _take(handle, fcntl.LOCK_SH)
        if not free:
            _log.info("a backup holds back what would be given up of %s: the next pass does it", settings.data_dir)
        yield free
    finally:
        os.close(handle)


@contextmanager
def removals_blocked(settings: Settings, *, deadline: float) -> Iterator[None]:
    """Nothing is given up meanwhile. Raises BackupBusy where somebody is at it for `deadline` seconds, or holds it back, too."""
    handle = _open(settings)
    end = Deadline.after(deadline)
    try:
        while not _take(handle, fcntl.LOCK_EX):
            if not end.pause(_POLL):
                raise BackupBusy(
                    f"for {deadline:.0f} s something was being given up in {settings.data_dir} (the log truncated, the WAL"
                    " trimmed), or another backup was under way: try again"
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
