"""The monitor of a streaming job: its state by its heartbeat, and its faults.

:class:`WatchedJob` is the job for a supervisor (millrace.runtime.supervisor).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.runtime.launch.launcher import Launcher, RunError, RunStatus
    from millrace.runtime.supervisor import Fault, RestartBackoff

LONGEST_PAUSE: Final = 300.0
FIRST_PAUSE: Final = 2.0
STABLE_SECONDS: Final = 300.0
"""Seconds without a fault after which a job's earlier failures are forgotten."""


def restart_backoff(settings: Settings, run_id: str) -> RestartBackoff:
    """Return the pauses before restarts of one run id, stored in a file, so that a new task continues them."""
    from millrace.runtime.supervisor import RestartBackoff

    path = settings.run_path / "history" / f"{run_id}.restarts.json"
    return RestartBackoff(FIRST_PAUSE, LONGEST_PAUSE, steady=STABLE_SECONDS, path=path)


@dataclass(frozen=True, slots=True)
class JobFault:
    """Why a job must be restarted."""

    code: str
    message: str
    retriable: bool = True

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class StreamingJobMonitor:
    """Repeatedly checks one streaming job."""

    def __init__(
        self,
        settings: Settings,
        *,
        app_name: str,
        backoff: RestartBackoff,
        stale_after: float,
        stuck_after: float,
        say_every: float,
        supervised: bool = False,
    ) -> None:
        """With `supervised`, the run is a flow's supervisor, which handles hangs of the job itself."""
        from millrace.runtime.heartbeat import HeartbeatWatch

        self.backoff = backoff
        self._run = settings.run_path
        self._heartbeat = HeartbeatWatch(settings, app_name, stale_after=stale_after, stuck_after=stuck_after)
        self._supervised = supervised
        self.stop_seconds = settings.stop_deadline
        self._stale_after = stale_after
        self._say_every = say_every
        self._said = 0.0
        self.restarts = 0
        """Restarts of the job after a fault."""
        self._last: dict[str, Any] = {}

    def find_fault(self, status: RunStatus) -> JobFault | None:
        """Return the job's fault, or None."""
        if not status.active:
            return (
                _ended(status.error)
                if status.error is not None
                else JobFault("JOB_STOPPED", f"the job was {status.state}")
            )
        hang = None if self._supervised else self._heartbeat.hang(status.pid, status.started_at)
        if hang is not None:
            return JobFault(*hang)
        beat = self._beat(status)
        if beat:
            self._last = beat["queries"]
            if time.time() - status.started_at > STABLE_SECONDS:
                self.backoff.reset()
        return None

    def foreign_process(self) -> int | None:
        """Return the process id of a live job that the launcher did not start (`millrace jobs run`), or None."""
        from millrace.base.file_lock import is_report_live

        beat = None if self._supervised else self._heartbeat.newest()  # a flow's supervisor handles foreign jobs
        if beat is None or time.time() - beat["at"] > self._stale_after:
            return None
        return int(beat["pid"]) if is_report_live(self._run, beat["pid"], beat["at"]) else None

    def progress_line(self, status: RunStatus) -> str | None:
        """Return the job's state for the task's log; None if it was logged recently."""
        now = time.monotonic()
        if now - self._said < self._say_every:
            return None
        self._said = now
        beat = self._beat(status)
        if not beat:
            return f"starting, for {time.time() - status.started_at:.0f} s (process {status.pid})"
        return "; ".join(f"{name}: {_query(each)}" for name, each in beat["queries"].items())

    def sleep(self, seconds: float) -> None:
        """Sleep until the next check."""
        time.sleep(seconds)

    def summary(self) -> dict[str, Any]:
        """Return the result of the task: restarts and the last figures of the queries."""
        return {"restarts": self.restarts, "queries": self._last}

    def _beat(self, status: RunStatus) -> dict[str, Any] | None:
        """Return the heartbeat of exactly this process, or of the one that it supervises."""
        if not self._supervised:
            return self._heartbeat.beat(status.pid, status.started_at)
        beat = self._heartbeat.newest()
        return beat if beat is not None and beat["at"] >= status.started_at else None


class WatchedJob:
    """The job of one run id, which its monitor checks and the launcher stops."""

    def __init__(
        self, launcher: Launcher, run_id: str, monitor: StreamingJobMonitor, log: logging.Logger | Any
    ) -> None:
        self._launcher, self._run_id, self._monitor, self._log = launcher, run_id, monitor, log
        self.last: JobFault | None = None
        """The fault that ended the watch."""

    def fault(self) -> Fault | None:
        """Return the job's fault, or None, and log its state."""
        from millrace.runtime.supervisor import Fault

        status = self._launcher.poll(self._run_id)
        self.last = self._monitor.find_fault(status)
        if self.last is not None:
            self._log.error("%s\nthe job's last lines:\n%s", self.last, status.tail())
            return Fault(str(self.last), restart=self.last.retriable)
        words = self._monitor.progress_line(status)
        if words is not None:
            self._log.info("%s", words)
        return None

    def stop(self, *, deadline: float) -> None:
        """Stop the job if it still runs, as one that hangs does."""
        if self._launcher.poll(self._run_id).active:
            self._launcher.stop(self._run_id, deadline=deadline)


def _ended(error: RunError) -> JobFault:
    return JobFault(error.code, error.message, error.retriable)


def _query(query: dict[str, Any]) -> str:
    words = f"{query['rows']:,} rows, {query['rows_per_second']:,.0f} rows/s"
    if query["last_commit"]:
        words += f", last commit {time.time() - query['last_commit']:.0f} s ago"
    if query["lag_seconds"] is not None:
        words += f", lag {query['lag_seconds']:.1f} s"
    if query["busy_seconds"] > 5:
        words += f", in this micro-batch for {query['busy_seconds']:.0f} s"
    if query["parked"]:
        words += f", PARKED: {', '.join(query['parked'])}"
    return words
