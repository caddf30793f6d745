"""The record that a task is processing, stored in a file that other processes see and that outlives the process.

Endless steps block all threads of their process, and steps that exhaust its memory end it, so neither can report
itself. The supervisor ends a process that has had one record in hand for LATE_SECONDS (`flows/hosts.py`). On an
executor of another machine there is no supervisor: the kernel ends the process, by an alarm. The record that a process
had in hand at its end, for whatever reason, is tried in a sandbox before the next process takes it (`task.py`).
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from millrace.base.closeable import Closeable
from millrace.base.settings import Settings, in_executor_folder
from millrace.flows.range_host.status import flow_folder

LATE_SECONDS: Final = 20.0
_PLACE: Final = struct.Struct("<qdq")
"""The offset plus one, the time by the machine's monotonic clock, and the process id."""


class InHand(Closeable):
    """The record in hand of one task. One thread at a time."""

    def __init__(self, settings: Settings, flow: str, task: str) -> None:
        path = _folder(settings, flow) / quote(task, safe="")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, _PLACE.size)
            self._map = mmap.mmap(file, _PLACE.size)
        finally:
            os.close(file)
        found: int = _PLACE.unpack_from(self._map)[0]
        self.suspect = found - 1 if found else None
        """The offset of the record that the previous process had in hand at its end, or None."""
        self._pid = os.getpid()
        self._alarm = in_executor_folder()

    def take(self, offset: int) -> None:
        """Store that the task works on the record at `offset` now."""
        if self._alarm:  # without a handler, SIGALRM ends a process whose threads all wait
            signal.setitimer(signal.ITIMER_REAL, LATE_SECONDS)
        _PLACE.pack_into(self._map, 0, offset + 1, time.monotonic(), self._pid)

    def leave(self) -> None:
        """None is."""
        _PLACE.pack_into(self._map, 0, 0, 0.0, 0)
        if self._alarm:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def close(self) -> None:
        self._map.close()


@contextmanager
def alarm_paused() -> Iterator[None]:
    """Do not count the time of the block against the record in hand: it waits for others, not for a step."""
    left = signal.setitimer(signal.ITIMER_REAL, 0.0)[0] if in_executor_folder() else 0.0
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)


class Held(NamedTuple):
    """A record that a process has in hand."""

    task: str
    offset: int
    seconds: float
    pid: int

    def __str__(self) -> str:
        held = f"{self.task} has had the record at offset {self.offset} in hand for {self.seconds:.0f} s"
        return f"{held}: process {self.pid} ends"


def late(settings: Settings, flow: str, processes: Container[int] | None = None) -> Held | None:
    """Return the record that a process (one of `processes`, if given) has held longest, or None if none is late."""
    held = _held(_folder(settings, flow))
    found = [each for each in held if (processes is None or each.pid in processes) and each.seconds > LATE_SECONDS]
    return max(found, key=lambda each: each.seconds, default=None)


def _held(folder: Path) -> Iterator[Held]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        body = path.read_bytes()
        if len(body) == _PLACE.size and any(body):
            offset, since, pid = _PLACE.unpack(body)
            yield Held(unquote(path.name), offset - 1, time.monotonic() - since, pid)


def _folder(settings: Settings, flow: str) -> Path:
    return flow_folder(settings, flow) / "in-hand"
