"""A worker process kept alive: one that dies, or does not speak any more, is started again, behind pauses that grow.

Its tasks' own failures are its own matter (`supervision.py`); here it is about the process: killed, out of memory, gone, stopped, stuck.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from millrace.base.backoff import jittered
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.pipelines.model.configuration import Configuration
from millrace.pipelines.model.status import ends_path, pipeline_folder, pulse_path
from millrace.pipelines.store.keys import Keys
from millrace.pipelines.worker.declared import read_pipeline
from millrace.pipelines.worker.in_hand import late
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.periodic import PeriodicTask
from millrace.runtime.process_setup import stop_on_signals

FIRST_PAUSE: Final = 1.0
SILENT_SECONDS: Final = 30.0
"""A worker that has not spoken for so long is ended; it speaks once a second."""
START_SECONDS: Final = 120.0
"""That it may take until it speaks first."""
_STEADY_SECONDS: Final = 60.0
"""One that ran so long had not failed at its start: its pauses begin anew."""
_POLL: Final = 0.2
_PULSE_SECONDS: Final = 1.0
_WORDS: Final = 2000


class Pulse:
    """In a supervisor: for how long a worker has not spoken. Time in which this process did not run either is not counted."""

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
    """In a worker: touches `pulse` while this process runs; sets `stop` once its supervisor is gone, and kills this process where it has
    not ended `patience` seconds later.

    A supervisor that was killed can stop nobody: without this its worker would go on beside the next one's, also when the pipeline is stopped.
    """

    def __init__(self, supervisor: int, stop: threading.Event, *, patience: float, pulse: Path | None = None) -> None:
        super().__init__(name="supervisor-watch", interval=_POLL, run_at_start=True)
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


def supervise(
    settings: Settings,
    file: Path,
    *,
    config: Path | None = None,
    until_end: bool = False,
    silent_seconds: float = SILENT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the worker of `file` until SIGTERM or SIGINT, which it gets too; its exit code. Its words go to worker.log in its folder.

    Bounded by `until_end`, and by recovery.attempts starts in a row that came to nothing.
    """
    configuration = Configuration() if config is None else Configuration.load(config)
    pipeline = read_pipeline(file, configuration, keys=Keys(settings.data_dir))
    stop = stop_on_signals()
    command = [
        sys.executable,
        "-m",
        "millrace.pipelines.worker",
        str(file.absolute()),
        "--supervisor",
        str(os.getpid()),
    ]
    command += [] if config is None else ["--config", str(config.absolute())]
    command += ["--until-end"] if until_end else []
    log_file = pipeline_folder(settings, pipeline.id) / "worker.log"
    longest = 60 * pipeline.recovery.interval_minutes
    deaths, pause, ends = 0, min(FIRST_PAUSE, longest), 0
    while True:
        begun, silent, held = clock(), "", None
        pulse = Pulse(pulse_path(settings, pipeline.id), clock)
        job = ChildProcess(command, log_file=log_file, env=settings.environment())
        try:
            while not silent and held is None and job.running() and not stop.wait(_POLL):
                quiet = pulse.silent()
                if quiet > (silent_seconds if pulse.spoke else max(silent_seconds, START_SECONDS)):
                    silent = f"it did not speak for {quiet:.0f} s (process {job.pid}) and was ended"
                held = late(settings, pipeline.id, (job.pid,))
                if silent or held is not None:
                    job.kill()  # whoever is stopped, or lets no thread run, hears no SIGTERM
        finally:
            code = job.stop(deadline=settings.stop_deadline)
        if stop.is_set() or code == 0:
            return 0 if stop.is_set() else code
        # What one document did is no failure at the start: the next one does without it.
        if held is not None or clock() - begun >= _STEADY_SECONDS:
            deaths, pause = 0, min(FIRST_PAUSE, longest)
        deaths, ends = deaths + 1, ends + 1
        cause = str(held or silent) if held or silent else f"it ended with {code}: {_last(job)}"
        sys.stderr.write(f"the worker of {pipeline.id}: {cause}\n")
        replace_json(ends_path(settings, pipeline.id), {"at": time.time(), "ends": ends, "cause": cause[:_WORDS]})
        if deaths > pipeline.recovery.attempts or stop.wait(jittered(pause)):
            return 0 if stop.is_set() else code
        pause = min(pause * 2, longest)


def _last(job: ChildProcess) -> str:
    lines = job.tail(1).strip()
    return lines or f"its log is {job.log_file}"
