"""The monitor of a streaming job: how it is by its heartbeat, and when that is a fault.

:class:`WatchedJob` is the job as a supervisor sees it (millrace.runtime.supervisor).
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
"""A job that has run this long without a fault has its failures forgiven."""


def restart_backoff(settings: Settings, run_id: str) -> RestartBackoff:
    """Return the pauses before restarts of one run id, kept in a file, so that a new task continues them."""
    from millrace.runtime.supervisor import RestartBackoff

    path = settings.run_path / "history" / f"{run_id}.restarts.json"
    return RestartBackoff(FIRST_PAUSE, LONGEST_PAUSE, steady=STABLE_SECONDS, path=path)


@dataclass(frozen=True, slots=True)
class JobFault:
    """Why a job is to be started again."""

    code: str
    message: str
    retriable: bool = True

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class StreamingJobMonitor:
    """Looks at one streaming job again and again."""

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
        """`supervised`: the run is a flow's supervisor, which sees to hangs of the job itself."""
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
        """How often the job was started again after a fault."""
        self._last: dict[str, Any] = {}

    def find_fault(self, status: RunStatus) -> JobFault | None:
        """What is wrong with the job, if anything."""
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
        """The process id of a job that beats now and that the launcher did not start (`millrace jobs run`, say)."""
        from millrace.base.file_lock import is_report_live

        beat = None if self._supervised else self._heartbeat.newest()  # a flow's supervisor sees to foreign ones
        if beat is None or time.time() - beat["at"] > self._stale_after:
            return None
        return int(beat["pid"]) if is_report_live(self._run, beat["pid"], beat["at"]) else None

    def progress_line(self, status: RunStatus) -> str | None:
        """How the job is, for the task's log; None where it was said not long ago."""
        now = time.monotonic()
        if now - self._said < self._say_every:
            return None
        self._said = now
        beat = self._beat(status)
        if not beat:
            return f"starting, for {time.time() - status.started_at:.0f} s (process {status.pid})"
        return "; ".join(f"{name}: {_query(each)}" for name, each in beat["queries"].items())

    def sleep(self, seconds: float) -> None:
        """Sleep between two looks: nothing can wake us but the next look itself."""
        time.sleep(seconds)

    def summary(self) -> dict[str, Any]:
        """What the task returns."""
        return {"restarts": self.restarts, "queries": self._last}

    def _beat(self, status: RunStatus) -> dict[str, Any] | None:
        """The heartbeat of this very process, or of the one that it supervises."""
        if not self._supervised:
            return self._heartbeat.beat(status.pid, status.started_at)
        beat = self._heartbeat.newest()
        return beat if beat is not None and beat["at"] >= status.started_at else None


class WatchedJob:
    """The job of one run id: its monitor says how it is, the launcher stops it."""

    def __init__(
        self, launcher: Launcher, run_id: str, monitor: StreamingJobMonitor, log: logging.Logger | Any
    ) -> None:
        self._launcher, self._run_id, self._monitor, self._log = launcher, run_id, monitor, log
        self.last: JobFault | None = None
        """The fault that ended the watch."""

    def fault(self) -> Fault | None:
        """Return the job's fault, if any, and log how it is."""
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
        """Stop the job if it still runs: one that hangs does."""
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
