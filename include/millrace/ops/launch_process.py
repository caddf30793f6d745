"""Processes that are not our children: who one is (a reused process id is another), what is left of its session, signals.

Linux only, as the rest is: a process is known by its id, the time at which the kernel started it and the boot.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RUN_FOLDER: Final = "MILLRACE_RUN_FOLDER"
"""Variable that every process of a launched job inherits: the folder of its run."""


def process_start(pid: int) -> str | None:
    """When the kernel started `pid`, in words that name this boot; None where there is no such process, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The second field is the name in brackets, which may hold spaces and brackets itself.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def is_alive(pid: int, start: str | None) -> bool:
    """Whether the process that was `pid` at `start` still runs."""
    return start is not None and process_start(pid) == start


def processes_of(folder: Path, *, session: int) -> list[int]:
    """The processes of a job and below it: in its session, with the variable that names the folder of its run.

    A server that the job started for others (the log's) has a session of its own and is none of them.
    """
    mark = f"{RUN_FOLDER}={folder}".encode()
    return [pid for pid in _pids() if _session(pid) == session and mark in _environment(pid).split(b"\0")]


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each of `pids`; one that is gone is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            yield int(entry.name)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # gone
        return 0


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, a kernel thread, or somebody else's
        return b""
