"""A redrive as a run of its own, beside its pipeline's worker: one at a time, which a crash does not lose.

    python -m millrace.pipelines.deploy.redriving FILE --params JSON --result FILE --progress FILE

The launcher runs this command. The request and the progress are in its run's folder (millrace.runtime.launch); the
progress is written after each batch that the sink has acknowledged. A run that died, or whose brokers or sink were
unavailable, resumes there at a later `tend`, after growing pauses, at most MAX_TRIES times in a row without progress.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field

from millrace.base.backoff import delay_after
from millrace.base.data_folder import restrict_umask
from millrace.base.errors import MillraceError, PipelineBusy, RunNotFound
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import Configuration
from millrace.flows.range_host.status import declaration_path
from millrace.runtime.launch.command import module_job
from millrace.runtime.launch.launcher import Launcher, RunState, RunStatus

MAX_TRIES: Final = 10
FIRST_PAUSE: Final = 5.0
LONGEST_PAUSE: Final = 600.0
_REPORT_SECONDS: Final = 0.2
"""Seconds between two reports of the progress."""


class RedriveState(StrEnum):
    NONE = "NONE"
    """There was no redrive."""
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    """It ended early, and resumes at `retry_at`."""
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class RedriveStatus(BaseModel):
    """The newest redrive of a pipeline. Its counts are those of `Redriven` (millrace.flows.errors.redrive)."""

    pipeline: str
    state: RedriveState
    id: str = ""
    asked_by: str = ""
    asked_at: float = Field(default=0.0, description="seconds since 1970")
    ended_at: float | None = None
    selection: dict[str, Any] = Field(default_factory=dict)
    again: bool = False
    dry_run: bool = False
    done: int = Field(default=0, description="positions of the error topic that it has processed")
    of: int = Field(default=0, description="positions that it must process")
    counts: dict[str, int] = Field(default_factory=dict)
    tries: int = Field(default=0, description="attempts in a row without progress")
    code: str = ""
    cause: str = ""
    retry_at: float | None = None


class Redrives:
    """The redrives of one data folder's pipelines. Stateless."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._clock = settings, clock
        self._launcher = Launcher(settings)

    def start(
        self, pipeline: str, *, who: str, selection: Mapping[str, Any], again: bool, dry_run: bool
    ) -> RedriveStatus:
        """Start a redrive; its declaration must be written already.

        Raises PipelineBusy if one runs or waits to resume.
        """
        known = self.status(pipeline)
        if known.state in (RedriveState.RUNNING, RedriveState.WAITING):
            raise PipelineBusy(
                f"a redrive of {pipeline!r} by {known.asked_by} is {known.state}: wait for its end, or cancel it"
            )
        asked = {
            "id": uuid.uuid4().hex[:12],
            "who": who,
            "at": self._clock(),
            "selection": dict(selection),
            "again": again,
            "dry_run": dry_run,
            "tries": 0,
            "behind": None,
        }
        run = self._start(pipeline, asked)
        if run.params.get("id") != asked["id"]:
            raise PipelineBusy(f"a redrive of {pipeline!r} was just started by {run.params.get('who')}")
        return self.status(pipeline)

    def status(self, pipeline: str) -> RedriveStatus:
        """Return the status of the newest redrive."""
        try:
            run = self._launcher.poll(run_id(pipeline))
        except RunNotFound:
            return RedriveStatus(pipeline=pipeline, state=RedriveState.NONE)
        return self._status_of(pipeline, run)

    def cancel(self, pipeline: str) -> RedriveStatus:
        """Cancel the redrive between two batches. Completed batches remain. No effect if none runs or waits."""
        known = self.status(pipeline)
        if known.state is RedriveState.RUNNING:
            self._launcher.stop(run_id(pipeline))
        elif known.state is RedriveState.WAITING:
            # A run that ended early has no process to stop, so record its end here.
            replace_json(self._folder(pipeline) / "result.json", {"ok": True, "stopped": True})
        return self.status(pipeline)

    def tend(self, pipeline: str) -> None:
        """Resume a redrive that ended early, when it is due."""
        try:
            run = self._launcher.poll(run_id(pipeline))
        except RunNotFound:
            return
        known = self._status_of(pipeline, run)
        if known.state is RedriveState.WAITING and known.retry_at is not None and self._clock() >= known.retry_at:
            behind = run.progress or run.params.get("behind")
            self._start(pipeline, {**run.params, "tries": known.tries, "behind": behind})

    def _start(self, pipeline: str, asked: dict[str, Any]) -> RunStatus:
        job = module_job(
            "redrive", "millrace.pipelines.deploy.redriving", str(declaration_path(self._settings, pipeline))
        )
        with suppress(FileNotFoundError):
            self._launcher.mark_collected(run_id(pipeline))  # otherwise a finished run would be returned
        return self._launcher.start(run_id(pipeline), job, params=asked)

    def _folder(self, pipeline: str) -> Path:
        return self._launcher.poll(run_id(pipeline)).log.parent

    def _status_of(self, pipeline: str, run: RunStatus) -> RedriveStatus:
        asked = run.params
        progress = run.progress or asked.get("behind") or {}
        begins, places, ends = (progress.get(name, {}) for name in ("begins", "places", "ends"))
        moved = run.progress is not None and run.progress.get("places") != (asked.get("behind") or {}).get("places")
        tries = (0 if moved else int(asked.get("tries", 0))) + (run.state in (RunState.FAILED, RunState.LOST))
        state, retry_at = _STATES[run.state], None
        if state is RedriveState.WAITING:
            if tries > MAX_TRIES or (run.error is not None and not run.error.retriable):
                state = RedriveState.FAILED
            else:
                retry_at = (run.ended_at or run.started_at) + delay_after(tries, FIRST_PAUSE, LONGEST_PAUSE)
        return RedriveStatus(
            pipeline=pipeline,
            state=state,
            id=str(asked.get("id", "")),
            asked_by=str(asked.get("who", "")),
            asked_at=float(asked.get("at", run.started_at)),
            ended_at=run.ended_at,
            selection=asked.get("selection", {}),
            again=bool(asked.get("again")),
            dry_run=bool(asked.get("dry_run")),
            done=sum(place - begins.get(task, 0) for task, place in places.items()),
            of=sum(max(0, end - begins.get(task, 0)) for task, end in ends.items()),
            counts=progress.get("counts", {}),
            tries=tries,
            code="" if run.error is None else run.error.code,
            cause="" if run.error is None else run.error.message,
            retry_at=retry_at,
        )


