"""The folder of a run: parameters, identity, progress, result, log, and the lock that shows that the job lives.

    <data_dir>/run/operations/<run id>/
        params.json     the request: job, parameters, arguments, attempt, time
        identity.json   process id and start time, written by the job's own process
        progress.json   progress · result.json  report or typed error, written last · log  output
        stop.json       a stop was requested · collected  the result was handed on · recorded  the end is in the history
        lock            held while the job lives · earlier/<n>/  earlier attempts

The lock is an open-file-description lock. The job inherits the open file, so the kernel releases the lock when the job
ends for any reason, and no process id has to be trusted. A test of the lock does not take it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any, Final

from millrace.base.errors import InvalidArgument
from millrace.base.file_lock import FLOCK
from millrace.base.settings import Settings

RUN_FOLDER_VARIABLE: Final = "MILLRACE_RUN_FOLDER"
"""Environment variable that every process of a launched job inherits: the folder of its run."""
RUN_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@=-]{0,199}")
RETAINED_ATTEMPTS: Final = 3

_OF_AN_ATTEMPT: Final = (
    "params.json",
    "identity.json",
    "progress.json",
    "result.json",
    "stop.json",
    "collected",
    "recorded",
    "log",
    "log.1",
)


def operations_path(settings: Settings) -> Path:
    """Return the folder of all run folders."""
    return settings.run_path / "operations"


class RunFolder:
    """The folder of one run. Anybody may read; only the holder of the lock and the job write."""

    def __init__(self, settings: Settings, run_id: str) -> None:
        if RUN_ID_PATTERN.fullmatch(run_id) is None:
            raise InvalidArgument(
                f"run id {run_id!r}: letters, digits and . _ + @ = -, at most 200, beginning with a letter or digit"
            )
        self.run_id = run_id
        self.path = operations_path(settings) / run_id
        self.params = self.path / "params.json"
        self.identity = self.path / "identity.json"
        self.progress = self.path / "progress.json"
        self.result = self.path / "result.json"
        self.stop = self.path / "stop.json"
        self.collected = self.path / "collected"
        self.recorded = self.path / "recorded"
        self.log = self.path / "log"
        self._lock = self.path / "lock"

    def try_lock(self) -> int | None:
        """Return an open file that holds the lock, to pass to the job and close here; None if the lock is taken."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                held = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                continue  # the folder was removed between the two calls
            try:
                fcntl.fcntl(held, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
                if os.stat(self._lock).st_ino == os.fstat(held).st_ino:
                    return held
            except BlockingIOError:
                os.close(held)
                return None
            except FileNotFoundError:
                pass
            os.close(held)  # a lock in a folder that was removed meanwhile protects nothing

    def is_locked(self) -> bool:
        """Return whether a job, or its starter, holds the lock now."""
        try:
            asked = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            answer = fcntl.fcntl(asked, fcntl.F_OFD_GETLK, struct.pack(FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
        finally:
            os.close(asked)
        return bool(struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK)

    def begin_attempt(self) -> int:
        """Move the files of the previous attempt aside and return the new attempt's number, from 1. Needs the lock."""
        last = read_json(self.params)
        if last is None:
            return 1
        number = int(last.get("attempt", 1))
        earlier = self.path / "earlier" / str(number)
        earlier.mkdir(parents=True, exist_ok=True)
        for name in _OF_AN_ATTEMPT:
            try:
                (self.path / name).replace(earlier / name)
            except FileNotFoundError:
                continue
        shutil.rmtree(self.path / "earlier" / str(number - RETAINED_ATTEMPTS), ignore_errors=True)
        return number + 1

    def remove(self) -> bool:
        """Remove the folder unless a job holds its lock; return whether it was removed."""
        held = self.try_lock()
        if held is None:
            return False
        try:
            shutil.rmtree(self.path, ignore_errors=True)
        finally:
            os.close(held)
        return True


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing or holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None
