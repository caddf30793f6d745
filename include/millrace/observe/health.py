"""Health: what is wrong, and how to fix it. CLI, API, pages and metrics all read their findings from here.

Each finding is one current problem according to the deployment's own data: parked PChannels, jobs, lags, DDL that does
not finish, quality blocks, and failed maintenance runs. The overall state follows from the findings.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from millrace.access.token_file import TokenFile
from millrace.base.errors import TokenFileRefused
from millrace.base.settings import Settings
from millrace.node.publish.status import publish_failures
from millrace.observe.broadcasts import unresolved_broadcasts
from millrace.observe.maintenance import running_operations
from millrace.observe.models import HealthFinding, HealthKind, HealthState, JobView, PChannelView
from millrace.operations.registry import find_operation
from millrace.rpc.wire import ClockView
from millrace.runtime.launch import history as launch_history
from millrace.tables.quality_state import failed_critical_expectations

LAGGING_SECONDS: Final = 15.0
"""Lag behind its log from which on a WAL counts as lagging."""
FLUSH_LAGGING_SECONDS: Final = 60.0
"""Lag behind the WAL, beyond ``flush_interval``, from which on tables count as lagging. Reads include the WAL's tail
meanwhile."""
STALLED_SECONDS: Final = 240.0
"""Time without progress, beyond ``flush_interval`` and with rows to flush, after which a flusher counts as stalled."""
CLOCK_AHEAD_SECONDS: Final = 60.0
"""A clock is or was wrong if log time is this far ahead of the wall clock."""
DDL_STUCK_SECONDS: Final = 60.0
"""DDL usually takes less than a second. After this time it will not finish by itself."""
MAINTENANCE: Final = ("backup", "checkpoint", "compaction", "housekeeping", "move", "quality", "recovery")
"""Scheduled operations whose newest run affects health."""
RETRY_SECONDS: Final = 1800.0
"""Time after a failure within which a retry must begin. Later, the failure counts."""
HISTORY_LINES: Final = 500
"""Lines of the operations' history that are searched for the newest run of each."""

_FAILED: Final = ("failed", "lost")
"""States of a run that count as a failure."""
_NOT_WELL: Final = {
    "checkpoint": ("ok", "a checkpoint or a base could not be verified"),
    "recovery": ("healthy", "findings remain"),
}
"""For each job, the field of its report that is False if the result is bad, and its meaning."""

REMEDIES: Final[dict[HealthKind, str]] = {
    "parked": "fix the cause, or `millrace log tombstone`, then `millrace unpark`: docs/operating.md#parked-pchannels",
    "job_failed": "`millrace jobs log`, and recovery in mode diagnose: docs/operating.md#recovery",
    "job_stopped": "the DAG `streaming` (or `millrace jobs run --with-flusher`): docs/operating.md#processes",
    "log_stopped": "the next producer starts it, the DAG `streaming` too: docs/operating.md#processes",
    "lagging": "the job's log and current work: docs/operating.md#status",
    "tokens_refused": "`millrace tokens list` shows why all access is refused, and what to do: docs/access.md#tokens",
    "clock": "`millrace log clock`, then the host's clock: docs/operating.md#when-the-clock-is-wrong",
    "flusher_stalled": "the flusher's log; recovery in mode diagnose: docs/operating.md#recovery",
    "publish_failed": "the flusher's log, then `millrace collections publish NAME`: docs/published-tables.md#failures",
    "ddl_stuck": "`millrace broadcasts --open` shows what it waits for; `millrace collections flush NAME` retries it: "
    "docs/operating.md#health",
    "quality_blocks": "repair the data and run quality again, or release it (DAG `quality_release`): docs/quality.md",
    "maintenance_failed": "the run's log (Maintenance, or `millrace jobs list`), then run it again: "
    "docs/operating.md#health",
    "maintenance_retry": "nothing to do unless the retry fails too: docs/operating.md#health",
}
"""Remedies, by kind of finding."""

_CRITICAL: Final[frozenset[HealthKind]] = frozenset(
    {"parked", "job_failed", "job_stopped", "flusher_stalled", "ddl_stuck", "quality_blocks"}
)
_STATES: Final[dict[HealthKind, HealthState]] = {
    "parked": "parked",
    "job_stopped": "stopped",
    "job_failed": "degraded",
    "flusher_stalled": "degraded",
    "ddl_stuck": "degraded",
    "quality_blocks": "degraded",
    "maintenance_failed": "degraded",
    "publish_failed": "degraded",
    "tokens_refused": "degraded",
    "clock": "degraded",
    "lagging": "lagging",
    "log_stopped": "stopped",
    "maintenance_retry": "healthy",
}
"""The overall state that a finding causes. Of several findings, the first kind in this order decides."""


