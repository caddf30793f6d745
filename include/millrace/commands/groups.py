"""``millrace groups``: consumer groups, their members and lags; put one elsewhere, or forget it."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Literal

import typer

from millrace.commands.parts.command_line import (
    INSPECT_PANEL,
    JsonContext,
    command_group,
    iso_time,
    print_json,
    print_rows,
)

app = command_group("groups", INSPECT_PANEL, "Show consumer groups, move and drop them.")

GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.", show_default=False)]


@app.command(name="list")
def list_(context: JsonContext) -> None:
    """List the consumer groups with members and lag. `lag_s` is the age of the oldest message that is not done.

    Example: `millrace groups list`
    """
    from millrace.observe.observer import Observer

    with closing(Observer(context.settings)) as observer:
        found = observer.consumer_groups()
    rows = [
        {
            "group": each.group,
            "state": each.state,
            "members": len(each.members),
            "idle": sum(not member.lanes for member in each.members),
            "channels": len(each.lanes),
            "lag_messages": each.lag_messages,
            "lag_s": each.lag_seconds,
        }
        for each in found
    ]
    columns = ("group", "state", "members", "idle", "channels", "lag_messages", "lag_s")
    print_rows(rows, columns=columns, as_json=context.as_json, empty="There are no consumer groups.")


@app.command()
def show(context: JsonContext, group: GroupName) -> None:
    """Show one group: each channel with its member, position and lag, and members without a channel with the reason.

    Example: `millrace groups show mailer`
    """
    from millrace.base.errors import InvalidArgument
    from millrace.observe.observer import Observer

    with closing(Observer(context.settings)) as observer:
        found = next((each for each in observer.consumer_groups() if each.group == group), None)
    if found is None:
        raise InvalidArgument(f"there is no consumer group {group[:100]!r}: `millrace groups list` shows them")
    if context.as_json:
        print_json(found.model_dump())
        return
    clients = {each.member: each.client for each in found.members}
    rows = [
        {
            "channel": each.lane,
            "member": each.holder[:8],
            "client": clients.get(each.holder, ""),
            "tick": each.position_tick,
            "time": None if each.position_time is None else iso_time(int(each.position_time * 1000)),
            "lag_messages": each.lag_messages,
            "lag_s": each.lag_seconds,
        }
        for each in found.lanes
    ]
    columns = ("channel", "member", "client", "tick", "time", "lag_messages", "lag_s")
    print_rows(rows, columns=columns, as_json=False, empty="The group has no positions.")
    for member in found.members:
        if not member.lanes:
            typer.echo(f"{member.member[:8]} ({member.client}) is idle: {member.reason}")


@app.command()
def reset(
    context: JsonContext,
    group: GroupName,
    to: Annotated[
        str, typer.Option("--to", metavar="earliest|latest|TICK|TIMESTAMP", help="Where it starts.", show_default=False)
    ],
    collection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of this collection's channels. Default: all that the group has positions on."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the new positions only.")] = False,
) -> None:
    """Put a group elsewhere: its next consumer starts after that moment. Only while no consumer of it runs.

    Example: `millrace groups reset mailer --to latest`

    Example: `millrace groups reset mailer --to 2026-11-27T04:00:00Z --dry-run`
    """
    from millrace.client.database import connect

    where: int | str | Literal["earliest", "latest"] = int(to) if to.isascii() and to.isdecimal() else to
    with connect(settings=context.settings, start=False) as database:
        found = database.reset_group(group, to=where, collection=collection, dry_run=dry_run)
    rows = [{"channel": lane, "tick": tick} for lane, tick in found.items()]
    print_rows(rows, columns=("channel", "tick"), as_json=context.as_json, empty="")


@app.command()
def drop(context: JsonContext, group: GroupName) -> None:
    """Forget a group and its positions. Only while no consumer of it runs.

    Example: `millrace groups drop mailer`
    """
    from millrace.client.database import connect

    with connect(settings=context.settings, start=False) as database:
        database.drop_group(group)
    if context.as_json:
        print_json({"dropped": group})
    else:
        typer.echo(f"Dropped {group}.")
