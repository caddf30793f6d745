"""What the watcher of a streaming job knows: how it is from its heartbeat, when that is a fault, how long to pause
after one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.runtime.launch.launcher import RunError, RunStatus

LONGEST_PAUSE: Final = 300.0
FIRST_PAUSE: Final = 2.0
STABLE_SECONDS: Final = 300.0
"""A job that has run this long without a fault has its failures forgiven."""


class RestartBackoff:
    """The pauses before restarts of one run id: doubling, and kept in a file, so that a new task goes on with them."""

    def __init__(self, settings: Settings, run_id: str) -> None:
        self._path = settings.run_path / "history" / f"{run_id}.restarts.json"

    def remaining_pause(self) -> float:
        """Seconds that are left of the pause after the last failure."""
        kept = self._kept()
        if not kept["failures"]:
            return 0.0
        whole = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (kept["failures"] - 1))
        return float(max(0.0, min(whole, kept["at"] + whole - time.time())))

    def record_failure(self, why: str) -> None:
        """The job failed now; one failure more, unless the last one is long ago."""
        from millrace.base.files import replace_json

        kept = self._kept()
        forgiven = time.time() - kept["at"] > STABLE_SECONDS + LONGEST_PAUSE
        failures = 1 if forgiven else kept["failures"] + 1
        replace_json(self._path, {"failures": failures, "at": time.time(), "why": why[:500]})

    def reset(self) -> None:
        """The job has run long enough: the next failure is a first one."""
        self._path.unlink(missing_ok=True)

    def _kept(self) -> dict[str, Any]:
        from millrace.runtime.launch.folder import read_json

        kept = read_json(self._path) or {}
        return {"failures": int(kept.get("failures", 0)), "at": float(kept.get("at", 0.0))}


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
    ) -> None:
        self.backoff = backoff
        self._run = settings.run_path
        self._heartbeat = settings.run_path / f"{app_name}.heartbeat.json"
        self._start_seconds = settings.start_deadline
        self._stale_after = stale_after
        self._stuck_after = stuck_after
        self._say_every = say_every
        self._said = 0.0
        self._restarts = 0
        self._last: dict[str, Any] = {}

    def find_fault(self, status: RunStatus) -> JobFault | None:
        """What is wrong with the job, if anything."""
        if not status.active:
            return (
                _ended(status.error)
                if status.error is not None
                else JobFault("JOB_STOPPED", f"the job was {status.state}")
            )
        beat = self._beat(status)
        age = time.time() - (beat["at"] if beat else status.started_at)
        allowed = self._stale_after + (0.0 if beat else self._start_seconds)
        if age > allowed:
            return JobFault(
                "HEARTBEAT_STALE", f"no heartbeat for {age:.0f} s (process {status.pid}): it hangs, or its JVM does"
            )
        for name, query in (beat or {}).get("queries", {}).items():
            if query["busy_seconds"] > self._stuck_after:
                return JobFault("QUERY_STUCK", f"{name} is in one micro-batch for {query['busy_seconds']:.0f} s")
        if beat:
            self._last = beat["queries"]
            if time.time() - status.started_at > STABLE_SECONDS:
                self.backoff.reset()
        return None

    def record_restart(self) -> None:
        """It runs again, after a fault: one that was stopped, and stays so, was not restarted."""
        self._restarts += 1

    def foreign_process(self) -> int | None:
        """The process id of a job that beats now and that the launcher did not start (`millrace jobs run`, say)."""
        from millrace.base.file_lock import is_report_live
        from millrace.runtime.launch.folder import read_json

        beat = read_json(self._heartbeat)
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
        return {"restarts": self._restarts, "queries": self._last}

    def _beat(self, status: RunStatus) -> dict[str, Any] | None:
        """The heartbeat of this very process."""
        from millrace.runtime.launch.folder import read_json

        beat = read_json(self._heartbeat)
        return beat if beat is not None and beat.get("pid") == status.pid and beat["at"] >= status.started_at else None


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
