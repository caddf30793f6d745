"""Who a process is: its id and the moment at which the kernel started it. An id alone is given out again.

Reads /proc: Linux. Imports nothing but the standard library: the keeper of an installation stays small.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

PROC: Final = Path("/proc")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class ProcessInfo(NamedTuple):
    """A living process as it was seen. `started` counts clock ticks since boot: with the id it names one process for good."""

    pid: int
    start_ticks: int
    parent: int
    session: int

    @property
    def seconds_since_boot(self) -> float:
        """When it started, in seconds since boot."""
        return self.start_ticks / _TICKS

    @property
    def start(self) -> str:
        """When it started, in words that name this boot: for records that outlive it."""
        return f"{(PROC / 'sys/kernel/random/boot_id').read_text().strip()}:{self.start_ticks}"

    def alive(self) -> bool:
        """Whether that very process still runs; a zombie does not."""
        found = find_process(self.pid)
        return found is not None and found.start_ticks == self.start_ticks

    def started_before(self, at: float) -> bool:
        """Whether it began before the wall clock said `at`: whoever wrote then under this id is this very process."""
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - self.seconds_since_boot) <= at


def find_process(pid: int) -> ProcessInfo | None:
    """The process with this id; None where there is none, or a zombie.

    One whose first thread has ended is shown as a zombie while others still end: it has its locks and connections until they have.
    """
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command stands in parentheses and may hold any character, parentheses too.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX" and int(fields[17]) <= 1:
        return None
    return ProcessInfo(pid=pid, start_ticks=int(fields[19]), parent=int(fields[1]), session=int(fields[3]))


def current_process() -> ProcessInfo:
    """The process that asks."""
    me = find_process(os.getpid())
    assert me is not None, "it lives"
    return me


def all_processes() -> dict[int, ProcessInfo]:
    """Every living process of this machine, by id."""
    found = (find_process(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return {each.pid: each for each in found if each is not None}


def has_open_files(pid: int) -> bool:
    """Whether a process has files open, or is another user's. The kernel closes the files of one that ends before its id is gone."""
    try:
        return any(True for _ in (PROC / str(pid) / "fd").iterdir())
    except PermissionError:
        return True
    except OSError:
        return False


def is_alive(pid: int, start: str | None) -> bool:
    """Whether the process that was `pid` at `start` (:attr:`ProcessInfo.start`) still runs."""
    found = find_process(pid)
    return found is not None and found.start == start


def is_writer_alive(pid: int, at: float) -> bool:
    """Whether the process lives that wrote at `at` (wall clock) under `pid`."""
    found = find_process(pid)
    return found is not None and found.started_before(at)
