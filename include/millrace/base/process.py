"""Identify a process by its id and start time; the kernel reuses ids alone.

Reads /proc, where everything else asks psutil: psutil gives a start as wall-clock time, which moves when the clock is
set, and records that outlive a process compare its start in clock ticks since boot. The command line loads this module
at each start, so it imports nothing heavy.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class ProcessInfo(NamedTuple):
    """A running process. `start_ticks` counts clock ticks since boot; with the id it identifies the process for
    good.
    """

    pid: int
    start_ticks: int
    parent: int
    session: int

    @property
    def seconds_since_boot(self) -> float:
        """The start time, in seconds since boot."""
        return self.start_ticks / _TICKS

    @property
    def start(self) -> str:
        """The start time with the boot's id, as text, for records that outlive the process."""
        return f"{boot_id()}:{self.start_ticks}"

    def alive(self) -> bool:
        """Return whether this very process still runs; a zombie does not."""
        found = find_process(self.pid)
        return found is not None and found.start_ticks == self.start_ticks

    def started_before(self, at: float) -> bool:
        """Return whether it started before wall-clock time `at`.

        If so, whatever was written then under this id is this process's.
        """
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - self.seconds_since_boot) <= at


def boot_id() -> str:
    """Return the id of the machine's current boot; "" if unknown."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def find_process(pid: int) -> ProcessInfo | None:
    """Return the process with this id; None if there is none or it is a zombie.

    A process whose first thread has ended looks like a zombie while other threads still run. It counts as running: it
    holds its locks and connections until they end.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command is in parentheses and may itself contain parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX" and int(fields[17]) <= 1:
        return None
    return ProcessInfo(pid=pid, start_ticks=int(fields[19]), parent=int(fields[1]), session=int(fields[3]))


def current_process() -> ProcessInfo:
    """Return the calling process."""
    me = find_process(os.getpid())
    assert me is not None, "the calling process exists"
    return me


def all_processes() -> dict[int, ProcessInfo]:
    """Return every running process of this machine, by id."""
    found = (find_process(int(name)) for name in os.listdir(_PROC) if name.isdigit())
    return {each.pid: each for each in found if each is not None}


def has_open_files(pid: int) -> bool:
    """Return whether a process has open files or belongs to another user.

    The kernel closes the files of a process before it frees its id.
    """
    try:
        return bool(os.listdir(_PROC / str(pid) / "fd"))
    except PermissionError:
        return True
    except OSError:
        return False


def is_alive(pid: int, start: str | None) -> bool:
    """Return whether the process that was `pid` at `start` (:attr:`ProcessInfo.start`) still runs."""
    found = find_process(pid)
    return found is not None and found.start == start


def is_writer_alive(pid: int, at: float) -> bool:
    """Return whether the process that wrote under `pid` at wall-clock time `at` still runs."""
    found = find_process(pid)
    return found is not None and found.started_before(at)
