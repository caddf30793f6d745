"""The folder of a run: what a job was started with, who it is, how far it is, how it ended; and the lock that says it lives.

    <data_dir>/run/operations/<run id>/
        params.json     what was asked for: job, parameters, arguments, attempt, when
        identity.json   who the job is: process id and start time (written by the job's own process)
        progress.json   how far it is · result.json  its report or its typed error, written last · log  its output
        stop.json       that it was asked to stop · collected  that its result was handed on · recorded  that it is in the history
        lock            held by the job for as long as it lives · earlier/<n>/  the attempts before this one

The lock is an open-file-description lock: the job inherits the open file, so the kernel releases it when the job is gone,
whatever killed it, and no process id has to be trusted. Asking does not take it.
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
from millrace.base.settings import Settings

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
_FLOCK: Final = "hhqqi4x"  # struct flock of 64-bit Linux


def operations_path(settings: Settings) -> Path:
    """Where the folders of all runs are."""
    return settings.run_path / "operations"


class RunFolder:
    """One run's folder. Reading asks for nothing; writing is for who holds the lock, and for the job."""

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
        """An open file that holds the run's lock, to be handed to the job and closed here; None where another holds it."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                held = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                continue  # the folder was cleaned away between the two calls
            try:
                fcntl.fcntl(held, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
                if os.stat(self._lock).st_ino == os.fstat(held).st_ino:
                    return held
            except BlockingIOError:
                os.close(held)
                return None
            except FileNotFoundError:
                pass
            os.close(held)  # a lock in a folder that was cleaned away meanwhile holds nothing

    def is_locked(self) -> bool:
        """Whether a job, or a starter of one, holds the lock now."""
        try:
            asked = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            answer = fcntl.fcntl(asked, fcntl.F_OFD_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0))
        finally:
            os.close(asked)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    def begin_attempt(self) -> int:
        """Put the files of the attempt before this one aside (lock held); the number of the new attempt, from 1."""
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
        """Remove the folder, unless a job holds it; whether it is gone."""
        held = self.try_lock()
        if held is None:
            return False
        try:
            shutil.rmtree(self.path, ignore_errors=True)
        finally:
            os.close(held)
        return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file that is replaced whole; None where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None
