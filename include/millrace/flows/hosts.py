"""The processes of a flow on each host, and their health checks (:class:`millrace.flows.supervisor.Host`).

- :class:`WorkerHost`: worker processes of a flow. Each touches a pulse file once a second.
- :class:`TaskHost`: a flow in the tasks of a Spark query. Its driver writes a heartbeat.
- :class:`StreamHost`: the query of a stream, or of a group of streams in one driver, which writes a heartbeat.

Imports no Spark.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from millrace.base.errors import MetaUnavailable, MillraceError, PipelineBusy, StreamBusy
from millrace.base.process import all_processes
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration
from millrace.flows.declare.discovery import declared_flow, declared_flows
from millrace.flows.declare.file import flow_of_file
from millrace.flows.declare.keys import Keys
from millrace.flows.range_host import observed
from millrace.flows.range_host.in_hand import late
from millrace.flows.range_host.status import SILENT_SECONDS, WORKERS, flow_folder, pulse_path, worker_folder
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.spark_host import status as streams
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.status import supervised_folder
from millrace.flows.supervisor import Host, Restarts
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.heartbeat import HeartbeatWatch
from millrace.runtime.launch.command import jobs_folder
from millrace.runtime.launch.folder import RUN_FOLDER_VARIABLE
from millrace.runtime.processes import with_descendants
from millrace.runtime.supervisor import Fault

START_SECONDS: Final = 120.0
"""Longest time from a worker's start to its first pulse."""
_PULSE_SECONDS: Final = 1.0
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 300.0
_STEADY_SECONDS: Final = 300.0
_BOUNDED_ATTEMPTS: Final = 3
"""Failures in a row of a bounded driver before its run fails, so that its starter learns of them."""


