"""``millrace flows``: list, check, run and manage flows, whichever host runs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.base.errors import InvalidArgument, InvalidStream, MillraceError, PipelineBusy
from millrace.base.extras import require_extras
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    CommandContext,
    CommandGroup,
    JsonContext,
    ReportingGroup,
    command_group,
    exec_python,
    iso_time,
    print_facts,
    print_json,
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
    from millrace.flows.declare.checks import Finding
    from millrace.flows.declare.flow import Flow
    from millrace.flows.directory import NamedFlow
    from millrace.flows.errors.letter import Letter
    from millrace.flows.errors.redrive import Redriven
    from millrace.flows.status import FlowStatus

app = command_group(
    "flows", OPERATE_PANEL, "Flows, from a source through a transform to a sink: streams on Spark, and pipelines."
)
errors = CommandGroup(help="Dead letters of flows.", cls=ReportingGroup, no_args_is_help=True)
app.add_typer(errors, name="errors")
offsets = CommandGroup(help="Positions of flows.", cls=ReportingGroup, no_args_is_help=True)
app.add_typer(offsets, name="offsets")

Name = Annotated[
    str,
    typer.Argument(
        metavar="FLOW", help="A declared flow, a pipeline that has run here, or the YAML or JSON file of a pipeline."
    ),
]
AnyName = Annotated[
    str | None, typer.Argument(metavar="[FLOW]", help="A flow, or the file of a pipeline. Default: all.")
]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="Name of a declared flow on Spark.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The declaration, YAML or JSON; ${env:NAME} for secrets.")]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A pipeline-config.yaml with the defaults.")
]
_LISTED: Final = ("name", "host", "source", "sink", "guarantee", "state", "rows_in", "lag_seconds", "lag_records")
_MEASURED: Final = (
    "name", "state", "rate", "lag_seconds", "lag_bytes", "lag_records", "watermark", "rows_in", "rows_out",
    "rows_error", "rows_late", "rows_filtered", "state_rows", "error",
)  # fmt: skip
_TASK: Final = (
    "task", "state", "position", "lag", "records_in", "records_out", "records_error", "records_filtered",
    "records_stale", "retries", "failures", "cause",
)  # fmt: skip


@app.command("list")
def list_flows(context: JsonContext) -> None:
    """List the flows with host, source, sink and state: declared streams, and pipelines that have run here.

    Example: `millrace flows list`
    """
    from millrace.flows.directory import flow_statuses

    rows = [each.model_dump(mode="json") for each in flow_statuses(context.settings)]
    print_rows(rows, columns=_LISTED, as_json=context.as_json, empty="There are no flows.")


@app.command("status")
def show_status(context: JsonContext, name: AnyName = None) -> None:
    """Show state, rates, lag, watermark, size of state, late rows and errors of flows. FLOW shows all details.

    Rows of a stream are counted since its process began; those of a pipeline since it was made. The page Flows in
    Airflow shows the same as a graph.

    Example: `millrace flows status`

    Example: `millrace flows status flights`
    """
    from millrace.flows.directory import flow_statuses, status_of

    settings = context.settings
    if name is None:
        rows = [each.model_dump(mode="json") for each in flow_statuses(settings)]
        print_rows(rows, columns=_MEASURED, as_json=context.as_json, empty="There are no flows.")
        return
    flow = _found(settings, name)
    facts, tasks = _facts(status_of(settings, flow), as_json=context.as_json), _tasks(settings, flow)
    if context.as_json:
        print_json(facts | ({} if flow.stream is not None else {"tasks": tasks}))
        return
    print_facts(facts, as_json=False)
    if flow.stream is None:
        print_rows(tasks, columns=_TASK, as_json=False, empty="It has no tasks yet.")


def _tasks(settings: Settings, flow: NamedFlow) -> list[dict[str, Any]]:
    from millrace.flows.range_host.observed import observed

    tasks = () if flow.stream is not None else observed(settings, flow.name).tasks
    return [each.model_dump(mode="json") for each in tasks]


@app.command()
def check(context: JsonContext, name: AnyName = None, config: Config = None) -> None:
    """Check whether flows can run, and show where, with which guarantee. Starts nothing and needs no Java or broker.

    Exits with code 1 if a flow cannot run. Without a name, checks the flows of the setting `flow_declarations`, or
    those of the demo if the setting names none.

    `millrace flows explain` also asks Spark which columns a transform returns, and whether state is bounded.

    Example: `millrace flows check`

    Example: `millrace flows check flights.yaml`
    """
    from millrace.flows.declare.discovery import declared_flows
    from millrace.flows.directory import NamedFlow

    settings = context.settings
    if name is None:
        every = declared_flows(settings, shipped=False) or declared_flows(settings)
        chosen = [NamedFlow(each, flow, config=config) for each, flow in every.items()]
    else:
        flow = _found(settings, name, config)
        if flow.declared is None:
            print_facts(_checked_flow(flow.declaration(settings)), as_json=context.as_json)
            return
        chosen = [flow]
    rows: list[dict[str, Any]] = []
    for each in chosen:
        assert each.declared is not None, "it was found"
        said = {"flow": each.name, "host": each.declared.host, "guarantee": each.declared.chosen_guarantee}
        rows += [
            said | {"level": found.level, "field": found.field, "words": found.words}
            for found in _checked(settings, each)
        ]
        if rows[-1:] == [] or rows[-1]["flow"] != each.name:
            rows.append(said | {"level": "ok", "field": "", "words": ""})
    columns = ("flow", "host", "guarantee", "level", "field", "words")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="No flows are declared.")
    wrong = sorted({row["flow"] for row in rows if row["level"] == "error"})
    if wrong:
        raise InvalidStream(f"cannot run: {', '.join(wrong)}")


@app.command("statements")
def capture_statements(
    context: CommandContext,
    name: Name,
    config: Config = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Print what removes all that a capture has in its database.")
    ] = False,
) -> None:
    """Print the SQL that makes the triggers of a flow whose source is of the kind `triggers`, for you to run.

    Reads the columns of the tables, and changes nothing. Run the statements again when the columns change. With
    --remove, prints the SQL that removes the triggers, or PostgreSQL's slot and publication of a capture.

    Example: `millrace flows statements orders.yaml`

    Example: `millrace flows statements orders.yaml --remove`
    """
    from millrace.flows.sources.postgres.model import PostgresSource
    from millrace.flows.sources.sql.connection import SqlConnection
    from millrace.flows.sources.triggers.model import TriggersSource
    from millrace.flows.sources.triggers.statements import removal, statements

    flow = _found(context.settings, name, config).declaration(context.settings)
    source, found = flow.source, list[str]()
    if isinstance(source, TriggersSource):
        with SqlConnection(source) as connection:
            found = (removal if remove else statements)(connection, source)
    elif isinstance(source, PostgresSource) and remove:
        from millrace.flows.sources.postgres.server import Server

        found = Server(source, flow.consumer_group).removal()
    elif not remove:
        raise InvalidArgument(f"the source of {name} is of the kind {source.kind}, and needs no triggers")
    for each in found:
        typer.echo(f"{each};\n")
    if not found:
        typer.echo(f"-- {flow.name} has nothing in its database")


@app.command()
def snapshot(context: CommandContext, name: Name, config: Config = None) -> None:
    """Let a capture of MariaDB or PostgreSQL read its tables anew, in place of what it gave before.

    A capture that lost its place in the database's log (CAPTURE_LOST) goes on by that within a minute. Another one
    begins the snapshot when it is started next.

    Example: `millrace flows snapshot orders`
    """
    from millrace.flows.sources.capture.feeder import ask_for_snapshot
    from millrace.flows.sources.capture.ticks import spool_folder
    from millrace.flows.sources.mariadb.model import MariaDbSource
    from millrace.flows.sources.postgres.model import PostgresSource

    settings = context.settings
    pipeline = _found(settings, name, config).declaration(settings)
    if not isinstance(pipeline.source, MariaDbSource | PostgresSource):
        raise InvalidArgument(f"the source of {name} is of the kind {pipeline.source.kind}, which has no snapshots")
    ask_for_snapshot(spool_folder(settings, pipeline.consumer_group))
    typer.echo(f"{pipeline.name} reads its tables anew when its engine starts next.")


@app.command()
def release(context: CommandContext, name: Name, config: Config = None) -> None:
    """End a stopped flow's capture: remove what it has in its database, and its spool.

    That is PostgreSQL's replication slot and publication, or the triggers and their table of changes. What the user of
    the flow may not remove is printed as SQL. Run this before you delete a flow that runs without the service, which
    does the same when it deletes one. A flow that is started again afterwards stops with LOG_REGRESSED, since changes
    are missing: give it a new id and a new collection.

    Example: `millrace flows release orders.yaml`
    """
    from millrace.flows.registry import release as release_source

    settings = context.settings
    flow = _stopped_flow(settings, _found(settings, name, config), "delete")
    release_source(flow.source, settings, group=flow.consumer_group)
    typer.echo(f"{flow.name} has nothing at its source any more.")


def _checked(settings: Settings, flow: NamedFlow) -> list[Finding]:
    """Return what is found of a declared flow without running it."""
    from millrace.flows.declare.checks import Finding, checked

    if flow.stream is not None:
        return checked(settings, flow.stream)
    try:
        problem = flow.declaration(settings).unordered()
    except MillraceError as error:
        return [Finding("error", "it", str(error))]
    return [] if problem is None else [Finding("error", problem.field, problem.message)]


def _checked_flow(declared: Flow) -> dict[str, Any]:
    from millrace.flows.declare.part import invalid

    if (problem := declared.unordered()) is not None:
        raise invalid([problem])
    collection = declared.errors.collection
    return {
        "pipeline": declared.name,
        "topics": ", ".join(declared.topics()["input"]) or getattr(declared.source, "topics_regex", ""),
        "source": declared.source.kind,
        "steps": len(declared.transform.steps),
        "sink": declared.sink.kind,
        "guarantee": declared.promise,
        **({"error topic": declared.errors_topic} if collection is None else {"dead letters": collection}),
    }


@app.command()
def explain(context: JsonContext, name: Name, config: Config = None) -> None:
    """Show a flow's declaration, state and problems; of a stream also its query plan, for which it needs Java.

    Exits with code 1 if the flow cannot run.

    Example: `millrace flows explain flights_hourly`
    """
    from millrace.flows.directory import status_of

    settings = context.settings
    flow = _found(settings, name, config)
    said = _facts(status_of(settings, flow), as_json=context.as_json)
    if flow.stream is not None:
        _explain_stream(settings, flow.stream, said, as_json=context.as_json)
        return
    declared = flow.declaration(settings)
    problem = declared.unordered()
    findings = [] if problem is None else [f"error: {problem.field}: {problem.message}"]
    facts = {**said, "declaration": declared.to_json(), "findings": findings}
    print_facts(facts, as_json=context.as_json)
    _checked_flow(declared)


def _explain_stream(settings: Settings, stream: Flow, said: dict[str, Any], *, as_json: bool) -> None:
    from millrace.flows.declare.checks import checked, require_runnable
    from millrace.flows.spark_host.frames import found_by_spark
    from millrace.runtime.spark.session import session

    findings, plan = checked(settings, stream), ""
    if not any(each.level == "error" for each in findings):
        spark = session("millrace-explain", settings=settings)
        try:
            plan, more = found_by_spark(spark, settings, stream)
        finally:
            spark.stop()
        findings += [each for each in more if each not in findings]
    facts: dict[str, Any] = {
        **said,
        "declaration": stream.to_json(),
        "findings": [f"{each.level}: {each}" for each in findings],
        "plan": plan,
    }
    print_facts(facts, as_json=as_json)
    require_runnable(stream, findings)


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
    streams = _streams_of(settings, name)
    if streams:
        from millrace.flows.spark_host.query import require_startable
        from millrace.runtime.launch.command import jobs_folder

        require_startable(settings, streams)
        bounded = until_end or any(each.scheduled for each in streams)
        exec_python([str(jobs_folder() / "stream.py"), name, *(["--available-now"] if bounded else [])], settings)
    flow = _found(settings, name, config)
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
    stream = _stream(settings, name, "batch")
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
def show(
    context: CommandContext,
    name: Name,
    samples: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SAMPLES]", help="Documents for a flow of steps, JSON, one a line.", show_default=False
        ),
    ] = None,
    config: Config = None,
) -> None:
    """Show a flow's declaration, with its host and guarantee, as JSON. With SAMPLES, the result of each of its steps.

    A declaration of an earlier build (a stream, or a pipeline) is shown in the form of flows. Writes nothing.

    Example: `millrace flows show flights_hourly`

    Example: `millrace flows show flights.yaml samples.jsonl`
    """
    if samples is None:
        flow = _found(context.settings, name, config)
        declared = flow.stream or flow.declaration(context.settings)
        print_json({"guarantee": declared.chosen_guarantee, **declared.to_json()})
        return
    declared = _without_spark(context.settings, name, config, "show")
    from millrace.flows.records import Record
    from millrace.flows.transform.transform import Transform

    made = Transform(declared)
    found: list[dict[str, Any]] = []
    for place, line in enumerate(samples.read_bytes().splitlines()):
        sample = made.show(Record("sample", 0, place, f"sample-{place}".encode(), line, 0))
        found.append(sample._asdict() | {"steps": [step._asdict() for step in sample.steps]})
    print_json(found)


@app.command()
def start(context: JsonContext, name: Name, config: Config = None) -> None:
    """Start a flow in the background, unless it runs already. A process of it that ends or hangs is restarted.

    Under Airflow, the DAG of a stream does this. A flow with a schedule runs once, to what the source has now; its DAG
    does the same at its times.

    Example: `millrace flows start flights_hourly`
    """
    from millrace.flows.control import start_flow, start_streams

    settings = context.settings
    streams = _streams_of(settings, name)
    if streams:
        from millrace.flows.spark_host.query import require_startable

        require_startable(settings, streams)
        found = start_streams(settings, name)
    else:
        flow = _found(settings, name, config)
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
    if _streams_of(settings, name):
        from millrace.flows.spark_host.status import run_id

        typer.echo(f"{name} is {stop_flow(settings, run_id(name))}.")
        return
    from millrace.flows.range_host.observed import run_id as worker_run

    flow = _found(settings, name)
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
    flow = _found(settings, name)
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
    flow = _found(settings, name)
    if flow.stream is None:
        _want(settings, flow, paused=False)
        typer.echo(f"{flow.name} is resumed.")
        return
    from millrace.flows.control import pause_stream

    runs = pause_stream(settings, name, flow.stream.job, paused=False).active
    typer.echo(f"{name} is resumed{'' if runs else ': start it, or wait for its DAG'}.")


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
    """Let a stopped flow read again from a tick, a time or a snapshot. Only a stream over a collection has snapshots.

    The sink keeps its rows. Upserts, applied changes and documents by id have the same result again. Appended rows are
    there twice, unless you delete them first. A stream gets a new checkpoint.

    Example: `millrace flows replay flights_hourly --after 0`
    """
    from millrace.message.ids import resolve_tick

    if (after is None) == (snapshot is None):
        raise InvalidArgument("say where the flow begins: give either --after or --snapshot")

    def place(text: str | None) -> int | str | None:
        return text if text in (None, "now") else resolve_tick(int(text) if text.isdigit() else text)

    settings = context.settings
    flow = _found(settings, name)
    if flow.stream is None:
        if after is None:
            raise InvalidArgument(f"the pipeline {flow.name!r} has no snapshots: give --after")
        place(after)
        print_facts(_reset(settings, flow, "earliest" if after == "0" else after), as_json=context.as_json)
        return
    from millrace.flows.spark_host.incarnations import Begun, Kept

    state = Kept(settings, name).replay(flow.stream, Begun(after=place(after), snapshot=place(snapshot)))
    print_facts({"flow": name, "incarnation": state.incarnation}, as_json=context.as_json)


@app.command()
def upgrade(
    context: JsonContext,
    name: StreamName,
    keep_state: Annotated[
        bool,
        typer.Option(
            "--keep-state/--fresh-state",
            help="Continue with the checkpoint's state, or from its position without state.",
        ),
    ],
) -> None:
    """Accept the changed declaration of a stopped stream. A pipeline needs none: it has no state.

    Example: `millrace flows upgrade flights_hourly --keep-state`
    """
    from millrace.flows.spark_host.incarnations import Kept

    settings = context.settings
    state = Kept(settings, name).upgrade(_stream(settings, name, "upgrade"), keep_state=keep_state)
    print_facts({"flow": name, "incarnation": state.incarnation}, as_json=context.as_json)


@app.command()
def kinds(context: JsonContext) -> None:
    """List the kinds of sources and sinks: those of this package and of packages that are installed beside it.

    Example: `millrace flows kinds`
    """
    require_extras("pipelines")
    from millrace.flows.registry import kinds_listed

    rows = kinds_listed()
    print_rows(rows, columns=("part", "kind", "package", "promise"), as_json=context.as_json, empty="no kinds")


# --- dead letters -----------------------------------------------------------------------------------------------------

Reason = Annotated[str, typer.Option(metavar="TEXT", help="Only letters whose reason contains it.")]
Step = Annotated[str, typer.Option(metavar="NAME", help="Only what failed in this step of a pipeline.")]
Kind = Annotated[str, typer.Option(metavar="KIND", help="Only failures of this kind, such as CAST, of a pipeline.")]

Lane = Annotated[str, typer.Option(metavar="LANE", help="Only records of this lane, such as flights-0.")]
Low = Annotated[int | None, typer.Option("--from", metavar="N", min=0, help="Only from this position of --lane on.")]
High = Annotated[int | None, typer.Option("--to", metavar="N", min=0, help="Only up to this position of --lane.")]


@errors.command("list")
def list_errors(
    context: JsonContext,
    name: Name,
    config: Config = None,
    step: Step = "",
    kind: Kind = "",
    reason: Reason = "",
    lane: Lane = "",
    low: Low = None,
    high: High = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=200, help="Number of letters at most.")] = 50,
) -> None:
    """List a flow's dead letters with their reasons, newest first; --json shows all fields.

    Example: `millrace flows errors list flights --kind CAST`
    """
    from millrace.flows.errors.selection import Selection

    settings = context.settings
    flow = _found(settings, name, config)
    chosen = Selection(step=step, kind=kind, reason=reason, lane=lane, low=low, high=high)
    found: list[Letter]
    if flow.stream is not None:
        from millrace.flows.errors.letter import stream_letters

        _require_no_steps(flow.stream, step, kind)
        found = stream_letters(settings, flow.stream, chosen, limit=limit)
    else:
        from millrace.flows.errors.letter import of_topic
        from millrace.flows.errors.listing import error_page

        found = of_topic(flow.name, error_page(settings, flow.declaration(settings), chosen, limit=limit).errors)
    rows = [each.model_dump(mode="json") for each in found]
    columns = ("id", "stage", "step", "kind", "reason", "lane", "position", "payload")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="There are no such letters.")


@errors.command("redrive")
def redrive_errors(
    context: JsonContext,
    name: Name,
    config: Config = None,
    step: Step = "",
    kind: Kind = "",
    reason: Reason = "",
    lane: Lane = "",
    low: Low = None,
    high: High = None,
    again: Annotated[
        bool, typer.Option("--again", help="From the beginning of an error topic: what was redriven before, too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
) -> None:
    """Send a flow's dead letters through it again, as it is declared now. Repeating it is idempotent.

    A stream has to be stopped; letters that its sink accepts are removed. Records of its source that did not decode are
    read again when it runs next. Records of an error topic stay there.

    Example: `millrace flows errors redrive flights.yaml --step 0.cast --dry-run`
    """
    from millrace.flows.errors.selection import Selection

    settings = context.settings
    flow = _found(settings, name, config)
    chosen = Selection(step=step, kind=kind, reason=reason, lane=lane, low=low, high=high)
    report: Redriven
    if flow.stream is not None:
        from millrace.flows.spark_host.redrive import redrive

        _require_no_steps(flow.stream, step, kind)
        report = redrive(settings, flow.stream, chosen, again=again, dry_run=dry_run)
    else:
        from millrace.flows.errors.redrive import redrive as redriven

        report = redriven(settings, flow.declaration(settings), chosen, again=again, dry_run=dry_run)
    print_facts(report._asdict(), as_json=context.as_json)


def _require_no_steps(stream: Flow, step: str, kind: str) -> None:
    if (step or kind) and not stream.errors_in_topic:
        raise InvalidArgument(
            "letters of a stream in a collection have no step and no kind: select by --reason, or take all"
        )


@errors.command("create")
def create_letters(
    context: CommandContext,
    name: Annotated[str, typer.Argument(metavar="COLLECTION", help="Name of the collection to create.")],
) -> None:
    """Create a collection for dead letters.

    Example: `millrace flows errors create dead_letters`
    """
    from millrace.client.database import connect
    from millrace.flows.sinks.collection.poison import LETTERS

    with connect(settings=context.settings) as db:
        db.catalog.create_collection(name, LETTERS)
    typer.echo(f"Created {name} for dead letters.")


@errors.command("reset")
def reset_errors(context: CommandContext, name: Name) -> None:
    """Begin the count of a flow's failed records anew (`errors.limit`, `errors.in_a_row`). Its dead letters stay.

    A flow that stopped with ERROR_LIMIT_EXCEEDED can be started again then. A restart through the service does this.

    Example: `millrace flows errors reset flights`
    """
    settings = context.settings
    flow = _found(settings, name)
    if flow.stream is not None:
        from millrace.flows.spark_host.error_window import reset_window

        reset_window(settings, flow.stream)
        typer.echo(f"The count of {flow.name} begins anew.")
        return
    from millrace.flows.range_host.positions import reset_windows

    lanes = reset_windows(settings, flow.name)
    typer.echo(f"The count of {flow.name} begins anew ({', '.join(lanes) or 'it was empty'}).")


@app.command()
def skip(
    context: CommandContext,
    name: Name,
    lane: Annotated[str, typer.Argument(metavar="LANE", help="Such as flights-0.")],
    position: Annotated[int, typer.Argument(metavar="POSITION", help="Of a topic the offset.", min=0)],
    row: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Of a flow on Spark: row N that its sink gets of micro-batch POSITION; LANE is stream-NAME.",
        ),
    ] = None,
) -> None:
    """Put a record aside, as a dead letter, without transforming or writing it.

    The flow may run. It must not have passed the record. A declaration names such records in `errors.skip`.

    Example: `millrace flows skip flights flights-0 17`
    """
    settings = context.settings
    flow = _found(settings, name)
    if flow.stream is not None:
        from millrace.flows.spark_host.skipped import skip_record as skip_in_stream

        skip_in_stream(settings, flow.stream, lane, position, row)
        return
    if row is not None:
        raise InvalidArgument(f"{name} runs in the range loop, where each record has a position: leave --row out")
    from millrace.flows.range_host.skipped import skip_record

    skip_record(settings, flow.name, lane, position)
    typer.echo(f"{flow.name} puts the record at {position} of {lane} aside when it comes to it.")


# --- positions --------------------------------------------------------------------------------------------------------


@offsets.command("show")
def show_offsets(context: JsonContext, name: Name) -> None:
    """Show the next position of each lane of a flow: an offset of a topic's partition, or a time tick.

    Example: `millrace flows offsets show flights`
    """
    settings = context.settings
    flow = _found(settings, name)
    if flow.stream is not None:
        from millrace.flows.spark_host.incarnations import Kept, position

        kept = Kept(settings, name)
        found = position(kept.checkpoint(kept.state)) or {}
    else:
        from millrace.flows.range_host.positions import positions_of

        found = {task: each.position for task, each in positions_of(settings, flow.name).items()}
    _print_offsets(found, as_json=context.as_json)


@app.command()
def ticks(
    context: JsonContext,
    name: Name,
    transaction: Annotated[
        str, typer.Option("--transaction", metavar="ID", help="Only the first tick that holds this one: a GTID.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="The newest N.", min=1)] = 20,
) -> None:
    """List the ticks at which a captured database's collections hold whole transactions of it.

    Example: `millrace flows ticks shop`

    Example: `millrace flows ticks shop --transaction 0-1-4711`
    """
    from millrace.flows.sources.capture.ticks import recorded_ticks, tick_of

    settings = context.settings
    flow = _found(settings, name)
    found = (
        [tick_of(settings, flow.name, transaction)] if transaction else recorded_ticks(settings, flow.name, limit=limit)
    )
    rows = [
        {
            "tick": each.tick,
            "transaction": each.mark.source or "snapshot",
            "source_time": iso_time(each.mark.moment) if each.mark.moment else "",
        }
        for each in found
    ]
    print_rows(
        rows, columns=("tick", "transaction", "source_time"), as_json=context.as_json, empty="None is recorded yet."
    )


@offsets.command("set")
def set_offsets(
    context: JsonContext,
    name: Name,
    put: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LANE=POSITION]...", help="Such as flights-0=17.", show_default=False),
    ] = None,
    reset: Annotated[
        str, typer.Option("--reset", metavar="TO", help="earliest, latest, or a moment such as 2026-11-21T13:00.")
    ] = "",
) -> None:
    """Set the next position of some lanes of a stopped flow, or reset all lanes of a pipeline.

    A stream gets a new checkpoint without state; `millrace flows replay` lets it begin at a time.

    Example: `millrace flows offsets set flights flights-0=17`

    Example: `millrace flows offsets set flights --reset earliest`
    """
    if bool(put) == bool(reset):
        raise InvalidArgument("say which positions to set: either LANE=POSITION, or --reset TO")
    settings = context.settings
    flow = _found(settings, name)
    asked = dict(map(_lane, put or ()))
    if flow.stream is not None:
        if reset:
            raise InvalidArgument(f"a stream begins elsewhere by replay: `millrace flows replay {name} --after TICK`")
        from millrace.flows.spark_host.incarnations import Kept

        found = Kept(settings, name).move(flow.stream, asked)
    elif reset:
        found = _reset(settings, flow, reset)
    else:
        from millrace.flows.range_host.offsets import require_tasks
        from millrace.flows.range_host.offsets import set_offsets as put_offsets

        require_tasks(_stopped_flow(settings, flow), asked)
        found = put_offsets(settings, flow.name, asked)
    _print_offsets(found, as_json=context.as_json)


def _lane(text: str) -> tuple[str, int]:
    lane, _, position = text.rpartition("=")
    if not lane or not (position.isascii() and position.isdigit()):
        raise InvalidArgument(f"{text[:100]!r} is no position: give a lane and its next position, such as flights-0=17")
    return lane, int(position)


def _print_offsets(found: dict[str, int], *, as_json: bool) -> None:
    rows = [{"lane": lane, "position": position} for lane, position in sorted(found.items())]
    print_rows(rows, columns=("lane", "position"), as_json=as_json, empty="It has read nothing yet.")


def _reset(settings: Settings, flow: NamedFlow, to: str) -> dict[str, int]:
    from millrace.flows.range_host.offsets import offsets_at
    from millrace.flows.range_host.offsets import set_offsets as put_offsets

    return put_offsets(settings, flow.name, offsets_at(settings, _stopped_flow(settings, flow), to))


def _stopped_flow(settings: Settings, flow: NamedFlow, command: str = "offsets") -> Flow:
    """Return the pipeline, which no worker runs. Raises PipelineBusy."""
    from millrace.flows.directory import status_of
    from millrace.flows.range_host.offsets import require_no_members
    from millrace.flows.status import FlowState

    flow.require_own(command)
    if (state := status_of(settings, flow).state) not in (FlowState.NEW, FlowState.STOPPED, FlowState.FAILED):
        raise PipelineBusy(f"{flow.name!r} is {state}: stop it first, since it uses what this changes")
    declared = flow.declaration(settings)
    require_no_members(settings, declared)
    return declared


# --- which flow -------------------------------------------------------------------------------------------------------


def _found(settings: Settings, name: str, config: Path | None = None) -> NamedFlow:
    from millrace.flows.directory import SUFFIXES, find_flow

    if name.endswith(SUFFIXES):
        require_extras("pipelines")
    return find_flow(settings, name, config=config)


def _streams_of(settings: Settings, name: str) -> list[Flow]:
    """Return the streams of the job `name`: one, or those of a group. Empty if no stream has that name or group."""
    from millrace.flows.declare.discovery import declared_flows
    from millrace.flows.directory import SUFFIXES

    if name.endswith(SUFFIXES):
        return []
    known = declared_flows(settings, host="spark")
    return [each for each in known.values() if each.job == name] or [each for each in (known.get(name),) if each]


def _stream(settings: Settings, name: str, command: str) -> Flow:
    flow = _found(settings, name)
    if flow.stream is None:
        raise InvalidArgument(f"{name!r} is a pipeline, and `{command}` is for streams")
    return flow.stream


def _without_spark(settings: Settings, name: str, config: Path | None, command: str) -> Flow:
    flow = _found(settings, name, config)
    if flow.stream is not None:
        raise InvalidArgument(f"{name!r} is a stream, and `{command}` is for pipelines")
    return flow.declaration(settings)


def _facts(status: FlowStatus, *, as_json: bool) -> dict[str, Any]:
    """Return a status to print: for people, with moments as text."""
    facts = status.model_dump(mode="json")
    if as_json:
        return facts
    return facts | {name: facts[name] and iso_time(round(facts[name] * 1e3)) for name in ("at", "since")}


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
