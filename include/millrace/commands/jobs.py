"""``millrace jobs`` and ``millrace unpark``: the streaming job in the foreground, detached jobs, and parked
PChannels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.base.errors import ChannelNotFound, DeadlineExceeded, LogUnavailable
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    CommandContext,
    JsonContext,
    command_group,
    exec_python,
    iso_time,
    parse_json_object,
    print_json,
    print_rows,
    root,
)
from millrace.runtime.launch.command import jobs_folder

if TYPE_CHECKING:
    from millrace.runtime.launch.launcher import RunStatus

app = command_group("jobs", OPERATE_PANEL, "Run jobs: the streaming node in the foreground, any job detached.")

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run id, as `millrace jobs list` shows it.")]

_COLUMNS = ("run_id", "job", "state", "attempt", "pid", "started", "progress")


@app.command()
def run(
    context: CommandContext,
    with_flusher: Annotated[
        bool,
        typer.Option("--with-flusher", help="Run the flusher too: it writes collections, segments and checkpoints."),
    ] = False,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Process the available data, then end.")
    ] = False,
) -> None:
    """Run the streaming node in the foreground until Ctrl-C or SIGTERM. It finishes its micro-batch first.

    Needs Java 17 or 21 and the extra `spark`.

    Example: `millrace jobs run --with-flusher`

    Example: `millrace jobs run --with-flusher --available-now`
    """
    settings = context.settings
    arguments = [str(jobs_folder() / "streaming_node.py")]
    arguments += ["--with-flusher"] if with_flusher else []
    arguments += ["--available-now"] if available_now else []
    exec_python(arguments, settings)


@root.command(rich_help_panel=OPERATE_PANEL)
def unpark(
    context: CommandContext,
    pchannel: Annotated[str, typer.Argument(metavar="PCHANNEL", help="The PChannel, such as dml_0.")],
) -> None:
    """Resume a parked PChannel after its cause is fixed. If the cause remains, the PChannel parks again.

    `millrace status` shows what is parked and why.

    Example: `millrace unpark dml_0`
    """
    from millrace.client.append_client import AppendClient
    from millrace.node.range_loop.parking import restart_follower
    from millrace.node.range_loop.parking import unpark as unpark_node

    settings = context.settings
    freed = []
    try:
        unpark_node(settings.parked_path, pchannel)
        freed.append("the streaming node")
    except ChannelNotFound:
        pass  # the append host may have parked it by itself
    try:
        with AppendClient.connect(settings.data_dir, start=False, deadline=5.0) as client:
            if pchannel in client.service.names() and (freed or client.describe(pchannel)["parked"]):
                restart_follower(client, pchannel)
                freed.append("the append host")
    except LogUnavailable:
        pass  # without a server no append host is parked
    if not freed:
        raise ChannelNotFound(f"{pchannel} is not parked")
    typer.echo(f"{pchannel} is resumed ({' and '.join(freed)}).")


@app.command()
def start(
    context: JsonContext,
    job: Annotated[str, typer.Argument(metavar="JOB", help="An operation, or a file of jobs/ without its suffix.")],
    params: Annotated[
        str | None, typer.Option("--params", metavar="JSON", help="The job's parameters, for jobs that take them.")
    ] = None,
    argument: Annotated[
        list[str] | None, typer.Option("--argument", help="An argument of its command line; repeat it for several.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="The run id; default: the job's name.")
    ] = None,
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", help="Wait this long for the job to end.")] = 0.0,
) -> None:
    """Start a detached job, or attach to the active run of that id. The job outlives this command.

    With `--wait` the command prints the report, and fails if the job fails.

    Example: `millrace jobs start compaction --params '{"dry_run": true}' --wait 600`

    Example: `millrace jobs start streaming_node --run streaming-node --argument=--with-flusher`
    """
    from millrace.operations.registry import find_job, operations
    from millrace.runtime.child_processes import JobFailed
    from millrace.runtime.launch.launcher import Launcher, RunState

    chosen = None if params is None else parse_json_object(params)
    if chosen is not None and (operation := operations().get(job)) is not None:
        operation.params.parse(chosen)  # report errors now, not in the detached run
    launcher = Launcher(context.settings)
    name = run_id or job.replace("_", "-")
    status = launcher.start(name, find_job(job), params=chosen, arguments=argument or ())
    if wait and status.active:
        try:
            status = launcher.wait(name, deadline=wait)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; it goes on (`millrace jobs stop {name}` ends it)") from None
    if status.error is not None:
        raise JobFailed(f"{status.error} (log: {status.log})")
    if status.state is RunState.FINISHED:
        launcher.mark_collected(name)
        print_json(status.report or {})
        return
    _print([status], as_json=context.as_json)


@app.command("list")
def list_runs(context: JsonContext) -> None:
    """List the runs of jobs, newest first: active ones and those of the last days.

    Example: `millrace jobs list`
    """
    from millrace.runtime.launch.launcher import Launcher

    _print(Launcher(context.settings).runs(), as_json=context.as_json)


@app.command()
def stop(
    context: JsonContext,
    run_id: RunId,
    deadline: Annotated[
        float | None,
        typer.Option("--deadline", metavar="SECONDS", help="Kill the job after this time. Default: stop_deadline."),
    ] = None,
) -> None:
    """Stop a run: SIGTERM, then SIGKILL. A streaming job ends between two micro-batches.

    The DAG `streaming` restarts its job; pause that DAG instead.

    Example: `millrace jobs stop compaction`
    """
    from millrace.runtime.launch.launcher import Launcher

    _print([Launcher(context.settings).stop(run_id, deadline=deadline)], as_json=context.as_json)


@app.command()
def log(
    context: CommandContext,
    run_id: RunId,
    lines: Annotated[int, typer.Option("--lines", min=1, help="Number of lines.")] = 100,
) -> None:
    """Print the last lines of a run's log.

    Example: `millrace jobs log streaming-node --lines 30`
    """
    from millrace.runtime.launch.launcher import Launcher

    typer.echo(Launcher(context.settings).poll(run_id).tail(lines))


def _print(found: list[RunStatus], *, as_json: bool) -> None:
    from millrace.client.progress import operation_words

    rows: list[dict[str, Any]] = [
        {
            "run_id": status.run_id,
            "job": status.job,
            "state": "waiting" if status.waiting else str(status.state),
            "attempt": status.attempt,
            "pid": status.pid if status.active else None,
            "started": iso_time(int(status.started_at * 1000)),
            "progress": str(status.error)
            if status.error is not None
            else operation_words(status.progress or {}) or None,
        }
        for status in found
    ]
    print_rows(rows, columns=_COLUMNS, as_json=as_json, empty="No runs yet.")
