"""The processes of one installation: found by a mark in their environment, known by id and start time, ended with
deadlines.

A name says nothing about whose process it is, and an id is given out again. So each process that an installation starts
inherits the mark ``MILLRACE_INSTALLATION=<data folder>``; what hides its environment, or was forked by one of them, is
found by descent and by session. Before a signal is sent the process is pinned by a descriptor and compared with what
was seen. Imports little: the keeper of an installation stays small.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.process import PROC, ProcessInfo, all_processes

MARK_VARIABLE: Final = "MILLRACE_INSTALLATION"
"""The variable that says to which installation a process belongs: its data folder. Never a setting."""

POLL_SECONDS: Final = 0.05


def installation_processes(mark: Path) -> list[ProcessInfo]:
    """The processes of the installation `mark`, by age; never this one or one that it descends from.

    Those with the mark, what descends from them, and those that hide their environment (Airflow's tasks do) in a
    session where everybody else has the mark.
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


def with_descendants(roots: Collection[int], everything: dict[int, ProcessInfo]) -> set[int]:
    """Return `roots` and all of their descendants."""
    found = {pid for pid in roots if pid in everything}
    while True:
        more = {pid for pid, each in everything.items() if each.parent in found} - found
        if not more:
            return found
        found |= more


def _carries(pid: int, mark: Path) -> bool | None:
    """Return whether the process has the mark; None if its environment cannot be read."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    try:
        return wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None


def _ancestry(pid: int, everything: dict[int, ProcessInfo]) -> set[int]:
    found = set()
    while pid in everything and pid not in found:
        found.add(pid)
        pid = everything[pid].parent
    return found


def pss_bytes(processes: Iterable[ProcessInfo]) -> int:
    """Return the memory of `processes` in bytes: proportional set size, so that shared pages count once."""
    total = 0
    for each in processes:
        try:
            lines = (PROC / str(each.pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:  # gone meanwhile, or it hides its memory
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def send_signal(process: ProcessInfo, number: signal.Signals) -> bool:
    """Signal exactly this process; return False if it has ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not process.alive():  # the process id was reused
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def wait_for_exit(processes: Iterable[ProcessInfo], *, deadline: float) -> list[ProcessInfo]:
    """Wait up to `deadline` seconds for all of `processes` to end; return those that remain."""
    end = Deadline.after(deadline)
    left = [each for each in processes if each.alive()]
    while left and not end.expired():
        _wait_any(left, end.remaining(maximum=1.0))
        left = [each for each in left if each.alive()]
    return left


def _wait_any(processes: list[ProcessInfo], seconds: float) -> None:
    """Wait until the first process ends, at most `seconds`."""
    try:
        descriptor = os.pidfd_open(processes[0].pid)
    except ProcessLookupError:
        return
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll(max(1.0, seconds * 1000))
    finally:
        os.close(descriptor)


def terminate(
    processes: Iterable[ProcessInfo], *, deadline: float, first: signal.Signals = signal.SIGTERM
) -> list[ProcessInfo]:
    """Signal each with `first`, and SIGKILL those that run after `deadline` seconds; those that had to be killed."""
    asked = [each for each in processes if send_signal(each, first)]
    killed = wait_for_exit(asked, deadline=deadline)
    for each in killed:
        send_signal(each, signal.SIGKILL)
    wait_for_exit(killed, deadline=10.0)
    return killed


def kill_all(find: Callable[[], list[ProcessInfo]], *, deadline: float) -> list[ProcessInfo]:
    """SIGKILL whatever `find` finds, until it finds nothing (a dying process may have forked); what is left at
    `deadline`."""
    stop = Deadline.after(deadline)
    while (left := find()) and not stop.expired():
        for each in left:
            send_signal(each, signal.SIGKILL)
        wait_for_exit(left, deadline=stop.remaining(maximum=1.0))
    return left
