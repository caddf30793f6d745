"""Start, stop, pause and resume a flow, whichever host runs it: one way for commands, API, UI and Airflow.

A flow in the background is one run of the launcher, whose process supervises those of the flow
(millrace.flows.supervisor). A second start finds the first one's run. A flow stays paused until somebody resumes it: a
supervisor obeys within a second, and one that starts later does too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import RunNotFound
from millrace.base.settings import Settings
from millrace.flows.range_host import observed
from millrace.flows.range_host.supervision import want
from millrace.flows.spark_host import status as streams
from millrace.flows.spark_host.incarnations import Kept
from millrace.flows.status import FlowProcesses, processes_of
from millrace.runtime.launch.command import JobSpec, module_job
from millrace.runtime.launch.launcher import Launcher, RunStatus

_MODULE: Final = "millrace.flows.supervisor"
_POLL_SECONDS: Final = 0.1


def worker_job(file: Path, *, config: Path | None = None, tasks: bool = False) -> JobSpec:
    """Return the job that supervises the pipeline of `file`: its worker processes or, with `tasks`, a Spark query."""
    command = ["tasks" if tasks else "workers", str(file.absolute())]
    command += [] if config is None else ["--config", str(config.absolute())]
    return module_job("pipeline", _MODULE, *command)


def stream_job(job: str) -> JobSpec:
    """Return the job that supervises a stream, or a group of streams."""
    return module_job("stream", _MODULE, "streams", job)


def start_pipeline(settings: Settings, pipeline: str, file: Path, *, config: Path | None = None) -> RunStatus:
    """Start the pipeline that `file` declares in the background, or find it running."""
    return Launcher(settings).start(observed.run_id(pipeline), worker_job(file, config=config))


def start_streams(settings: Settings, job: str) -> RunStatus:
    """Start a stream or a group of streams in the background, or find it running."""
    return Launcher(settings).start(streams.run_id(job), stream_job(job))


def stop_flow(settings: Settings, run_id: str) -> str:
    """Stop a flow between two batches; return the state of its run, or ``not running`` if it has none."""
    try:
        return str(Launcher(settings).stop(run_id).state)
    except RunNotFound:
        return "not running"


def pause_pipeline(settings: Settings, pipeline: str, *, paused: bool) -> None:
    """Have the processes of a pipeline read nothing, or go on."""
    want(settings, pipeline, paused=paused)


def pause_stream(settings: Settings, name: str, job: str, *, paused: bool) -> FlowProcesses:
    """Keep a stream from running, or allow it; wait until the supervisor of its `job` has obeyed, if there is one.

    The other streams of a group restart without it, or with it.
    """
    Kept(settings, name).pause(paused=paused)

    def obeyed() -> bool:
        found = processes_of(settings, streams.run_id(job))
        return not found.active or paused is not any(name in each.runs for each in found.records)

    poll_until(obeyed, Deadline.after(settings.stop_deadline), interval=_POLL_SECONDS)
    return processes_of(settings, streams.run_id(job))
