"""Run, start, stop and pause flows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.errors import MillraceError, PipelineBusy
from millrace.commands.flows.group import Config, Name, StreamName, app, found_flow, stream_named, streams_of
from millrace.commands.parts.command_line import CommandContext, JsonContext, exec_python, print_facts
from millrace.commands.parts.output import (
    TABLE_ROWS,
    FileFormat,
    Output,
    OutputFormat,
    print_table,
    resolve_format,
    write_output,
)

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.flows.declare.flow import Flow
    from millrace.flows.directory import NamedFlow


@app.command()
def run(
    context: CommandContext,
    name: Annotated[
        str, typer.Argument(metavar="FLOW", help="A stream, a group of streams, a pipeline, or a pipeline's file.")
    ],
    config: Config = None,
    until_end: Annotated[
        bool, typer.Option("--until-end", "--available-now", help="Process what the source has now, then exit.")
    ] = False,
) -> None:
    """Run a flow in this process until Ctrl-C or SIGTERM. A stream needs Java.

    A stream finishes its micro-batch first. A pipeline's worker that dies restarts with a back-off. A flow with a
    schedule ends at what the source has now.

    Example: `millrace flows run flights.yaml`

    Example: `millrace flows run flights_hourly --until-end`
    """
    settings = context.settings
    streams = streams_of(settings, name)
    if streams:
        from millrace.flows.spark_host.query import require_startable
        from millrace.runtime.launch.command import jobs_folder

        require_startable(settings, streams)
        bounded = until_end or any(each.scheduled for each in streams)
        exec_python([str(jobs_folder() / "stream.py"), name, *(["--available-now"] if bounded else [])], settings)
    flow = found_flow(settings, name, config)
    from millrace.flows.hosts import WorkerHost
    from millrace.flows.supervisor import supervise
    from millrace.runtime.process_setup import stop_on_signals

    declared = flow.declaration(settings)  # errors of the declaration end the command, not a worker that restarts
    _report_missing_source(settings, declared)
    host = WorkerHost(settings, flow.worker_file(settings), config=flow.config, until_end=until_end)
    raise typer.Exit(supervise(settings, host, stop_on_signals()).code)


def _report_missing_source(settings: Settings, declared: Flow) -> None:
    """Print why the source cannot be read yet. The worker tries again until it can, and writes to its own log only."""
    from contextlib import closing

    from millrace.flows.range_host.definition import places_of

    with closing(places_of(settings, declared)) as places:
        try:
            places.ends()
        except MillraceError as error:
            typer.echo(f"{error.code}: {error}. The worker tries again.", err=True)


@app.command()
def batch(
    context: JsonContext,
    name: StreamName,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="TICK|TIMESTAMP", help="Use rows after it. Default: where the stream begins."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TICK|TIMESTAMP", help="Use rows up to it. Default: now.")
    ] = None,
    file_format: FileFormat = None,
    output: Output = None,
) -> None:
    """Compute a stream's result over a range of time once, without changing its sink, position or state. Needs Java.

    The transform and the operator process what became visible in that range. The whole result is held in memory. A
    table shows 50 rows; the other formats write all.

    Example: `millrace flows batch flights_hourly --until 2026-11-21T10:15:00Z --output hours.parquet`
    """
    from millrace.flows.spark_host.frames import batch_of
    from millrace.message.ids import resolve_tick
    from millrace.runtime.spark.session import session

    settings = context.settings
    chosen = resolve_format(file_format, output, as_json=context.as_json)
    stream = stream_named(settings, name, "batch")
    begin, end = (None if each is None else resolve_tick(each) for each in (after, until))
    spark = session("millrace-batch", settings=settings)
    try:
        found = batch_of(spark, settings, stream, after=begin, until=end).toArrow()
    finally:
        spark.stop()
    if chosen == OutputFormat.TABLE:
        print_table(found.slice(0, TABLE_ROWS))
        if found.num_rows > TABLE_ROWS:
            typer.echo(f"{TABLE_ROWS} of {found.num_rows:,} rows")
        return
    write_output(found.to_reader(), chosen, output)


@app.command()
def start(context: JsonContext, name: Name, config: Config = None) -> None:
    """Start a flow in the background, unless it runs already. A process of it that ends or hangs is restarted.

    Under Airflow, the DAG of a stream does this. A flow with a schedule runs once, to what the source has now; its DAG
    does the same at its times.

    Example: `millrace flows start flights_hourly`
    """
    from millrace.flows.control import start_flow, start_streams

    settings = context.settings
    streams = streams_of(settings, name)
    if streams:
        from millrace.flows.spark_host.query import require_startable

        require_startable(settings, streams)
        found = start_streams(settings, name)
    else:
        flow = found_flow(settings, name, config)
        flow.require_own("resume")
        flow.declaration(settings)  # errors of the declaration end the command, not a worker that restarts
        _require_not_in_foreground(settings, flow)
        found = start_flow(settings, flow)
    print_facts({"run_id": found.run_id, "state": str(found.state), "log": str(found.log)}, as_json=context.as_json)


@app.command()
def stop(context: CommandContext, name: Name) -> None:
    """Stop a flow between two batches. Nothing is lost: a later start continues from there.

    Example: `millrace flows stop flights_hourly`
    """
    from millrace.flows.control import stop_flow

    settings = context.settings
    if streams_of(settings, name):
        from millrace.flows.spark_host.status import run_id

        typer.echo(f"{name} is {stop_flow(settings, run_id(name))}.")
        return
    from millrace.flows.range_host.observed import run_id as worker_run

    flow = found_flow(settings, name)
    flow.require_own("stop")
    _require_not_in_foreground(settings, flow)
    typer.echo(f"{flow.name} is {stop_flow(settings, worker_run(flow.name))}.")


@app.command()
def pause(context: CommandContext, name: Name) -> None:
    """Pause a flow until it is resumed.

    Neither Airflow nor a command starts a paused stream; the other streams of its group restart without it. Workers of
    a paused pipeline stay, and read nothing.

    Example: `millrace flows pause flights_hourly`
    """
    settings = context.settings
    flow = found_flow(settings, name)
    if flow.stream is None:
        _want(settings, flow, paused=True)
        typer.echo(f"{flow.name} is paused.")
        return
    from millrace.flows.control import pause_stream

    pause_stream(settings, name, flow.stream.job, paused=True)
    typer.echo(f"{name} is paused.")


@app.command()
def resume(context: CommandContext, name: Name) -> None:
    """Allow a paused flow to run again.

    Example: `millrace flows resume flights_hourly`
    """
    settings = context.settings
    flow = found_flow(settings, name)
    if flow.stream is None:
        _want(settings, flow, paused=False)
        typer.echo(f"{flow.name} is resumed.")
        return
    from millrace.flows.control import pause_stream

    runs = pause_stream(settings, name, flow.stream.job, paused=False).active
    typer.echo(f"{name} is resumed{'' if runs else ': start it, or wait for its DAG'}.")


def _want(settings: Settings, flow: NamedFlow, *, paused: bool) -> None:
    from millrace.flows.control import pause_workers

    flow.require_own("pause" if paused else "resume")
    pause_workers(settings, flow.name, paused=paused)


def _require_not_in_foreground(settings: Settings, flow: NamedFlow) -> None:
    """Raise PipelineBusy if a worker runs that nobody started in the background."""
    from millrace.flows.range_host.observed import observed, run_id
    from millrace.flows.status import processes_of

    active = processes_of(settings, run_id(flow.name)).active
    said = observed(settings, flow.name)
    if not active and said.pid:
        raise PipelineBusy(f"process {said.pid} runs {flow.name!r} in the foreground: end it there, by Ctrl-C")
