"""Processes of a test's folder, to be ended with the test."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from tests.waiting import until


def ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or waits only for init to take note."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def end_processes(folder: Path) -> None:
    """End each process whose command line names `folder` or something in it.

    Among them are log servers that wait for the lock of another one: they would start when it has been killed.
    """
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(part == str(folder) or part.startswith(f"{folder}/") for part in process.info["cmdline"] or [])
    ]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    until(lambda: all(ended(process) for process in found), f"the processes of {folder} end")
