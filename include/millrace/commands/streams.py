"""``millrace streams``: list, check, run and manage declared streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.base.errors import InvalidArgument, InvalidStream, RunNotFound
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    CommandContext,
    JsonContext,
    command_group,
    exec_python,
    iso_time,
    print_facts,
    print_rows,
)
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

app = command_group("streams", OPERATE_PANEL, "Declared streams: list, validate, explain, run, pause, replay, upgrade.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a declared stream.")]


@app.command("list")
def list_streams(context: JsonContext) -> None:
    """List the declared streams with source, sink and state.

    Example: `millrace streams list`
    """
    from millrace.flows.spark_host.status import StreamStatus, flow_statuses

    rows = [StreamStatus.of(each).to_json() for each in flow_statuses(context.settings)]
    shown = ("name", "source", "sink", "guarantee", "job", "state", "rows", "lag_seconds")
    print_rows(rows, columns=shown, as_json=context.as_json, empty="No streams are declared.")


@app.command("status")
def show_status(
    context: JsonContext,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of a declared stream. Default: all.")
    ] = None,
) -> None:
    """Show rates, lag, watermark, state size, late rows and rejected rows of declared streams. NAME shows all details.

    Rows are counted from the start of the stream's process. The page Flows in Airflow shows the same as a graph.

    Example: `millrace streams status`
    """
    from millrace.flows.declare.discovery import declared_stream
    from millrace.flows.spark_host.status import StreamStatus, flow_statuses, status

    settings = context.settings
    if name is not None:
        facts = status(settings, declared_stream(settings, name)).to_json()
        print_facts(facts if context.as_json else facts | _moment(facts), as_json=context.as_json)
        return
    rows = [StreamStatus.of(each).to_json() for each in flow_statuses(settings)]
    shown = (
        "name",
        "state",
        "rows_per_second",
        "lag_seconds",
        "watermark",
        "rows",
        "out",
        "late",
        "rejected",
        "state_rows",
    )
    print_rows(rows, columns=shown, as_json=context.as_json, empty="No streams are declared.")


@app.command()
def validate(
    context: JsonContext,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of a declared stream. Default: all.")
    ] = None,
) -> None:
    """Check whether declared streams can run. Uses the catalog alone: starts nothing and needs no Java.

    Exits with code 1 if a stream cannot run. Without a name, checks the streams of the setting `stream_declarations`,
    or those of the demo if the setting names none.

    `millrace streams explain` also asks Spark which columns a transform returns, and whether state is bounded.

    Example: `millrace streams validate`
    """
    from millrace.flows.declare.checks import checked
    from millrace.flows.declare.discovery import declared_stream, declared_streams

    settings = context.settings
    if name is None:
        chosen = list((declared_streams(settings, shipped=False) or declared_streams(settings)).values())
    else:
        chosen = [declared_stream(settings, name)]
    rows: list[dict[str, Any]] = []
    for stream in chosen:
        found = checked(settings, stream)
        rows += [
            {"stream": stream.name, "level": each.level, "field": each.field, "words": each.words} for each in found
        ] or [{"stream": stream.name, "level": "ok", "field": "", "words": ""}]
    columns = ("stream", "level", "field", "words")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="No streams are declared.")
    wrong = sorted({row["stream"] for row in rows if row["level"] == "error"})
    if wrong:
        raise InvalidStream(f"cannot run: {', '.join(wrong)}")


@app.command()
def explain(context: JsonContext, name: Name) -> None:
    """Show a stream's declaration, state and query plan, and all problems in them. Needs Java.

    Exits with code 1 if the stream cannot run.

    Example: `millrace streams explain flights_hourly`
    """
    from millrace.flows.declare.checks import checked, require_runnable
    from millrace.flows.declare.discovery import declared_stream
    from millrace.flows.spark_host.frames import found_by_spark
    from millrace.flows.spark_host.status import status
    from millrace.runtime.spark.session import session

    settings = context.settings
    stream = declared_stream(settings, name)
    findings, plan = checked(settings, stream), ""
    if not any(each.level == "error" for each in findings):
        spark = session("millrace-explain", settings=settings)
        try:
            plan, more = found_by_spark(spark, settings, stream)
        finally:
            spark.stop()
        findings += [each for each in more if each not in findings]
    said = status(settings, stream).to_json()
    facts: dict[str, Any] = {
        **(said if context.as_json else said | _moment(said)),
        "declaration": stream.model_dump(mode="json", exclude_defaults=True),
        "findings": [f"{each.level}: {each}" for each in findings],
        "plan": plan,
    }
    print_facts(facts, as_json=context.as_json)
    require_runnable(stream, findings)


@app.command()
def run(
    context: CommandContext,
    name: Name,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Process what the source has now, then exit.")
    ] = False,
) -> None:
    """Run a stream or a group of streams in this process until Ctrl-C or SIGTERM. Needs Java.

    The current micro-batch is finished first.

    Example: `millrace streams run flights_hourly --available-now`
    """
    from millrace.flows.spark_host.query import require_startable, streams_of
    from millrace.runtime.launch.command import jobs_folder

    settings = context.settings
    require_startable(settings, streams_of(settings, name))
    exec_python([str(jobs_folder() / "stream.py"), name, *(["--available-now"] if available_now else [])], settings)


@app.command()
def batch(
    context: JsonContext,
    name: Name,
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

    Example: `millrace streams batch flights_hourly --until 2026-11-21T10:15:00Z --output hours.parquet`
    """
    from millrace.flows.declare.discovery import declared_stream
    from millrace.flows.spark_host.frames import batch_of
    from millrace.message.ids import resolve_tick
    from millrace.runtime.spark.session import session

    settings = context.settings
    chosen = resolve_format(file_format, output, as_json=context.as_json)
    stream = declared_stream(settings, name)
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
def start(context: JsonContext, name: Name) -> None:
    """Start a stream's job in the background, unless it runs already.

    Under Airflow, the stream's DAG does this, and restarts the job if it ends.

    Example: `millrace streams start flights_hourly`
    """
    from millrace.flows.spark_host.query import require_startable, streams_of
    from millrace.flows.spark_host.status import run_id
    from millrace.runtime.launch.launcher import Launcher

    settings = context.settings
    require_startable(settings, streams_of(settings, name))
    found = Launcher(settings).start(run_id(name), "stream", arguments=[name])
    print_facts({"run_id": found.run_id, "state": str(found.state), "log": str(found.log)}, as_json=context.as_json)


