"""``millrace read``: a collection as it is at a time tick, without a JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.errors import CollectionNotFound, LogUnavailable
from millrace.commands.parts.command_line import (
    DATA_PANEL,
    CollectionName,
    JsonContext,
    find_collection,
    iso_time,
    root,
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
from millrace.message.ids import resolve_tick, tick_physical_ms

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.catalog.collection import CollectionInfo
    from millrace.tables.read.plan import ReadPlan


@root.command(rich_help_panel=DATA_PANEL)
def read(
    context: JsonContext,
    name: CollectionName,
    at: Annotated[
        str | None,
        typer.Option(metavar="TICK|TIMESTAMP", help="Read as of this tick or time. Default: now."),
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--columns", metavar="NAME[,NAME…]", help="Only these columns, in this order.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="PREDICATE", help='Only rows for which this holds, such as "age >= 18".')
    ] = None,
    order_by: Annotated[
        list[str] | None,
        typer.Option("--order-by", metavar="NAME[,NAME…]", help="Sort by these columns; `age desc` sorts descending."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Maximum number of rows.")] = None,
    file_format: FileFormat = None,
    output: Output = None,
    wait: Annotated[
        float | None, typer.Option(min=0, help="Maximum wait for the streaming job, in seconds.", show_default=False)
    ] = None,
) -> None:
    """Read a collection's rows, deletes applied, as of any time tick.

    If no streaming job runs on this host, what the tables lack is read from the log.

    A table shows 50 rows unless --limit is given. The other formats stream all rows, and `millrace produce` reads them.

    Example: `millrace read flights --limit 5 --columns id,origin`

    Example: `millrace read flights --where "origin = 'JFK' AND dep_delay > 60" --order-by "dep_delay desc" --limit 10`

    Example: `millrace read flights --at 2026-11-21T10:15:00Z --output flights.parquet`
    """
    from millrace.rpc.selection import Selection
    from millrace.tables.read.arrow import count_rows, read_stream

    settings = context.settings
    chosen = resolve_format(file_format, output, as_json=context.as_json)
    if limit is None and chosen == OutputFormat.TABLE:
        limit = TABLE_ROWS
    selection = Selection.of(
        columns=",".join(columns) if columns else None,
        where=where,
        limit=limit,
        order_by=",".join(order_by) if order_by else None,
    )
    tick = None if at is None else resolve_tick(at)
    plan = plan_newest(settings, find_collection(settings, name), tick, wait)
    rows = read_stream(plan, selection=selection)
    if chosen == OutputFormat.TABLE:
        shown = rows.read_all()
        print_table(shown)
        if limit is not None and shown.num_rows == limit and (all_rows := count_rows(plan, where=where)) > limit:
            typer.echo(f"{limit:,} of {all_rows:,} rows")
        return
    write_output(rows, chosen, output)


def plan_newest(settings: Settings, found: CollectionInfo, tick: int | None, wait: float | None) -> ReadPlan:
    """Plan the read. A read of now for which rows are missing is planned as of the newest tick that is complete."""
    from millrace.client.append_client import AppendClient
    from millrace.runtime.heartbeat import STREAMING_NODE, query_runs
    from millrace.tables.read.freshness import plan_fresh
    from millrace.tables.read.plan import plan_read

    running = query_runs(settings, STREAMING_NODE)
    seconds = settings.read_deadline if wait is None else wait
    whole = True

    def on_missing(why: str) -> None:
        nonlocal whole
        whole = False
        if tick is None:
            typer.echo(f"Not the newest: {why}.", err=True)

    try:
        try:
            client = AppendClient.connect(settings.data_dir, start=False, deadline=settings.read_deadline)
        except LogUnavailable:
            on_missing("no log server runs, which alone knows what the tables lack (`millrace jobs run` starts it)")
            return plan_read(settings, found.id, at=tick, deadline=0.0)
        with client:
            return plan_fresh(
                settings,
                found.name,
                found.id,
                found.pchannels,
                client,
                at=tick,
                seconds=seconds,
                from_log=not running,
                on_missing=on_missing,
            )
    except CollectionNotFound as error:
        if tick is not None and whole:
            raise CollectionNotFound(
                f"{found.name} was not there at {iso_time(tick_physical_ms(tick))}: {error}. Read at a later moment"
            ) from None
        raise CollectionNotFound(
            f"{found.name} cannot be read: {error}. The coordinator knows it; the WAL gets it from the streaming job "
            "(`millrace status`, `millrace jobs run`)"
        ) from None
