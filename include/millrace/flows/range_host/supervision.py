"""Which tasks run and which failed: consecutive failures up to the threshold, then growing pauses and limited retries.

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
"""A worker that spoke so long before another is no longer heard; each speaks once a second."""


@dataclass(slots=True)
class Health:
    """Of one task."""

    failures: int = 0
    """In a row, since it began or was recovered."""
    recoveries: int = 0
    """In a row that came to nothing."""
    failed: bool = False
    retry_at: float | None = None
    """When it is recovered, seconds since 1970; None with `failed`: never by itself."""
    cause: str = ""
    code: str = ""

    @property
    def state(self) -> State:
        return State.FAILED if self.failed else State.RUNNING


class Supervision:
    """The driver's view, kept in the file alone: the loop and the beat of one driver each have one."""

    def __init__(
        self, settings: Settings, flow: Flow, *, worker: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = tasks_path(settings, flow.name, worker)
        self._flow, self._clock = flow, clock

    @property
    def tasks(self) -> dict[str, Health]:
        """Those that failed and did not succeed since."""
        return read_tasks(self._path)

    def succeeded(self, tasks: Iterable[str]) -> None:
        """Their ranges were committed."""
        known = self.tasks
        if [known.pop(task) for task in tasks if task in known]:
            self._keep(known)

    def failed(self, task: str, *, code: str, cause: str) -> Health:
        """A range of it failed, with its cause."""
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
        """Seconds before the recovery behind so many others in a row."""
        recovery = self._flow.recovery
        first = 60 * recovery.interval_minutes
        return delay_after(recoveries + 1, first, max(first, 60 * recovery.longest_minutes), factor=recovery.factor)

    def restart(self) -> None:
        """Somebody asked for it: what failed is tried again now, with all its attempts."""
        if self.tasks:
            self._keep({})

    def _keep(self, tasks: dict[str, Health]) -> None:
        replace_json(self._path, {task: asdict(health) for task, health in tasks.items()})


def tasks_path(settings: Settings, flow: str, worker: int = 0) -> Path:
    return worker_folder(settings, flow, worker) / FILE


def read_tasks(path: Path) -> dict[str, Health]:
    """Read the file; empty if it is missing or was cut by a crash: it is about failures, not about positions."""
    try:
        return {task: Health(**value) for task, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def resting(path: Path, *, now: float) -> frozenset[str]:
    """The tasks that failed and are not due."""
    return frozenset(
        task
        for task, health in read_tasks(path).items()
        if health.failed and (health.retry_at is None or health.retry_at > now)
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What management asks of a running worker."""

    paused: bool = False
    restart: str = ""
    """``all`` or ``failed``, once for each `serial`."""
    serial: int = 0
    whole: int = 0
    """The serial of the last restart of all tasks: a task opened before it is closed and opened again."""


def read_wanted(settings: Settings, flow: str) -> Wanted:
    """What is asked of the worker of `flow` now, as far as this machine knows."""
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
    """Ask it: to pause or go on, to start all or only failed tasks again.

    A restart begins the counts of `errors.limit` anew. Raises CommitFenced, TableUnavailable, MetaUnavailable.
    """
    if restart:
        from millrace.flows.range_host.positions import reset_windows  # with it comes Arrow, which a list does without

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
    """What the workers of `flow` on this machine said last, as one; UNASSIGNED where none ever said anything."""
    said = [read_worker_status(settings, flow, worker) for worker in workers_of(settings, flow)]
    return said[0] if len(said) == 1 else together(said)


def read_worker_status(settings: Settings, flow: str, worker: int) -> PipelineStatus:
    """What one worker said last; UNASSIGNED where it never said anything."""
    try:
        return PipelineStatus.model_validate_json(status_path(settings, flow, worker).read_bytes())
    except (FileNotFoundError, ValueError):
        return PipelineStatus(pipeline=flow, state=State.UNASSIGNED)


def together(said: Sequence[PipelineStatus]) -> PipelineStatus:
    """The statuses of several workers as one: a task is the worker's that named it last."""
    newest = max(said, key=lambda each: each.at)
    known = [each for each in said if each.state is not State.UNASSIGNED]
    live = [each for each in known if newest.at - each.at < _QUIET_SECONDS] or known
    tasks = {task.task: task for each in sorted(live, key=lambda each: each.at) for task in each.tasks}
    failed = [each for each in live if each.state is State.FAILED]
    # A worker that the group gave no partition runs, and says nothing about the flow.
    state = State.FAILED if failed and all(each.state is State.FAILED or not each.tasks for each in live) else None
    others = [each.state for each in live if each.state is not State.FAILED]
    told = failed[-1] if failed else newest
    return newest.model_copy(
        update={
            "state": state or (others[-1] if others else newest.state),
            "cause": told.cause,
            "pid": live[0].pid if live else newest.pid,
            "tasks": tuple(tasks[name] for name in sorted(tasks)),
            "cpu_percent": round(sum(each.cpu_percent for each in live), 1),
            "memory_bytes": sum(each.memory_bytes for each in live),
        }
    )


def last_pulse(settings: Settings, flow: str) -> float:
    """When a worker of `flow` on this machine spoke last, seconds since 1970; 0 where none has."""
    return max(_pulse_of(settings, flow, worker) for worker in workers_of(settings, flow))


def _pulse_of(settings: Settings, flow: str, worker: int) -> float:
    try:
        return pulse_path(settings, flow, worker).stat().st_mtime
    except FileNotFoundError:
        return 0.0