@app.command()
def stop(context: CommandContext, name: Name) -> None:
    """Stop a stream's job after the current micro-batch. Nothing is lost: a later start continues from there.

    Example: `millrace streams stop flights_hourly`
    """
    typer.echo(f"{name} is {_stopped(context.settings, name)}.")


@app.command()
def pause(context: CommandContext, name: Name) -> None:
    """Pause a stream: neither Airflow nor a command starts it until it is resumed.

    The other streams of its group restart without it.

    Example: `millrace streams pause flights_hourly`
    """
    from millrace.flows.declare.discovery import declared_stream
    from millrace.flows.spark_host.incarnations import Kept

    settings = context.settings
    stream = declared_stream(settings, name)
    Kept(settings, name).pause(paused=True)
    typer.echo(f"{name} is paused ({_stopped(settings, stream.job)}).")


@app.command()
def resume(context: CommandContext, name: Name) -> None:
    """Allow a paused stream to run again.

    Example: `millrace streams resume flights_hourly`
    """
    from millrace.flows.declare.discovery import declared_stream
    from millrace.flows.spark_host.incarnations import Kept

    settings = context.settings
    declared_stream(settings, name)
    Kept(settings, name).pause(paused=False)
    typer.echo(f"{name} is resumed: start it, or wait for its DAG.")


@app.command()
def replay(
    context: JsonContext,
    name: Name,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="TICK", help="Begin after this tick or time; 0 is the beginning."),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option("--snapshot", metavar="TICK", help="Begin with the rows visible at this tick, or `now`."),
    ] = None,
) -> None:
    """Restart a stopped stream from a tick or a snapshot, with a new checkpoint.

    The sink keeps its rows. Upserts and applied changes have the same result again. Appended rows are there twice,
    unless you delete them first.

    Example: `millrace streams replay flights_hourly --after 0`
    """
    from millrace.flows.declare.discovery import declared_stream
    from millrace.flows.spark_host.incarnations import Begun, Kept
    from millrace.message.ids import resolve_tick

    if (after is None) == (snapshot is None):
        raise InvalidArgument("say where the stream begins: give either --after or --snapshot")

    def place(text: str | None) -> int | str | None:
        return text if text in (None, "now") else resolve_tick(int(text) if text.isdigit() else text)

    settings = context.settings
    stream = declared_stream(settings, name)
    state = Kept(settings, name).replay(stream, Begun(after=place(after), snapshot=place(snapshot)))
    print_facts({"stream": name, "incarnation": state.incarnation}, as_json=context.as_json)


@app.command()
def upgrade(
    context: JsonContext,
    name: Name,
    keep_state: Annotated[
        bool,
        typer.Option(
            "--keep-state/--fresh-state",
            help="Continue with the checkpoint's state, or from its position without state.",
        ),
    ],
) -> None:
    """Accept the changed declaration of a stopped stream.

    Example: `millrace streams upgrade flights_hourly --keep-state`
    """
    from millrace.flows.declare.discovery import declared_stream
    from millrace.flows.spark_host.incarnations import Kept

    settings = context.settings
    state = Kept(settings, name).upgrade(declared_stream(settings, name), keep_state=keep_state)
    print_facts({"stream": name, "incarnation": state.incarnation}, as_json=context.as_json)


@app.command()
def letters(
    context: CommandContext,
    name: Annotated[str, typer.Argument(metavar="COLLECTION", help="Name of the collection to create.")],
) -> None:
    """Create a collection for dead letters: rows of streams that cannot be encoded as messages.

    Example: `millrace streams letters dead_letters`
    """
    from millrace.client.database import connect
    from millrace.flows.sinks.collection.poison import LETTERS

    with connect(settings=context.settings) as db:
        db.catalog.create_collection(name, LETTERS)
    typer.echo(f"Created {name} for dead letters.")


@app.command()
def redrive(context: JsonContext, name: Name) -> None:
    """Send the dead letters of a stopped stream to its sink again, and remove those that the sink accepts.

    Example: `millrace streams redrive flights_hourly`
    """
    from millrace.flows.declare.discovery import declared_stream
    from millrace.flows.spark_host.redrive import redrive as redriven

    settings = context.settings
    print_facts(redriven(settings, declared_stream(settings, name)), as_json=context.as_json)


def _moment(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the time of the last report as text, to print."""
    return {"at": None if facts["at"] is None else iso_time(round(facts["at"] * 1e3))}


def _stopped(settings: Settings, job: str) -> str:
    from millrace.flows.spark_host.status import run_id
    from millrace.runtime.launch.launcher import Launcher

    try:
        return str(Launcher(settings).stop(run_id(job)).state)
    except RunNotFound:
        return "not running"
