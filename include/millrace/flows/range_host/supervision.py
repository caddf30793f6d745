"""Supervision of tasks: consecutive failures up to the threshold, then growing pauses and a limit of recoveries.

The state is in ``<data>/pipelines/<id>/tasks.json``, which the driver replaces as a whole. The planner leaves out tasks
that have failed and are not due.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from millrace.base.backoff import delay_after, jittered
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.range_host.documents import WANTED, change_document
from millrace.flows.range_host.status import (
    PipelineStatus,
    State,
    commands_path,
    pulse_path,
    status_path,
    worker_folder,
    workers_of,
)

FILE: Final = "tasks.json"
_WORDS: Final = 2000
_QUIET_SECONDS: Final = 10.0
"""A worker whose report is this much older than another's is ignored; each reports once a second."""


@dataclass(slots=True)
class Health:
    """The health of one task."""

    failures: int = 0
    """Failures in a row, since its start or recovery."""
    recoveries: int = 0
    """Failed recoveries in a row."""
    failed: bool = False
    retry_at: float | None = None
    """Time of its recovery, seconds since 1970; None with `failed` means never by itself."""
    cause: str = ""
    code: str = ""

    @property
    def state(self) -> State:
        return State.FAILED if self.failed else State.RUNNING


class Supervision:
    """The driver's view, stored only in the file: the loop and the beat of one driver each have an instance."""

    def __init__(
        self, settings: Settings, flow: Flow, *, worker: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = tasks_path(settings, flow.name, worker)
        self._flow, self._clock = flow, clock

    @property
    def tasks(self) -> dict[str, Health]:
        """The health of tasks that failed and have not succeeded since."""
        return read_tasks(self._path)

    def succeeded(self, tasks: Iterable[str]) -> None:
        """Clear the failures of tasks whose ranges were committed."""
        known = self.tasks
        if [known.pop(task) for task in tasks if task in known]:
            self._keep(known)

    def failed(self, task: str, *, code: str, cause: str) -> Health:
        """Count a failure of `task`; return its health, with the time of the next recovery."""
        known = self.tasks
        health = known.setdefault(task, Health())
        if health.failed:  # this was its recovery
            health.failed, health.failures = False, 0
            health.recoveries += 1
        health.failures += 1
        health.code, health.cause = code, cause[:_WORDS]
        if health.failures >= self._flow.failure_threshold:
            health.failed = True
            recovery = self._flow.recovery
            health.retry_at = (
                self._clock() + jittered(self.pause(health.recoveries))
                if health.recoveries < recovery.attempts
                else None
            )
        self._keep(known)
        return health

    def pause(self, recoveries: int) -> float:
        """Return the seconds to wait before a recovery, after `recoveries` failed ones in a row."""
        recovery = self._flow.recovery
        first = 60 * recovery.interval_minutes
        return delay_after(recoveries + 1, first, max(first, 60 * recovery.longest_minutes), factor=recovery.factor)

    def restart(self) -> None:
        """Clear all failures, as a user requested: failed tasks run again now, with all their attempts."""
        if self.tasks:
            self._keep({})

    def _keep(self, tasks: dict[str, Health]) -> None:
        replace_json(self._path, {task: asdict(health) for task, health in tasks.items()})


def tasks_path(settings: Settings, flow: str, worker: int = 0) -> Path:
    return worker_folder(settings, flow, worker) / FILE


def read_tasks(path: Path) -> dict[str, Health]:
    """Read the file; empty if it is missing or truncated by a crash, since it holds failures and no positions."""
    try:
        return {task: Health(**value) for task, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def resting(path: Path, *, now: float) -> frozenset[str]:
    """Return the tasks that failed and whose recovery is not due at `now`."""
    return frozenset(
        task
        for task, health in read_tasks(path).items()
        if health.failed and (health.retry_at is None or health.retry_at > now)
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """The commands of management to a running worker."""

    paused: bool = False
    restart: str = ""
    """``all`` or ``failed``; obeyed once for each `serial`."""
    serial: int = 0
    whole: int = 0
    """The serial of the last restart of all tasks. A task that was opened before it is reopened."""


def read_wanted(settings: Settings, flow: str) -> Wanted:
    """Return the present commands to the worker of `flow`, as far as this machine knows."""
    try:
        return _wanted(commands_path(settings, flow).read_bytes())
    except FileNotFoundError:
        return Wanted()


def _wanted(body: bytes | None) -> Wanted:
    try:
        value: Any = json.loads(body or b"{}")
        return Wanted(
            bool(value.get("paused", False)),
            str(value.get("restart", "")),
            int(value.get("serial", 0)),
            int(value.get("whole", 0)),
        )
    except (ValueError, TypeError, AttributeError):
        return Wanted()


def want(settings: Settings, flow: str, *, paused: bool | None = None, restart: str = "") -> Wanted:
    """Command the worker of `flow` to pause, to resume, or to restart all or only failed tasks.

    A restart resets the counts of `errors.limit`. Raises CommitFenced, TableUnavailable, MetaUnavailable.
    """
    if restart:
        from millrace.flows.range_host.positions import (
            reset_windows,
        )  # it imports Arrow, which listing flows does not need

        reset_windows(settings, flow)
    made = Wanted()

    def change(before: bytes | None) -> bytes:
        nonlocal made
        known = _wanted(before)
        serial = known.serial + bool(restart)
        whole = serial if restart == "all" else known.whole
        made = Wanted(known.paused if paused is None else paused, restart or known.restart, serial, whole)
        return json.dumps(asdict(made)).encode() + b"\n"

    change_document(settings, flow, WANTED, change)
    return made


def read_status(settings: Settings, flow: str) -> PipelineStatus:
    """Return the last status of all workers of `flow` on this machine, merged; UNASSIGNED if none ever reported."""
    said = [read_worker_status(settings, flow, worker) for worker in workers_of(settings, flow)]
    return said[0] if len(said) == 1 else merged(said)


def read_worker_status(settings: Settings, flow: str, worker: int) -> PipelineStatus:
    """Return the last status of one worker; UNASSIGNED if it never reported."""
    try:
        return PipelineStatus.model_validate_json(status_path(settings, flow, worker).read_bytes())
    except (FileNotFoundError, ValueError):
        return PipelineStatus(pipeline=flow, state=State.UNASSIGNED)


def merged(said: Sequence[PipelineStatus]) -> PipelineStatus:
    """Merge the statuses of several workers. A task's status comes from the worker that reported it last."""
    newest = max(said, key=lambda each: each.at)
    known = [each for each in said if each.state is not State.UNASSIGNED]
    live = [each for each in known if newest.at - each.at < _QUIET_SECONDS] or known
    tasks = {task.task: task for each in sorted(live, key=lambda each: each.at) for task in each.tasks}
    failed = [each for each in live if each.state is State.FAILED]
    # A worker without partitions runs, but its state says nothing about the flow.
    state = State.FAILED if failed and all(each.state is State.FAILED or not each.tasks for each in live) else None
    others = [each.state for each in live if each.state is not State.FAILED]
    shown = failed[-1] if failed else newest
    return newest.model_copy(
        update={
            "state": state or (others[-1] if others else newest.state),
            "cause": shown.cause,
            "pid": live[0].pid if live else newest.pid,
            "tasks": tuple(tasks[name] for name in sorted(tasks)),
            "cpu_percent": round(sum(each.cpu_percent for each in live), 1),
            "memory_bytes": sum(each.memory_bytes for each in live),
        }
    )


def last_pulse(settings: Settings, flow: str) -> float:
    """Return when a worker of `flow` on this machine last reported, seconds since 1970; 0 if none has."""
    return max(_pulse_of(settings, flow, worker) for worker in workers_of(settings, flow))


def _pulse_of(settings: Settings, flow: str, worker: int) -> float:
    try:
        return pulse_path(settings, flow, worker).stat().st_mtime
    except FileNotFoundError:
        return 0.0
