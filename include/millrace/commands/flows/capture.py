"""Captures of a database: statements to run there, snapshots, release, recorded ticks."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.base.errors import InvalidArgument
from millrace.commands.flows.group import Config, Name, app, found_flow, name_anywhere, stopped_flow
from millrace.commands.parts.command_line import CommandContext, JsonContext, iso_time, print_rows


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

    flow = found_flow(context.settings, name, config).declaration(context.settings)
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
    begins the snapshot when it is started next. With a meta store this works from any machine of the deployment.

    Example: `millrace flows snapshot orders`
    """
    from millrace.flows.sources.capture.feeder import ask_for_snapshot
    from millrace.flows.sources.mariadb.model import MariaDbSource
    from millrace.flows.sources.postgres.model import PostgresSource

    settings = context.settings
    pipeline = found_flow(settings, name, config).declaration(settings)
    if not isinstance(pipeline.source, MariaDbSource | PostgresSource):
        raise InvalidArgument(f"the source of {name} is of the kind {pipeline.source.kind}, which has no snapshots")
    ask_for_snapshot(settings, pipeline.name, pipeline.consumer_group)
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
    flow = stopped_flow(settings, found_flow(settings, name, config), "delete")
    release_source(flow.source, settings, group=flow.consumer_group)
    typer.echo(f"{flow.name} has nothing at its source any more.")


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

    With a meta store this works from any machine of the deployment.

    Example: `millrace flows ticks shop`

    Example: `millrace flows ticks shop --transaction 0-1-4711`
    """
    from millrace.flows.sources.capture.ticks import recorded_ticks, tick_of

    settings = context.settings
    flow = name_anywhere(settings, name)
    found = [tick_of(settings, flow, transaction)] if transaction else recorded_ticks(settings, flow, limit=limit)
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
