"""Start, stop, pause and resume a flow, whichever host runs it: one way for commands, API, UI and Airflow.

A flow in the background is one run of the launcher, whose process supervises the flow's processes
(millrace.flows.supervisor). A second start finds the run of the first. A flow stays paused until it is resumed, also
across restarts; a running supervisor obeys within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import RunNotFound
from millrace.base.settings import Settings
from millrace.flows.declare.connections import password_in_environment
from millrace.flows.declare.worker import AIRFLOW
from millrace.flows.directory import NamedFlow
from millrace.flows.range_host import observed
from millrace.flows.range_host.supervision import read_wanted, want
from millrace.flows.spark_host import status as streams
from millrace.flows.spark_host.incarnations import Incarnations
from millrace.flows.status import FlowProcesses, processes_of
from millrace.runtime.launch.command import JobSpec, module_job
from millrace.runtime.launch.launcher import Launcher, RunState, RunStatus

_MODULE: Final = "millrace.flows.supervisor"
_POLL_SECONDS: Final = 0.1


def worker_job(file: Path, *, config: Path | None = None, tasks: bool = False) -> JobSpec:
    """Return the job that supervises the flow of `file`: its worker processes or, with `tasks`, a Spark query."""
    command = ["tasks" if tasks else "workers", str(file.absolute())]
    command += [] if config is None else ["--config", str(config.absolute())]
    return module_job("pipeline", _MODULE, *command)


def stream_job(job: str) -> JobSpec:
    """Return the job that supervises a stream, or a group of streams."""
    return module_job("stream", _MODULE, "streams", job)


def run_id_of(flow: NamedFlow) -> str:
    """Return the run id of a flow's supervisor, the same whatever starts it."""
    return observed.run_id(flow.name) if flow.stream is None else streams.run_id(flow.stream.job)


def start_flow(
    settings: Settings, flow: NamedFlow, *, password_of: Callable[[str], str] = password_in_environment
) -> RunStatus:
    """Start a flow in the background, or find it running. A scheduled flow runs up to the source's present end.

    `password_of` returns the password of an Airflow connection that the declaration refers to, and raises
    InvalidSettings. Raises PipelineNotFound if the file that declares it is unknown.
    """
    if flow.stream is not None:
        return start_streams(settings, flow.stream.job)
    tasks = flow.declared is not None and flow.declared.scheduled and flow.declared.deployment == AIRFLOW
    job = worker_job(flow.worker_file(settings, password_of=password_of), config=flow.config, tasks=tasks)
    return _started(settings, run_id_of(flow), job)


def start_workers(settings: Settings, flow: str, file: Path, *, config: Path | None = None) -> RunStatus:
    """Start the flow that `file` declares in the background, or find it running."""
    return _started(settings, observed.run_id(flow), worker_job(file, config=config))


def start_streams(settings: Settings, job: str) -> RunStatus:
    """Start a stream or a group of streams in the background, or find it running."""
    return _started(settings, streams.run_id(job), stream_job(job))


def _started(settings: Settings, run_id: str, job: JobSpec) -> RunStatus:
    launcher = Launcher(settings)
    found = launcher.start(run_id, job)
    if found.state is RunState.FINISHED:  # a run of a scheduled flow, which ended by itself
        launcher.mark_collected(run_id)
        found = launcher.start(run_id, job)
    return found


def stop_flow(settings: Settings, run_id: str) -> str:
    """Stop a flow between two batches; return the state of its run, or ``not running`` if it has none."""
    try:
        return str(Launcher(settings).stop(run_id).state)
    except RunNotFound:
        return "not running"


def pause_workers(settings: Settings, flow: str, *, paused: bool) -> None:
    """Pause or resume reading in the processes of a flow."""
    want(settings, flow, paused=paused)


def is_paused(settings: Settings, flow: NamedFlow) -> bool:
    """Return whether the flow is paused."""
    if flow.stream is not None:
        return Incarnations(settings, flow.name).state.paused
    return read_wanted(settings, flow.name).paused


def pause_stream(settings: Settings, name: str, job: str, *, paused: bool) -> FlowProcesses:
    """Pause or resume a stream. Wait until the supervisor of its `job`, if there is one, has obeyed.

    The other streams of a group restart without it, or with it.
    """
    Incarnations(settings, name).pause(paused=paused)

    def obeyed() -> bool:
        found = processes_of(settings, streams.run_id(job))
        return not found.active or paused is not any(name in each.runs for each in found.records)

    poll_until(obeyed, Deadline.after(settings.stop_deadline), interval=_POLL_SECONDS)
    return processes_of(settings, streams.run_id(job))
