"""Dead letters of flows, and records to put aside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.errors import InvalidArgument
from millrace.commands.flows.group import Config, Name, app, errors, found_flow
from millrace.commands.parts.command_line import CommandContext, JsonContext, print_facts, print_rows

if TYPE_CHECKING:
    from millrace.flows.declare.flow import Flow
    from millrace.flows.errors.letter import Letter
    from millrace.flows.errors.redrive import Redriven

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
    flow = found_flow(settings, name, config)
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
    flow = found_flow(settings, name, config)
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
    flow = found_flow(settings, name)
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
    flow = found_flow(settings, name)
    if flow.stream is not None:
        from millrace.flows.spark_host.skipped import skip_record as skip_in_stream

        skip_in_stream(settings, flow.stream, lane, position, row)
        return
    if row is not None:
        raise InvalidArgument(f"{name} runs in the range loop, where each record has a position: leave --row out")
    from millrace.flows.range_host.skipped import skip_record

    skip_record(settings, flow.name, lane, position)
    typer.echo(f"{flow.name} puts the record at {position} of {lane} aside when it comes to it.")