_STATES: Final = {
    RunState.RUNNING: RedriveState.RUNNING,
    RunState.FINISHED: RedriveState.DONE,
    RunState.STOPPED: RedriveState.CANCELLED,
    RunState.FAILED: RedriveState.WAITING,
    RunState.LOST: RedriveState.WAITING,
}


def run_id(pipeline: str) -> str:
    return f"redrive-{pipeline}"


def main() -> int:
    """Redrive until the topic's end, or until SIGTERM or SIGINT."""
    from millrace.flows.declare.file import flow_of_file
    from millrace.flows.declare.keys import Keys
    from millrace.flows.errors.redrive import Progress, redrive
    from millrace.flows.errors.selection import Selection
    from millrace.runtime.process_setup import stop_on_signals

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--params", type=json.loads, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--progress", type=Path, required=True)
    options = parser.parse_args()
    restrict_umask()
    stop = stop_on_signals()
    asked, reported_at = options.params, 0.0

    def tell(progress: Progress) -> bool:
        nonlocal reported_at
        over = progress.places == progress.ends or stop.is_set()
        if over or time.monotonic() - reported_at >= _REPORT_SECONDS:
            replace_json(options.progress, progress.to_json())
            reported_at = time.monotonic()
        return stop.is_set()

    try:
        counts = redrive(
            settings := Settings.load(),
            flow_of_file(options.file, Configuration(), keys=Keys(settings.data_dir)),
            Selection.from_json(asked["selection"]),
            again=asked["again"],
            dry_run=asked["dry_run"],
            behind=None if asked["behind"] is None else Progress(**asked["behind"]),
            tell=tell,
        )
    except MillraceError as error:
        said = {"code": error.code, "message": str(error)[:2000], "retriable": error.retriable}
        replace_json(options.result, {"ok": False, "error": said})
        return 1
    if (
        stop.is_set() and not (options.result.parent / "stop.json").exists()
    ):  # the machine shuts down: the redrive resumes afterwards
        said = {"code": "STOPPED", "message": "its process was asked to stop", "retriable": True}
        replace_json(options.result, {"ok": False, "error": said})
        return 1
    replace_json(options.result, {"ok": True, "stopped": stop.is_set(), "report": counts._asdict()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
