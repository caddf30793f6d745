"""Keep one process running: start it, watch it, restart it after growing pauses, stop it.

    class Worker:                                   # what is supervised says itself how it is and how it stops
        def fault(self) -> Fault | None: ...
        def stop(self, *, deadline: float) -> object: ...

    supervisor = Supervisor(start, backoff=RestartBackoff(1.0, 60.0), stop_deadline=30.0)
    fault = supervisor.run(event.wait)              # until the event is set, or a fault that no restart cures

The process may be a child, a group of them or a detached job: `start` makes it and may adopt one that runs. While a
process that is stopped may finish what it does, `stop` sends SIGTERM first and SIGKILL to the whole tree after
`deadline` seconds (:class:`millrace.runtime.child_processes.ChildProcess`). A supervisor that is killed can stop
nothing: what it supervises notices that by itself or is found by the next one's `start`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from millrace.base.backoff import delay_after, jittered
from millrace.base.files import replace_json
from millrace.runtime.launch.folder import read_json

POLL_SECONDS: Final = 0.2
_MAX_WORDS: Final = 500

Stop = Callable[[float], bool]
"""Waits for up to so many seconds; returns True, and early, if supervision is to end.

``threading.Event.wait`` is one.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason to replace a process, or to end its supervision."""

    cause: str
    """Empty: nothing failed. The process has to run differently, or its work is done."""
    restart: bool = True
    """False: a restart cures nothing, or the process ended because its work is done."""
    first: bool = False
    """Counts as the first failure in a row, whatever failed before: its cause is not the process's start."""

    def __str__(self) -> str:
        return self.cause


class Supervised(Protocol):
    """A process, as its supervisor sees it."""

    def fault(self) -> Fault | None:
        """Return why the process has to be replaced; None while it is well. Called again and again."""
        ...

    def stop(self, *, deadline: float) -> object:
        """End the process and everything that it started, within about `deadline` seconds."""
        ...


P = TypeVar("P", bound=Supervised)


class RestartBackoff:
    """Pauses before restarts: `first` seconds, doubled with each failure in a row, at most `longest`.

    Failures are forgotten once a process has run for `steady` seconds. With `path` they outlive the supervisor.
    """

    def __init__(
        self, first: float, longest: float, *, steady: float = 300.0, path: Path | None = None, jitter: bool = False
    ) -> None:
        """`jitter`: for processes of several supervisors that a common cause may end at the same time."""
        self._first, self._longest, self.steady = first, longest, steady
        self._path, self._jitter = path, jitter
        self._memory: dict[str, Any] = {}

    @property
    def failures(self) -> int:
        """The number of failures in a row."""
        return int(self._read().get("failures", 0))

    def remaining_pause(self) -> float:
        """Return how many seconds of the pause after the last failure are left."""
        known = self._read()
        if not known.get("failures"):
            return 0.0
        pause = float(known.get("pause", self._longest))
        # At most the whole pause: the wall clock may have been set back since.
        return max(0.0, min(pause, float(known["at"]) + pause - time.time()))

    def record_failure(self, why: str, *, first: bool = False) -> None:
        """Count a failure now. It is the first in a row if `first`, or if the last one is long ago."""
        known = self._read()
        old = time.time() - float(known.get("at", 0.0)) > self.steady + self._longest
        failures = 1 if first or old else int(known.get("failures", 0)) + 1
        pause = delay_after(failures, self._first, max(self._first, self._longest))
        pause = jittered(pause) if self._jitter else pause
        self._memory = {"failures": failures, "at": time.time(), "pause": pause, "why": why[:_MAX_WORDS]}
        if self._path is not None:
            replace_json(self._path, self._memory)

    def reset(self) -> None:
        """Forget the failures: the next one is a first one."""
        self._memory = {}
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        return self._memory if self._path is None else read_json(self._path) or {}


class Supervisor(Generic[P]):
    """Runs one process at a time, from `start`, and replaces it after a fault."""

    def __init__(
        self,
        start: Callable[[], P | None],
        *,
        backoff: RestartBackoff,
        stop_deadline: float,
        poll: float = POLL_SECONDS,
        attempts: int | None = None,
        detached: bool = False,
        on_fault: Callable[[Fault], None] = lambda fault: None,
    ) -> None:
        """Supervise what `start` returns, or nothing if that is None; `poll`: seconds between two looks at it.

        Supervision ends after more than `attempts` failures in a row; None: never. `on_fault` is called with each
        fault, once the process has ended and the failure is counted. A `detached` process outlives its supervisor: it
        is stopped for a fault alone.
        """
        self._start = start
        self._backoff = backoff
        self._stop_deadline = stop_deadline
        self._poll = poll
        self._attempts = attempts
        self._detached = detached
        self._on_fault = on_fault
        self.restarts = 0
        """Number of starts of a process after a fault."""

    def start(self, stop: Stop) -> P | None:
        """Start the process once the pause after the last failure is over; return None if `stop` came first."""
        while (pause := self._backoff.remaining_pause()) > 0:
            if stop(pause):
                return None
        return None if stop(0) else self._start()

    def run(self, stop: Stop, process: P | None = None) -> Fault | None:
        """Keep a process running until `stop`; then return None. Return a fault that no restart cures.

        `process` already runs. Whatever ends the watch, an exception too, ends a process that is not detached.
        """
        if process is None and (process := self.start(stop)) is None:
            return None
        while True:
            fault = self._watch(process, stop)
            if fault is None or (not self._detached and stop(0)):
                return None  # what ends while it is asked to end has not failed
            if fault.cause:
                self._backoff.record_failure(fault.cause, first=fault.first)
            self._on_fault(fault)
            if not fault.restart or (self._attempts is not None and self._backoff.failures > self._attempts):
                return fault
            if (process := self.start(stop)) is None:
                return None
            self.restarts += 1

    def _watch(self, process: P, stop: Stop) -> Fault | None:
        """Watch until a fault, which stops the process, or until `stop`."""
        began, forgiven, ended = time.monotonic(), False, not self._detached
        try:
            while (fault := process.fault()) is None and not stop(self._poll):
                if not forgiven and time.monotonic() - began >= self._backoff.steady:
                    forgiven = True
                    self._backoff.reset()
            ended = ended or fault is not None
            return fault
        finally:
            if ended:
                process.stop(deadline=self._stop_deadline)