class Pulse:
    """Measures, in the supervisor, how long a worker has been silent.

    Time while this process was suspended is excluded.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = path, clock
        self._seen, self._at, self._silent, self.spoke = self._look(), clock(), 0.0, False

    def silent(self) -> float:
        """Return the seconds since the last pulse or, before the first, since construction. Call it regularly."""
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


class _RangeHost:
    """A flow that a file declares."""

    def __init__(self, settings: Settings, file: Path, *, config: Path | None) -> None:
        """Raises InvalidSettings, PipelineInvalid."""
        self._settings, self._file, self._config = settings, file, config
        configuration = Configuration() if config is None else Configuration.load(config)
        self._flow = flow_of_file(file, configuration, keys=Keys(settings.data_dir))
        self.name, self.run_id = self._flow.name, observed.run_id(self._flow.name)
        observed.note_flow(settings, self._flow, file=file, config=config)

    def wanted(self) -> tuple[str, ...]:
        """Return the flow, also while it is paused: its processes then run and read nothing."""
        return (self.name,)

    def busy(self, words: str) -> MillraceError:
        return PipelineBusy(words)

    def ended(self) -> None:
        """Do nothing: the processes leave nothing."""

    def _with_config(self) -> list[str]:
        return [] if self._config is None else ["--config", str(self._config.absolute())]


class WorkerHost(_RangeHost):
    """Worker processes: as many as the declaration's ``resources.workers``."""

    def __init__(
        self,
        settings: Settings,
        file: Path,
        *,
        config: Path | None = None,
        until_end: bool = False,
        silent_seconds: float = SILENT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Workers that write no pulse for `silent_seconds` are killed. Raises as `_RangeHost`."""
        super().__init__(settings, file, config=config)
        self.count, self.bounded = self._flow.resources.workers, until_end or self._flow.scheduled
        self._silent_seconds, self._clock = silent_seconds, clock
        recovery = self._flow.recovery
        longest = 60 * recovery.interval_minutes
        self.restarts = Restarts(min(_FIRST_PAUSE, longest), longest, attempts=recovery.attempts)
        for each in (flow_folder(settings, self.name) / WORKERS).glob("*"):
            if each.name.isdecimal() and int(each.name) >= self.count:  # other workers have its tasks now
                shutil.rmtree(each, ignore_errors=True)

    def command(self, number: int, result: Path) -> list[str]:
        """Return the command of worker `number`. `result` receives an error that a restart cannot fix."""
        command = [sys.executable, "-m", "millrace.flows.range_host", str(self._file.absolute())]
        command += ["--supervisor", str(os.getpid()), "--result", str(result), *self._with_config()]
        command += ["--until-end"] if self.bounded else []
        return [*command, "--worker", str(number)] if number else command

    def log_file(self, number: int) -> Path:
        return worker_folder(self._settings, self.name, number) / "worker.log"

    def ended(self) -> None:
        """Make the workers leave their consumer group, in which they retain their partitions across restarts."""
        source = self._flow.source
        if self._flow.divided and isinstance(source, KafkaSource) and not self.bounded:
            from millrace.flows.sources.division import instance_name
            from millrace.flows.sources.kafka.membership import leave

            names = [instance_name(self._settings, each) for each in range(self.count)]
            leave(source, self._flow.consumer_group, names)

    def watch(self, number: int, job: ChildProcess) -> Callable[[], Fault | None]:
        """Return a check that the worker writes its pulse and is not blocked by a record."""
        pulse = Pulse(pulse_path(self._settings, self.name, number), self._clock)

        def check() -> Fault | None:
            quiet = pulse.silent()
            silent = quiet > (self._silent_seconds if pulse.spoke else max(self._silent_seconds, START_SECONDS))
            held = late(self._settings, self.name, (job.pid,))
            if not silent and held is None:
                return None
            job.kill()  # a suspended process, or one whose threads cannot run, does not handle SIGTERM
            if held is not None:
                # A document's fault is not a failure at the start: the next process puts the document aside.
                return Fault(str(held), first=True)
            return Fault(f"it was silent for {quiet:.0f} s (process {job.pid}) and was ended")

        return check


class TaskHost(_RangeHost):
    """One Spark driver, ``jobs/pipeline.py``."""

    count = 1

    def __init__(
        self, settings: Settings, file: Path, *, config: Path | None = None, progress: Path | None = None
    ) -> None:
        """Raises as `_RangeHost`."""
        super().__init__(settings, file, config=config)
        self.bounded = self._flow.scheduled
        self.restarts = _restarts(bounded=self.bounded)
        self._job = _SparkJob(settings, self.run_id, f"millrace-pipeline-{self.name}", progress)

    def command(self, number: int, result: Path) -> list[str]:
        """Return the driver's command."""
        more = ["--available-now"] if self.bounded else []
        return self._job.command(
            "pipeline", "--declaration", str(self._file), *self._with_config(), *more, result=result
        )

    def log_file(self, number: int) -> Path:
        return self._job.log_file

    def watch(self, number: int, job: ChildProcess) -> Callable[[], Fault | None]:
        """Return a check of the driver's heartbeat.

        It kills a task's process that a record blocks; Spark repeats the task.
        """
        beats = self._job.watch(job)

        def check() -> Fault | None:
            everything = all_processes() if late(self._settings, self.name) is not None else {}
            held = late(self._settings, self.name, with_descendants((job.pid,), everything))
            if held is not None:
                sys.stderr.write(f"{held}\n")
                os.kill(held.pid, signal.SIGKILL)
            return beats()

        return check


class StreamHost:
    """One Spark driver, ``jobs/stream.py``, for those streams of a group that are not paused."""

    count = 1

    def __init__(self, settings: Settings, job: str, *, progress: Path | None = None) -> None:
        """`job` is the name of a stream or of a group. Raises InvalidStream, StreamNotFound."""
        self.name, self.run_id = job, streams.run_id(job)
        group = [each for each in declared_flows(settings, host="spark").values() if each.job == job]
        mine = group or [declared_flow(settings, job, host="spark")]
        self._states = [Incarnations(settings, each.name) for each in mine]
        self._wanted: tuple[str, ...] | None = tuple(each.name for each in mine)
        self.bounded = any(each.scheduled for each in mine)
        self.restarts = _restarts(bounded=self.bounded)
        self._job = _SparkJob(settings, self.run_id, streams.app_name(job), progress)

    def wanted(self) -> tuple[str, ...] | None:
        """Return the streams that are not paused, or None. A driver is restarted when they change.

        While the meta store is unavailable, return the last known ones; the driver's lease decides whether it may run.
        """
        with suppress(MetaUnavailable):
            self._wanted = tuple(each.name for each in self._states if not each.state.paused) or None
        return self._wanted

    def command(self, number: int, result: Path) -> list[str]:
        """Return the driver's command."""
        return self._job.command("stream", self.name, *(["--available-now"] if self.bounded else []), result=result)

    def log_file(self, number: int) -> Path:
        return self._job.log_file

    def watch(self, number: int, job: ChildProcess) -> Callable[[], Fault | None]:
        """Return a check of the driver's heartbeat."""
        return self._job.watch(job)

    def busy(self, words: str) -> MillraceError:
        return StreamBusy(words)

    def ended(self) -> None:
        """Do nothing: the driver leaves nothing."""


def _restarts(*, bounded: bool) -> Restarts:
    attempts = _BOUNDED_ATTEMPTS if bounded else None
    return Restarts(_FIRST_PAUSE, _LONGEST_PAUSE, steady=_STEADY_SECONDS, attempts=attempts)


class _SparkJob:
    """A driver of jobs/, checked by its heartbeat."""

    def __init__(self, settings: Settings, run_id: str, app_name: str, progress: Path | None) -> None:
        self._settings, self._app_name, self._progress = settings, app_name, progress
        run = os.environ.get(RUN_FOLDER_VARIABLE)  # the launcher's run folder, where readers expect the log
        self.log_file = (supervised_folder(settings, run_id) if run is None else Path(run)) / "log"

    def command(self, script: str, *arguments: str, result: Path) -> list[str]:
        command = [sys.executable, str(jobs_folder() / f"{script}.py"), *arguments]
        command += ["--supervisor", str(os.getpid()), "--result", str(result)]
        return command if self._progress is None else [*command, "--progress", str(self._progress)]

    def watch(self, job: ChildProcess) -> Callable[[], Fault | None]:
        beats, began = HeartbeatWatch(self._settings, self._app_name), time.time()

        def check() -> Fault | None:
            hang = beats.hang(job.pid, began)
            return None if hang is None else Fault(": ".join(hang))

        return check


def host_of(settings: Settings, host: str, flow: str, *, config: Path | None, progress: Path | None) -> Host:
    """Return the host of the command line: ``workers FILE``, ``tasks FILE`` or ``streams NAME``."""
    if host == "streams":
        return StreamHost(settings, flow, progress=progress)
    if host == "tasks":
        return TaskHost(settings, Path(flow), config=config, progress=progress)
    return WorkerHost(settings, Path(flow), config=config)
