"""Supervise a worker process: one that dies or falls silent is restarted, after growing pauses.

`supervision.py` deals with failures of its tasks; this is about the process: killed, out of memory, gone, stopped,
stuck.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.file import read_pipeline
from millrace.flows.declare.keys import Keys
from millrace.flows.declare.pipeline import Pipeline
from millrace.flows.range_host.in_hand import late
from millrace.flows.range_host.observed import note_flow
from millrace.flows.range_host.status import (
    SILENT_SECONDS,
    WORKERS,
    ends_path,
    pipeline_folder,
    pulse_path,
    worker_folder,
)
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.periodic import PeriodicTask
from millrace.runtime.process_setup import stop_on_signals
from millrace.runtime.supervisor import Fault, RestartBackoff, Supervisor

FIRST_PAUSE: Final = 1.0
START_SECONDS: Final = 120.0
"""That it may take until it speaks first."""
_STEADY_SECONDS: Final = 60.0
"""One that ran so long had not failed at its start: its pauses begin anew."""
_WATCH_SECONDS: Final = 0.2
_PULSE_SECONDS: Final = 1.0
_WORDS: Final = 2000


class Pulse:
    """How long a worker has been silent, in its supervisor; times in which this process did not run do not count."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._seen, self._at, self._silent, self.spoke = self._look(), clock(), 0.0, False

    def silent(self) -> float:
        """Seconds, since it spoke last or, where it has not yet, since this was made. To be asked again and again."""
        found, now = self._look(), self._clock()
        self._silent += min(now - self._at, _PULSE_SECONDS)
        self._at = now
        if found != self._seen:
            self._seen, self._silent, self.spoke = found, 0.0, True
        return self._silent

    def _look(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


class SupervisorWatch(PeriodicTask):
    """The worker's view of its supervisor: touches `pulse` while this process runs, and ends it with the supervisor.

    It sets `stop` once the supervisor is gone, and kills this process if it has not ended `patience` seconds later. A
    killed supervisor can stop nobody: otherwise its worker would run beside its successor's, even when the pipeline is
    stopped.
    """

    def __init__(self, supervisor: int, stop: threading.Event, *, patience: float, pulse: Path | None = None) -> None:
        super().__init__(name="supervisor-watch", interval=_WATCH_SECONDS, run_at_start=True)
        self._supervisor = supervisor
        self._stop = stop
        self._patience = patience
        self._gone_since: float | None = None
        self._pulse, self._touched = pulse, 0.0

    def run_once(self) -> None:
        if self._pulse is not None and time.monotonic() - self._touched >= _PULSE_SECONDS:
            self._pulse.parent.mkdir(parents=True, exist_ok=True)
            self._pulse.touch(0o600)
            self._touched = time.monotonic()
        if os.getppid() == self._supervisor:
            return
        self._stop.set()
        if self._gone_since is None:
            self._gone_since = time.monotonic()
        elif time.monotonic() - self._gone_since > self._patience:
            os.kill(os.getpid(), signal.SIGKILL)


class _Worker:
    """A run of the worker's process, and the pulse that says that it is alive."""

    def __init__(
        self,
        command: list[str],
        settings: Settings,
        pipeline: str,
        *,
        worker: int,
        silent_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._pipeline, self._silent_seconds = settings, pipeline, silent_seconds
        self._pulse = Pulse(pulse_path(settings, pipeline, worker), clock)
        log_file = worker_folder(settings, pipeline, worker) / "worker.log"
        self._job = ChildProcess(command, log_file=log_file, env=settings.environment())
        self.code: int | None = None
        """Its exit code, once it was stopped."""

    def fault(self) -> Fault | None:
        """How it ended, or why it is ended here: it does not speak, or one document holds it."""
        if not self._job.running():
            code = self._job.stop(deadline=0.0)
            return Fault("", restart=False) if code == 0 else Fault(f"it ended with {code}: {self._last_line()}")
        quiet = self._pulse.silent()
        silent = quiet > (self._silent_seconds if self._pulse.spoke else max(self._silent_seconds, START_SECONDS))
        held = late(self._settings, self._pipeline, (self._job.pid,))
        if not silent and held is None:
            return None
        self._job.kill()  # a stopped process, or one that lets no thread run, handles no SIGTERM
        if held is not None:
            # What one document did is no failure at the start: the next one does without it.
            return Fault(str(held), first=True)
        return Fault(f"it did not speak for {quiet:.0f} s (process {self._job.pid}) and was ended")

    def stop(self, *, deadline: float) -> None:
        self.code = self._job.stop(deadline=deadline)

    def _last_line(self) -> str:
        return self._job.tail(1).strip() or f"its log is {self._job.log_file}"


def supervise(
    settings: Settings,
    file: Path,
    *,
    config: Path | None = None,
    until_end: bool = False,
    silent_seconds: float = SILENT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the workers of `file` until SIGTERM or SIGINT, which they get too; return the first exit code that is not 0.

    Their output goes to worker.log in their folders. Bounded by `until_end`, and for each worker by recovery.attempts
    fruitless starts in a row.
    """
    configuration = Configuration() if config is None else Configuration.load(config)
    pipeline = read_pipeline(file, configuration, keys=Keys(settings.data_dir))
    stop = stop_on_signals()
    command = [
        sys.executable,
        "-m",
        "millrace.flows.range_host",
        str(file.absolute()),
        "--supervisor",
        str(os.getpid()),
    ]
    command += [] if config is None else ["--config", str(config.absolute())]
    command += ["--until-end"] if until_end else []
    count = pipeline.resources.workers
    _forget_workers(settings, pipeline.id, count)
    note_flow(settings, pipeline, file=file, config=config)
    codes = [0] * count

    def one(worker: int) -> None:
        mine = [*command, "--worker", str(worker)] if worker else command
        codes[worker] = _supervised(settings, pipeline, mine, worker, stop, silent_seconds=silent_seconds, clock=clock)

    threads = [threading.Thread(target=one, args=(worker,), name=f"worker-{worker}") for worker in range(1, count)]
    for each in threads:
        each.start()
    one(0)
    for each in threads:
        each.join()
    return next((code for code in codes if code), 0)


def _supervised(
    settings: Settings,
    pipeline: Pipeline,
    command: list[str],
    worker: int,
    stop: threading.Event,
    *,
    silent_seconds: float,
    clock: Callable[[], float],
) -> int:
    """Keep one worker running until `stop`. Return its exit code."""
    longest = 60 * pipeline.recovery.interval_minutes
    workers: list[_Worker] = []
    ends = 0

    def start() -> _Worker:
        made = _Worker(command, settings, pipeline.id, worker=worker, silent_seconds=silent_seconds, clock=clock)
        workers[:] = [made]
        return made

    def on_fault(fault: Fault) -> None:
        nonlocal ends
        if not fault.cause:
            return  # it has done its work
        ends += 1
        sys.stderr.write(f"the worker of {pipeline.id}: {fault}\n")
        path = ends_path(settings, pipeline.id, worker)
        replace_json(path, {"at": time.time(), "ends": ends, "cause": fault.cause[:_WORDS]})

    fault = Supervisor(
        start,
        backoff=RestartBackoff(min(FIRST_PAUSE, longest), longest, steady=_STEADY_SECONDS, jitter=True),
        stop_deadline=settings.stop_deadline,
        attempts=pipeline.recovery.attempts,
        on_fault=on_fault,
    ).run(stop.wait)
    return 0 if fault is None or stop.is_set() else workers[0].code or 0


def _forget_workers(settings: Settings, pipeline: str, count: int) -> None:
    """Remove what workers left that the declaration has no longer; their tasks are others' now."""
    folder = pipeline_folder(settings, pipeline) / WORKERS
    for each in folder.glob("*"):
        if each.name.isdecimal() and int(each.name) >= count:
            shutil.rmtree(each, ignore_errors=True)
