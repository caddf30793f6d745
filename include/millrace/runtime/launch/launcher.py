"""The launcher starts a detached job once for each run id and reports its state to any process at any time.

    launcher = Launcher(settings)
    launcher.start("compaction.2026-11-21", find_job("compaction"), params={...})   # or attaches to the one that runs
    status = launcher.poll("compaction.2026-11-21")                       # running, finished, failed, stopped, lost
    launcher.stop("compaction.2026-11-21")                                # SIGTERM, then SIGKILL for what is left

A job runs in a session of its own and outlives its starter. Its state is in its folder (folder.py). A lock that the
kernel keeps shows that it lives: two concurrent starters start it once, and a killed job is noticed at once. A job that
ended without a result and without a stop request is *lost* (JOB_LOST; a retry may help). The first process that sees a
run end writes it to the history (history.py).
"""

from __future__ import annotations

import enum
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from millrace.base.data_folder import prepare_data_folder
from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import DeadlineExceeded, RunNotFound
from millrace.base.files import replace_json
from millrace.base.process import ProcessInfo, all_processes, find_process
from millrace.base.settings import Settings
from millrace.runtime.launch.command import JobSpec, command_of, environment_of, script_job
from millrace.runtime.launch.folder import RUN_FOLDER_VARIABLE, RUN_ID_PATTERN, RunFolder, operations_path, read_json
from millrace.runtime.launch.history import OPERATIONS, append_history, history_path
from millrace.runtime.processes import read_environment, send_signal
from millrace.runtime.spark.slots import JOBS_AHEAD

POLL_SECONDS: Final = 0.05
RETAINED_RUNS: Final = 200
LOG_BYTES: Final = 16 << 20
"""Size at which the log of a running job is rotated, so that a job of weeks does not fill the disk."""


class RunState(enum.StrEnum):
    """The state of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RunError:
    """The error of a failed run, as its job reported it."""

    code: str
    message: str
    retriable: bool

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run at the time of a poll."""

    run_id: str
    job: str
    attempt: int
    state: RunState
    pid: int | None
    started_at: float
    ended_at: float | None
    params: dict[str, Any]
    progress: dict[str, Any] | None
    report: dict[str, Any] | None
    error: RunError | None
    collected: bool
    log: Path

    @property
    def active(self) -> bool:
        return self.state is RunState.RUNNING

    @property
    def waiting(self) -> bool:
        """Whether the run waits for a Spark slot (millrace.runtime.spark.slots)."""
        return self.active and JOBS_AHEAD in ((self.progress or {}).get("figures") or {})

    def tail(self, lines: int = 30) -> str:
        """Return the last lines of the job's log."""
        return log_tail(self.log, lines=lines)