@dataclass(frozen=True, slots=True)
class HealthInputs:
    """Data of the deployment, other than its tables, that affects its health."""

    running_ddl: Sequence[tuple[str, str, float]] = ()
    """Collection, kind and start (Unix seconds, 0.0: unknown) of each DDL operation under way."""
    blocks: Sequence[str] = ()
    newest_runs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The newest line of the operations' history by job."""
    active_jobs: Set[str] = frozenset()
    """Jobs with a run that is active or queued."""
    tokens_refused: str = ""
    """Why the token file grants no access. Empty if it is valid."""
    flush_interval: float = 60.0
    """Seconds that rows may wait for the flusher."""
    publish_failures: Mapping[int, str] = field(default_factory=dict)
    """Reason that each collection's last publish failed, by collection id."""


def read_health_inputs(settings: Settings) -> HealthInputs:
    """Read the current data. Creates nothing."""
    ddl = [(each.collection, each.kind, each.at) for each in unresolved_broadcasts(settings) if each.open]
    newest: dict[str, Mapping[str, Any]] = {}
    for line in launch_history.read_history(
        launch_history.history_path(settings, launch_history.OPERATIONS), limit=HISTORY_LINES
    ):
        if line.get("state") != "stopped":  # stopped by a person or with the system, which says nothing about the job
            newest.setdefault(str(line.get("job")), line)
    failed = any(line.get("state") in _FAILED for line in newest.values())
    active = frozenset(each.job for each in running_operations(settings)) if failed else frozenset()
    refused = ""
    try:
        TokenFile(settings.data_dir).tokens()
    except TokenFileRefused as error:
        refused = str(error)
    blocks = failed_critical_expectations(settings)
    failures = publish_failures(settings) if settings.publish else {}
    return HealthInputs(ddl, blocks, newest, active, refused, settings.flush_interval, failures)


def findings(
    jobs: Sequence[JobView],
    channels: Sequence[PChannelView],
    inputs: HealthInputs,
    *,
    log_server: bool,
    clock: ClockView | None = None,
    now: float | None = None,
) -> list[HealthFinding]:
    """Return all findings, the worst first."""
    now = time.time() if now is None else now
    found = [
        *_of_channels(channels, waits=inputs.flush_interval),
        *_of_jobs(jobs, channels, waits=inputs.flush_interval, now=now),
        *_of_ddl(inputs, now=now),
        *_of_clocks(clock, channels, now=now),
        *_of_quality(inputs),
        *_of_publishing(inputs),
        *_of_runs(inputs, now=now),
    ]
    if inputs.tokens_refused:
        found.append(make_finding("tokens_refused", "tokens", inputs.tokens_refused))
    if channels and not log_server:
        found.append(make_finding("log_stopped", "log server", "the log's server does not run"))
    order = list(_STATES)
    return sorted(found, key=lambda each: order.index(each.kind))


def overall_state(found: Sequence[HealthFinding], *, empty: bool) -> tuple[HealthState, str]:
    """Return the overall state, and the reason in one sentence."""
    if empty and not found:
        return "empty", "Nothing was written yet: there are no PChannels."
    if not found:
        return "healthy", "Streaming node and flusher run, and nothing is behind."
    worst = found[0]
    state = _STATES[worst.kind]
    if state == "healthy":
        retried = _listed(sorted({each.subject for each in found}))
        return (
            state,
            f"Streaming node and flusher run, and nothing is behind. {retried} failed and will be tried again.",
        )
    subjects = _listed(sorted({each.subject for each in found if each.kind == worst.kind}))
    if state == "parked":
        return state, f"{subjects} cannot continue; an operator must fix the cause."
    if worst.kind == "job_stopped":
        return state, f"{subjects} {'does' if ' and ' not in subjects else 'do'} not run."
    if state == "lagging":
        return state, f"{subjects} is behind."
    if worst.kind == "log_stopped":
        return state, "The log's server does not run; the next producer starts it."
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return state, f"{worst.subject}: {worst.words}{more}."


def make_finding(kind: HealthKind, subject: str, words: str, *, run: str = "") -> HealthFinding:
    """Return a finding with its severity and remedy. `run` is the id of the run concerned."""
    severity: Literal["critical", "warning"] = "critical" if kind in _CRITICAL else "warning"
    return HealthFinding(severity=severity, kind=kind, subject=subject, words=words, where=REMEDIES[kind], run=run)


