"""Processes that are not children of this one: the rest of a job's session, and signals to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RUN_FOLDER_VARIABLE: Final = "MILLRACE_RUN_FOLDER"
"""Environment variable that every process of a launched job inherits: the folder of its run."""


def processes_of(folder: Path, *, session: int) -> list[int]:
    """Return the processes of a job: those in its session whose environment names the folder of its run.

    A server that the job started for others (the log server) has its own session and is not included.
    """
    mark = f"{RUN_FOLDER_VARIABLE}={folder}".encode()
    return [pid for pid in _pids() if _session(pid) == session and mark in _environment(pid).split(b"\0")]


def signal_processes(pids: list[int], number: signal.Signals) -> None:
    """Signal each of `pids` and ignore those that have ended."""
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
    except OSError:  # it has ended
        return 0


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, is a kernel thread, or belongs to another user
        return b""
