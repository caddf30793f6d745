"""Find, signal and end processes of any origin, known by id and start time, with deadlines.

An id is given out again, so a process is pinned by a descriptor and compared with what was seen before it is signalled.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Collection, Iterable
from typing import Final

import psutil

from millrace.base.deadline import Deadline
from millrace.base.process import ProcessInfo, all_processes

POLL_SECONDS: Final = 0.05
KILL_SECONDS: Final = 30.0
"""Time that a killed process may take to end: the kernel frees gigabytes first."""


def read_environment(pid: int) -> dict[str, str] | None:
    """Return the environment that a process was started with; None if it cannot be read."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError, ValueError):
        return None


def with_descendants(roots: Collection[int], everything: dict[int, ProcessInfo]) -> set[int]:
    """Return `roots` and all of their descendants."""
    found = {pid for pid in roots if pid in everything}
    while True:
        more = {pid for pid, each in everything.items() if each.parent in found} - found
        if not more:
            return found
        found |= more


def process_tree(leader: int) -> list[ProcessInfo]:
    """Return the running processes of the session `leader` and the descendants of its processes, without this one.

    A descendant with a session of its own is included while its parent runs.
    """
    everything = all_processes()
    members = {pid for pid, each in everything.items() if pid == leader or each.session == leader}
    return [everything[pid] for pid in with_descendants(members, everything) if pid != os.getpid()]


def pss_bytes(processes: Iterable[ProcessInfo]) -> int:
    """Return the memory of `processes` in bytes: proportional set size, so that shared pages count once."""
    total = 0
    for each in processes:
        try:
            total += psutil.Process(each.pid).memory_full_info().pss
        except psutil.Error:  # gone meanwhile, or it hides its memory
            continue
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
    """Signal each with `first`, and SIGKILL those that run after `deadline` seconds; return those that were killed."""
    asked = [each for each in processes if send_signal(each, first)]
    killed = wait_for_exit(asked, deadline=deadline)
    for each in killed:
        send_signal(each, signal.SIGKILL)
    wait_for_exit(killed, deadline=KILL_SECONDS)
    return killed


def kill_all(find: Callable[[], list[ProcessInfo]], *, deadline: float) -> list[ProcessInfo]:
    """SIGKILL what `find` returns until it returns nothing, since a dying process may have forked.

    Returns what is left after `deadline` seconds.
    """
    stop = Deadline.after(deadline)
    while (left := find()) and not stop.expired():
        for each in left:
            send_signal(each, signal.SIGKILL)
        wait_for_exit(left, deadline=stop.remaining(maximum=1.0))
    return left
