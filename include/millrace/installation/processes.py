"""The processes of one installation, found by a mark in their environment.

A name does not say whose process it is. So each process that an installation starts inherits the mark
``MILLRACE_INSTALLATION=<data folder>``. A process that hides its environment, or was forked by a marked one, is found
by descent and by session.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from millrace.base.process import ProcessInfo, all_processes
from millrace.runtime.processes import read_environment, with_descendants

MARK_VARIABLE: Final = "MILLRACE_INSTALLATION"
"""The variable that names the installation of a process: its data folder. Never a setting."""


def installation_processes(mark: Path) -> list[ProcessInfo]:
    """Return the processes of the installation `mark`, oldest first, without this one and its ancestors.

    These are the marked processes, their descendants, and those that hide their environment (Airflow's tasks do) in a
    session whose other members are all marked.
    """
    everything = all_processes()
    carries = {pid: _carries(pid, mark) for pid in everything}
    ours = {pid for pid, carried in carries.items() if carried}
    foreign = {everything[pid].session for pid, carried in carries.items() if carried is False}
    sessions = {everything[pid].session for pid in ours} - foreign
    ours |= {pid for pid, each in everything.items() if each.session in sessions}
    ours = with_descendants(ours, everything)
    ours -= _ancestry(os.getpid(), everything)
    return sorted((everything[pid] for pid in ours), key=lambda each: (each.start_ticks, each.pid))


def _carries(pid: int, mark: Path) -> bool | None:
    """Return whether the process has the mark; None if its environment cannot be read."""
    found = read_environment(pid)
    return None if found is None else found.get(MARK_VARIABLE) == str(mark)


def _ancestry(pid: int, everything: dict[int, ProcessInfo]) -> set[int]:
    found = set()
    while pid in everything and pid not in found:
        found.add(pid)
        pid = everything[pid].parent
    return found
