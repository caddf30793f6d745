"""A worker process kept alive: one that dies is started again, behind pauses that grow as its pipeline's recovery says.

Its tasks' own failures are its own matter (`supervision.py`); here it is about the process: killed, out of memory, gone.
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

from millrace.base.pauses import jittered
from millrace.base.settings import Settings
from millrace.pipelines.model.configuration import Configuration
from millrace.pipelines.model.status import pipeline_folder
from millrace.pipelines.worker.declared import read_pipeline
from millrace.runtime.child_processes import Job
from millrace.runtime.periodic import Periodic
from millrace.runtime.service import stop_at_signal

FIRST_PAUSE: Final = 1.0
_STEADY_SECONDS: Final = 60.0
"""One that ran so long had not failed at its start: its pauses begin anew."""
_POLL: Final = 0.2


class SupervisorWatch(Periodic):
    """In a worker: sets `stop` once its supervisor is gone, and kills this process where it has not ended `patience` seconds later.

    A supervisor that was killed can stop nobody: without this its worker would go on beside the next one's, also when the pipeline is stopped.
    """

    def __init__(self, supervisor: int, stop: threading.Event, *, patience: float) -> None:
        super().__init__(name="supervisor-watch", pause=_POLL, at_once=True)
        self._supervisor = supervisor
        self._stop = stop
        self._patience = patience
        self._gone_since: float | None = None

    def work(self) -> None:
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
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the worker of `file` until SIGTERM or SIGINT, which it gets too; its exit code. Its words go to worker.log in its folder.

    Bounded by `until_end`, and by recovery.attempts starts in a row that came to nothing.
    """
    pipeline = read_pipeline(file, Configuration() if config is None else Configuration.load(config))
    stop = stop_at_signal()
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
    deaths, pause = 0, min(FIRST_PAUSE, longest)
    while True:
        begun = clock()
        job = Job(command, log_file=log_file, env=settings.environment())
        try:
            while job.running() and not stop.wait(_POLL):
                pass
        finally:
            code = job.stop(deadline=settings.stop_deadline)
        if stop.is_set() or code == 0:
            return 0 if stop.is_set() else code
        if clock() - begun >= _STEADY_SECONDS:
            deaths, pause = 0, min(FIRST_PAUSE, longest)
        deaths += 1
        sys.stderr.write(f"the worker of {pipeline.id} ended with {code}: {_last(job)}\n")
        if deaths > pipeline.recovery.attempts or stop.wait(jittered(pause)):
            return 0 if stop.is_set() else code
        pause = min(pause * 2, longest)


def _last(job: Job) -> str:
    lines = job.tail(1).strip()
    return lines or f"its log is {job.log_file}"
