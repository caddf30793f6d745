"""What flows there are, what their declarations say, and how they fare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.base.errors import InvalidStream, MetaUnavailable, MillraceError, StreamNotFound
from millrace.base.extras import require_extras
from millrace.commands.flows.group import AnyName, Config, Name, app, found_flow, pipeline_named
from millrace.commands.parts.command_line import (
    CommandContext,
    JsonContext,
    iso_time,
    print_facts,
    print_json,
    print_rows,
)

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.flows.declare.checks import Finding
    from millrace.flows.declare.flow import Flow
    from millrace.flows.directory import NamedFlow
    from millrace.flows.status import FlowStatus

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

    rows = [each.model_dump(mode="json") for each in _everywhere(context.settings, flow_statuses(context.settings))]
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
        rows = [each.model_dump(mode="json") for each in _everywhere(settings, flow_statuses(settings))]
        print_rows(rows, columns=_MEASURED, as_json=context.as_json, empty="There are no flows.")
        return
    try:
        flow = found_flow(settings, name)
        status, tasks, on_spark = status_of(settings, flow), _tasks(settings, flow), flow.stream is not None
    except StreamNotFound:
        if name not in _running(settings):
            raise
        status, tasks, on_spark = None, [], False
    if not on_spark and (status is None or not _is_here(status)) and name in _running(settings):
        from millrace.flows.range_host.answers import asked_status

        status, details = asked_status(settings, name)
        tasks = [each.model_dump(mode="json") for each in details.tasks]
    assert status is not None, "it was found, or asked for"
    facts = _facts(status, as_json=context.as_json)
    if context.as_json:
        print_json(facts | ({} if on_spark else {"tasks": tasks}))
        return
    print_facts(facts, as_json=False)
    if not on_spark:
        print_rows(tasks, columns=_TASK, as_json=False, empty="It has no tasks yet.")


def _is_here(status: FlowStatus) -> bool:
    from millrace.flows.status import FlowState

    return status.state.live or status.state in (FlowState.STARTING, FlowState.PAUSED)


def _running(settings: Settings) -> set[str]:
    """Return the flows that workers of any machine run; those of other machines need a meta store."""
    if not settings.meta_store:
        return set()
    from millrace.flows.requests import running_flows

    try:
        return {name for name, workers in running_flows(settings).items() if workers}
    except MetaUnavailable as error:
        typer.echo(f"flows of other machines are not shown: {error}", err=True)
        return set()


def _everywhere(settings: Settings, known: list[FlowStatus]) -> list[FlowStatus]:
    """Return the statuses with those of flows that other machines run, by their workers' answers."""
    here = {each.name for each in known if each.host == "spark" or _is_here(each)}
    others = sorted(_running(settings) - here)
    if not others:
        return known
    from millrace.flows.range_host.answers import asked_statuses

    found = {each.name: each for each in known} | asked_statuses(settings, others)
    return sorted(found.values(), key=lambda each: (each.name, each.host))


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
        flow = found_flow(settings, name, config)
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
    flow = found_flow(settings, name, config)
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
        flow = found_flow(context.settings, name, config)
        declared = flow.stream or flow.declaration(context.settings)
        print_json({"guarantee": declared.chosen_guarantee, **declared.to_json()})
        return
    declared = pipeline_named(context.settings, name, config, "show")
    from millrace.flows.records import Record
    from millrace.flows.transform.transform import Transform

    made = Transform(declared)
    found: list[dict[str, Any]] = []
    for place, line in enumerate(samples.read_bytes().splitlines()):
        sample = made.show(Record("sample", 0, place, f"sample-{place}".encode(), line, 0))
        found.append(sample._asdict() | {"steps": [step._asdict() for step in sample.steps]})
    print_json(found)


@app.command()
def kinds(context: JsonContext) -> None:
    """List the kinds of sources and sinks: those of this package and of packages that are installed beside it.

    Example: `millrace flows kinds`
    """
    require_extras("pipelines")
    from millrace.flows.registry import kinds_listed

    rows = kinds_listed()
    print_rows(rows, columns=("part", "kind", "package", "promise"), as_json=context.as_json, empty="no kinds")


def _facts(status: FlowStatus, *, as_json: bool) -> dict[str, Any]:
    """Return a status to print: for people, with moments as text."""
    facts = status.model_dump(mode="json")
    if as_json:
        return facts
    return facts | {name: facts[name] and iso_time(round(facts[name] * 1e3)) for name in ("at", "since")}
