"""Child processes of one machine: started in a session of their own, watched with deadlines, stopped as a group.

A streaming job is a Python driver with a JVM and Python workers below it: whoever stops it signals the whole session,
SIGTERM first (the job finishes its micro-batch), SIGKILL when the deadline has passed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, MillraceError

POLL_SECONDS = 0.05


class JobFailed(MillraceError):
    """A process of ours ended before it was ready, or with an error; the message names its log file."""


class ChildProcess:
    """A running child with its output in `log_file`."""

    def __init__(self, command: Sequence[str], *, log_file: Path, env: Mapping[str, str]) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
        self._name = " ".join(Path(part).name for part in command[:3])
        with log_file.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, ready: Callable[[], bool], *, deadline: float) -> None:
        """Wait until `ready()`. Raises JobFailed where the process ends first, DeadlineExceeded after `deadline` seconds."""
        end = Deadline.after(deadline)
        while not ready():
            if not self.running():
                raise JobFailed(
                    f"{self._name} ended with {self._process.returncode}:\n{self.tail()}\n(log: {self.log_file})"
                )
            if not end.pause(POLL_SECONDS):
                raise DeadlineExceeded(f"{self._name} was not ready after {deadline:.0f} s; its log: {self.log_file}")

    def wait(self, *, deadline: float) -> int:
        """Its exit code, once it ends by itself. Raises DeadlineExceeded."""
        try:
            return self._process.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"{self._name} still runs after {deadline:.0f} s; its log: {self.log_file}"
            ) from None

    def stop(self, *, deadline: float) -> int:
        """End it and everything in its session: SIGTERM, and SIGKILL after `deadline` seconds; its exit code."""
        if self.running():
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # workers that outlived the driver
        except ProcessLookupError:
            pass
        return self._process.wait(timeout=deadline) if code is None else code

    def kill(self) -> None:
        """SIGKILL for the whole session, at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(timeout=30)

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])