def _of_channels(channels: Iterable[PChannelView], *, waits: float) -> Iterator[HealthFinding]:
    for each in channels:
        if each.parked:
            words = each.parked
            yield make_finding("parked", each.name, words if words.startswith(each.name) else f"it is parked: {words}")
        if (each.lag_seconds or 0) > LAGGING_SECONDS:
            yield make_finding("lagging", each.name, f"the WAL is {each.lag_seconds:.0f} s behind the log")
        if each.flush_lag_seconds > waits + FLUSH_LAGGING_SECONDS:
            yield make_finding("lagging", each.name, f"the tables are {each.flush_lag_seconds:.0f} s behind the WAL")


def _of_jobs(
    jobs: Sequence[JobView], channels: Sequence[PChannelView], *, waits: float, now: float
) -> Iterator[HealthFinding]:
    for job in jobs:
        for name, words in job.failures.items():
            yield make_finding("job_failed", job.name, f"{name}: {words}")
        if channels and job.state != "running":
            yield make_finding("job_stopped", job.name, "it does not run")
    flusher = next((job for job in jobs if job.name == "flusher"), None)
    if flusher is None or flusher.state != "running" or flusher.at is None:
        return
    quiet, limit = now - flusher.at, waits + STALLED_SECONDS
    # The waiting rows must be old, not only the flusher's last report: an idle flusher reports nothing for hours.
    waiting = [
        each.name
        for each in channels
        if int(each.time_tick) > int(each.flushed_tick) and each.time is not None and now - each.time > limit
    ]
    if waiting and quiet > limit:
        yield make_finding(
            "flusher_stalled",
            "flusher",
            f"rows of {_listed(waiting)} wait in the WAL, and the flusher made no progress for {quiet:.0f} s",
        )


def _of_ddl(inputs: HealthInputs, *, now: float) -> Iterator[HealthFinding]:
    for collection, kind, begun in inputs.running_ddl:
        if now - begun > DDL_STUCK_SECONDS:
            since = f"for {now - begun:.0f} s" if begun else "since an unknown time"
            yield make_finding(
                "ddl_stuck", collection, f"{kind} is under way {since}: no other change of the collection can begin"
            )


def _of_clocks(clock: ClockView | None, channels: Iterable[PChannelView], *, now: float) -> Iterator[HealthFinding]:
    if clock is not None and clock.held_since_ms is not None:
        lag = -clock.ahead_seconds
        words = f"the wall clock jumped ahead and is not trusted: the log's stamps stay {lag:.0f} s behind it"
        yield make_finding("clock", "log clock", words)
    for each in channels:
        ahead = (each.time or 0.0) - now
        if ahead > CLOCK_AHEAD_SECONDS:
            words = (
                f"log time is {ahead:.0f} s ahead of this host's clock, and advances slowly until the clock catches up"
            )
            yield make_finding("clock", each.name, words)


def _of_quality(inputs: HealthInputs) -> Iterator[HealthFinding]:
    for each in inputs.blocks:
        yield make_finding("quality_blocks", each, f"the critical expectation {each} has failed: nothing is removed")


def _of_publishing(inputs: HealthInputs) -> Iterator[HealthFinding]:
    for number, words in sorted(inputs.publish_failures.items())[:1]:  # often all fail for one reason
        others = len(inputs.publish_failures) - 1
        more = f" ({others} more collections fail too)" if others else ""
        yield make_finding("publish_failed", f"collection {number}", f"it is not published: {words[:300]}{more}")


def _of_runs(inputs: HealthInputs, *, now: float) -> Iterator[HealthFinding]:
    for job in MAINTENANCE:
        line = inputs.newest_runs.get(job, {})
        report, name = line.get("report"), str(line.get("run_id") or "")
        error = line.get("error") if isinstance(line.get("error"), dict) else {}
        if line.get("state") in _FAILED:
            words = f"{error.get('code')}: {error.get('message')}" if error else str(line["state"])
            retried = job in inputs.active_jobs or _retry_is_due(job, line, now=now)
            kind: HealthKind = "maintenance_retry" if retried else "maintenance_failed"
            then = ", and will be retried" if retried else ""
            yield make_finding(kind, job, f"its newest run {name} failed{then}: {words[:300]}", run=name)
        elif job in _NOT_WELL and isinstance(report, dict) and report.get(_NOT_WELL[job][0]) is False:
            words = f"its newest run {name} reports: {_NOT_WELL[job][1]}"
            yield make_finding("maintenance_failed", job, words, run=name)


def _retry_is_due(job: str, line: Mapping[str, Any], *, now: float) -> bool:
    """Return whether the DAG of the job will retry this run: the error is retriable and attempts remain."""
    error, attempt, ended = line.get("error"), line.get("attempt"), line.get("ended_at")
    if not (isinstance(error, dict) and error.get("retriable") is True and isinstance(attempt, int)):
        return False
    if not isinstance(ended, int | float) or now - ended > RETRY_SECONDS:
        return False
    return attempt <= find_operation(job).retries


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
