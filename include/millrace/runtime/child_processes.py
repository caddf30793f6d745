"""Child processes: each runs in its own session, is awaited with deadlines, and is stopped with its whole tree.

A streaming job is a Python driver with a JVM and Python workers as descendants. To stop it, send SIGTERM to the driver,
which finishes its micro-batch, and SIGKILL to what is left of the tree once it has ended or the deadline has passed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, MillraceError
from millrace.base.process import ProcessInfo
from millrace.runtime.processes import KILL_SECONDS, kill_all, process_tree

POLL_SECONDS = 0.05
_WATCH_SECONDS: Final = 0.2
_PULSE_SECONDS: Final = 1.0


class JobFailed(MillraceError):
    """A child process ended before it was ready, or with an error. The message names its log file."""


class ChildProcess:
    """A running child process that writes its output to `log_file`."""

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
        """Wait until `ready()` is true.

        Raises JobFailed if the process ends first, and DeadlineExceeded after `deadline` seconds.
        """
        end = Deadline.after(deadline)
        while not ready():
            if not self.running():
                raise JobFailed(
                    f"{self._name} ended with {self._process.returncode}:\n{self.tail()}\n(log: {self.log_file})"
                )
            if not end.pause(POLL_SECONDS):
                raise DeadlineExceeded(f"{self._name} was not ready after {deadline:.0f} s; its log: {self.log_file}")

    def wait(self, *, deadline: float) -> int:
        """Wait for the process to end by itself and return its exit code. Raises DeadlineExceeded."""
        try:
            return self._process.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"{self._name} still runs after {deadline:.0f} s; its log: {self.log_file}"
            ) from None

    def stop(self, *, deadline: float) -> int:
        """Stop the process with SIGTERM and return its exit code.

        SIGKILL ends it after `deadline` seconds, and its tree once it has ended.
        """
        tree = process_tree(self.pid)  # while it runs: a child with a session of its own is known by its parent alone
        if self.running():
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            tree = process_tree(self.pid)
        return self._kill(tree)

    def kill(self) -> int:
        """Kill the process and its tree at once, and return its exit code."""
        return self._kill(process_tree(self.pid))

    def _kill(self, tree: list[ProcessInfo]) -> int:
        if self.running():
            self._process.kill()
        kill_all(lambda: [each for each in (*tree, *process_tree(self.pid)) if each.alive()], deadline=KILL_SECONDS)
        return self._process.wait(timeout=KILL_SECONDS)

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])


class SupervisorWatch(threading.Thread):
    """A child's view of its supervisor: touches `pulse` while this process runs, and ends it with the supervisor.

    It sets `stop` once the supervisor is gone, and kills this process if it has not ended `patience` seconds later. A
    killed supervisor cannot stop its child, which would otherwise run beside its successor's, even when the flow is
    stopped.
    """

    def __init__(self, supervisor: int, stop: threading.Event, *, patience: float, pulse: Path | None = None) -> None:
        super().__init__(name="supervisor-watch", daemon=True)
        self._supervisor, self._stop_event, self._patience, self._pulse = supervisor, stop, patience, pulse

    def run(self) -> None:
        """Watch for as long as the process lives."""
        touched, gone_since = 0.0, None
        while True:
            now = time.monotonic()
            if self._pulse is not None and now - touched >= _PULSE_SECONDS:
                with suppress(OSError):  # a full disk: the supervisor sees silence, and this thread goes on
                    self._pulse.parent.mkdir(parents=True, exist_ok=True)
                    self._pulse.touch(0o600)
                    touched = now
            if os.getppid() != self._supervisor:
                self._stop_event.set()
                gone_since = now if gone_since is None else gone_since
                if now - gone_since > self._patience:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(_WATCH_SECONDS)