class Launcher:
    """Starts, polls and stops the jobs of one data folder.

    It has no state of its own; make one wherever it is needed.
    """

    def __init__(self, settings: Settings, *, jobs: Path | None = None) -> None:
        """`jobs`: the folder of the entry points, by default jobs/ of the checkout or of the wheel."""
        self._settings = settings
        self._jobs = jobs

    def start(
        self,
        run_id: str,
        job: JobSpec | str,
        *,
        params: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
    ) -> RunStatus:
        """Start `job` as `run_id`, or attach to a run that is active or has finished and was not collected.

        A string names a file of jobs/. A caller that died and retries thus gets the same run. A run that failed, was
        stopped or lost, or was collected starts again as the next attempt, after the rest of the last one is killed.
        Raises InvalidArgument for an unknown job or a bad run id, and DeadlineExceeded if the process does not come up.
        """
        chosen = job if isinstance(job, JobSpec) else script_job(job, folder=self._jobs)
        folder = RunFolder(self._settings, run_id)
        prepare_data_folder(self._settings.data_dir)
        end = Deadline.after(self._settings.start_deadline)
        while (held := folder.try_lock()) is None:
            running = self._look(folder)
            if running is not None and running.active:
                return running
            if not end.pause(
                POLL_SECONDS
            ):  # its starter has not written params.json yet, or the folder is being removed
                raise DeadlineExceeded(
                    f"{folder.path} is locked but describes no run: see which process holds its lock"
                )
        try:
            known = self._look(folder, alive=False)  # the lock is ours
            if known is not None and known.state is RunState.FINISHED and not known.collected:
                return known
            if known is not None:
                self._record(folder, known)
                _kill_session(folder)
            attempt = folder.begin_attempt()
            asked = {"run_id": run_id, "job": chosen.name, "attempt": attempt, "at": time.time()}
            replace_json(folder.params, {**asked, "params": dict(params or {}), "arguments": list(arguments)})
            command = command_of(chosen, folder, params=params, arguments=arguments)
            with folder.log.open("ab") as output:
                subprocess.run(
                    [sys.executable, "-m", "millrace.runtime.launch.exec", str(folder.identity), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment_of(self._settings, folder),
                    pass_fds=(held,),
                    check=True,
                )
        finally:
            os.close(held)  # the job has it now
        _await_identity(folder, deadline=self._settings.start_deadline)
        return self.poll(run_id)

    def attach(self, run_id: str) -> RunStatus:
        """Return the run `run_id`. Raises RunNotFound."""
        return self.poll(run_id)

    def poll(self, run_id: str) -> RunStatus:
        """Return the state of `run_id`, and record its end in the history once. Raises RunNotFound."""
        folder = RunFolder(self._settings, run_id)
        status = self._look(folder)
        if status is None:
            raise RunNotFound(
                f"no run {run_id!r} in {operations_path(self._settings)}: it was never started, or was removed"
            )
        if status.active:
            _bound_log(status.log)
        else:
            self._record(folder, status)
        return status

    def wait(self, run_id: str, *, deadline: float) -> RunStatus:
        """Wait until the run has ended. Raises DeadlineExceeded after `deadline` seconds, and RunNotFound."""
        end = Deadline.after(deadline)
        while (status := self.poll(run_id)).active:
            if not end.pause(POLL_SECONDS):
                raise DeadlineExceeded(f"run {run_id} still runs after {deadline:.0f} s; its log: {status.log}")
        return status

    def stop(self, run_id: str, *, deadline: float | None = None) -> RunStatus:
        """Stop a run and return its status: SIGTERM to the job, SIGKILL to its session after `deadline` seconds.

        A run that has ended is left alone. Raises RunNotFound.
        """
        folder = RunFolder(self._settings, run_id)
        status = self.poll(run_id)
        if not status.active:
            return status
        self.announce_stop(run_id)
        identity = read_json(folder.identity) or {}
        job = find_process(identity.get("pid", 0))
        if job is not None and job.start == identity.get("start"):
            send_signal(job, signal.SIGTERM)
        end = Deadline.after(self._settings.stop_deadline if deadline is None else deadline)
        poll_until(lambda: not folder.is_locked(), end, interval=POLL_SECONDS)
        _kill_session(folder)
        poll_until(lambda: not folder.is_locked(), Deadline.after(10.0), interval=POLL_SECONDS)
        return self.poll(run_id)

    def announce_stop(self, run_id: str) -> None:
        """Record a stop request without a signal. A run that ends afterwards counts as stopped, not as lost."""
        folder = RunFolder(self._settings, run_id)
        if not folder.stop.exists():
            replace_json(folder.stop, {"at": time.time(), "by": os.getpid()})

    def mark_collected(self, run_id: str) -> None:
        """Mark the result of a run as handed on. The next start of the same id runs the job again."""
        RunFolder(self._settings, run_id).collected.touch()

    def runs(self) -> list[RunStatus]:
        """Return all known runs, newest first."""
        found = [self._look(RunFolder(self._settings, name)) for name in self._names()]
        return sorted((each for each in found if each is not None), key=lambda each: each.started_at, reverse=True)

    def clean(self, *, older_than: float | None = None, keep: int = RETAINED_RUNS, dry_run: bool = False) -> list[str]:
        """Remove runs that ended over `older_than` seconds ago, and all but the newest `keep`; return their ids.

        `older_than` is the setting run_retention_days by default, of which 0 sets no limit.
        """
        now = time.time()
        if older_than is None:
            older_than = self._settings.run_retention_days * 86_400.0 or math.inf
        removed = []
        for place, status in enumerate(self.runs()):
            if status.active or (place < keep and now - (status.ended_at or now) < older_than):
                continue
            folder = RunFolder(self._settings, status.run_id)
            if dry_run:
                removed.append(status.run_id)
                continue
            self._record(folder, status)
            if folder.remove():
                removed.append(status.run_id)
        return removed

    def _names(self) -> Iterable[str]:
        try:
            found = operations_path(self._settings).iterdir()
            return [path.name for path in found if RUN_ID_PATTERN.fullmatch(path.name) and path.is_dir()]
        except FileNotFoundError:
            return []

    def _look(self, folder: RunFolder, *, alive: bool | None = None) -> RunStatus | None:
        # Read the lock first: a job that ends between the two reads wrote its result before it released the lock.
        alive = folder.is_locked() if alive is None else alive
        asked, identity = read_json(folder.params), read_json(folder.identity)
        if asked is None:
            return None
        result = read_json(folder.result)
        state, error = _judge(folder, alive=alive, result=result)
        ended = None
        if state is not RunState.RUNNING:
            ended = _written_at(folder.result) or _written_at(folder.stop) or _written_at(folder.log) or asked["at"]
        return RunStatus(
            run_id=folder.run_id,
            job=asked["job"],
            attempt=asked["attempt"],
            state=state,
            pid=identity["pid"] if identity is not None else None,
            started_at=asked["at"],
            ended_at=ended,
            params=asked["params"],
            progress=read_json(folder.progress),
            report=result.get("report") if result is not None and state is RunState.FINISHED else None,
            error=error,
            collected=folder.collected.exists(),
            log=folder.log,
        )

    def _record(self, folder: RunFolder, status: RunStatus) -> None:
        """Record the end of a run in the history; the exclusive file lets only the first process do so."""
        try:
            os.close(os.open(folder.recorded, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except (FileExistsError, FileNotFoundError):
            return
        line = {
            "run_id": status.run_id,
            "job": status.job,
            "attempt": status.attempt,
            "state": str(status.state),
            "started_at": status.started_at,
            "ended_at": status.ended_at,
            "params": status.params,
            "report": status.report,
            "error": None
            if status.error is None
            else {"code": status.error.code, "message": status.error.message, "retriable": status.error.retriable},
        }
        append_history(history_path(self._settings, OPERATIONS), line)


def processes_of(folder: Path, *, session: int) -> list[ProcessInfo]:
    """Return the processes of a job: those in its session whose environment names the folder of its run.

    A server that the job started for others (the log server) has its own session and is not included.
    """
    found = [each for each in all_processes().values() if each.session == session and each.pid != os.getpid()]
    return [each for each in found if (read_environment(each.pid) or {}).get(RUN_FOLDER_VARIABLE) == str(folder)]


def log_tail(path: Path, *, lines: int = 30, max_bytes: int = 64 << 10) -> str:
    """Return the last lines of a log of any size."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def _judge(folder: RunFolder, *, alive: bool, result: dict[str, Any] | None) -> tuple[RunState, RunError | None]:
    if alive:
        return RunState.RUNNING, None
    if result is not None and result.get("ok"):
        return (RunState.STOPPED if result.get("stopped") else RunState.FINISHED), None
    if result is not None:
        error = result.get("error") or {}
        code, message = str(error.get("code", "UNKNOWN")), str(error.get("message", "the job gave no reason"))
        return RunState.FAILED, RunError(code, message, bool(error.get("retriable", True)))
    if folder.stop.exists():
        return RunState.STOPPED, None
    return RunState.LOST, RunError("JOB_LOST", _lost_words(folder), True)


def _lost_words(folder: RunFolder) -> str:
    """Describe a process that ended without a result: its last progress and its last lines."""
    was_at = str((read_json(folder.progress) or {}).get("words") or "")
    during = f' while it reported "{was_at}"' if was_at else ""
    last = log_tail(folder.log, lines=5)
    if not last:
        return (
            f"the process of the run was killed{during or ' before it wrote a line'};"
            " the kernel's log says whether memory ran out"
        )
    return f"the process of the run ended without a result{during} (log: {folder.log}): {last}"


def _await_identity(folder: RunFolder, *, deadline: float) -> None:
    """Wait until the job has recorded its identity or has ended."""
    end = Deadline.after(deadline)
    while not folder.identity.exists() and folder.is_locked():
        if not end.pause(0.005):
            raise DeadlineExceeded(
                f"the process of {folder.run_id} did not come up in {deadline:.0f} s; see {folder.log}"
            )


def _kill_session(folder: RunFolder) -> None:
    """Kill what a job left: a JVM whose driver was killed, Python workers."""
    identity = read_json(folder.identity)
    if identity is not None:
        for each in processes_of(folder.path, session=identity["pid"]):
            send_signal(each, signal.SIGKILL)


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _bound_log(path: Path) -> None:
    """Rotate a running job's log by copy and truncate. The job opened it for append, so it continues at the new end."""
    try:
        if path.stat().st_size < LOG_BYTES:
            return
        with path.open("r+b") as log:
            path.with_name(f"{path.name}.1").write_bytes(log.read())
            log.truncate(0)
    except FileNotFoundError:
        return
