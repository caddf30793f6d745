"""``millrace groups``: show consumer groups, their members and lags; move or drop a group."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Literal

import typer

from millrace.commands.parts.command_line import (
    INSPECT_PANEL,
    JsonContext,
    command_group,
    iso_time,
    print_facts,
    print_json,
    print_rows,
)

app = command_group("groups", INSPECT_PANEL, "Show consumer groups, move and drop them.")

GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group.", show_default=False)]


@app.command(name="list")
def list_(context: JsonContext) -> None:
    """List the consumer groups with members and lag. `lag_s` is the age of the oldest message that is not done.

    Of a work queue with consumers: `tasks` that were read and are not done, those of them that consumers have, and the
    age of the oldest.

    Example: `millrace groups list`
    """
    from millrace.observe.observer import Observer

    with closing(Observer(context.settings)) as observer:
        found = observer.consumer_groups()
    rows = [
        {
            "group": each.group,
            "state": each.state,
            "mode": each.mode,
            "members": len(each.members),
            "idle": sum(not member.lanes for member in each.members),
            "channels": len(each.lanes),
            "lag_messages": each.lag_messages,
            "lag_s": each.lag_seconds,
            "tasks": None if each.queue is None else each.queue.tasks,
            "in_flight": None if each.queue is None else each.queue.in_flight,
            "oldest_s": None if each.queue is None else each.queue.oldest_seconds,
        }
        for each in found
    ]
    columns = (
        "group", "state", "mode", "members", "idle", "channels", "lag_messages", "lag_s", "tasks", "in_flight",
        "oldest_s",
    )  # fmt: skip
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
    if found.queue is not None:
        typer.echo("")
        consumers = [each.model_dump(exclude={"since"}) for each in found.queue.consumers]
        of_consumers = ("consumer", "client", "in_flight", "taken", "acknowledged")
        print_rows(consumers, columns=of_consumers, as_json=False, empty="The queue has no consumers.")
        typer.echo("")
        print_facts(found.queue.model_dump(exclude={"consumers"}), as_json=False)
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
    """Move a group: its next consumer starts after `--to`. Requires that no consumer of the group runs.

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


Letters = Annotated[
    str,
    typer.Option("--letters", metavar="COLLECTION", help="Its collection of dead letters.", show_default=False),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Only those whose reason contains it.")]


@app.command()
def letters(
    context: JsonContext,
    group: GroupName,
    of: Letters,
    reason: Reason = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most letters to show.")] = 100,
) -> None:
    """Show the dead letters of a work queue: tasks that were rejected, or delivered too often.

    Example: `millrace groups letters workers --letters jobs_dead`
    """
    from millrace.client.consume.dead_letters import dead_tasks
    from millrace.client.database import connect

    with connect(settings=context.settings, start=False) as database:
        found = dead_tasks(database, of, group=group, reason=reason, limit=limit)
    columns = ("id", "reason", "row")
    rows = found.select(columns).to_pylist()
    print_rows(rows, columns=columns, as_json=context.as_json, empty="There are no such letters.")


@app.command()
def redrive(
    context: JsonContext,
    group: GroupName,
    of: Letters,
    into: Annotated[
        str, typer.Option("--into", metavar="COLLECTION", help="The queue's collection.", show_default=False)
    ],
    reason: Reason = "",
) -> None:
    """Make the dead letters of a work queue tasks again. If it is interrupted, some are sent twice.

    Example: `millrace groups redrive workers --letters jobs_dead --into jobs`
    """
    from millrace.client.database import connect

    with connect(settings=context.settings, start=False) as database:
        count = database.redrive_tasks(of, group=group, into=into, reason=reason)
    print_facts({"redriven": count}, as_json=context.as_json)


@app.command()
def discard(
    context: JsonContext,
    group: GroupName,
    of: Letters,
    reason: Reason = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete the dead letters of a work queue.

    Example: `millrace groups discard workers --letters jobs_dead --reason "no such customer" --yes`
    """
    from millrace.client.database import connect

    if not yes:
        typer.confirm(f"Delete the dead letters of {group} in {of}?", abort=True)
    with connect(settings=context.settings, start=False) as database:
        count = database.discard_tasks(of, group=group, reason=reason)
    print_facts({"discarded": count}, as_json=context.as_json)
