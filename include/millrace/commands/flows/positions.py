"""Positions of flows: show and set them; replay and upgrade a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.errors import InvalidArgument
from millrace.commands.flows.group import Name, StreamName, app, found_flow, offsets, stopped_flow, stream_named
from millrace.commands.parts.command_line import JsonContext, print_facts, print_rows

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.flows.directory import NamedFlow


@offsets.command("show")
def show_offsets(context: JsonContext, name: Name) -> None:
    """Show the next position of each lane of a flow: an offset of a topic's partition, or a time tick.

    Example: `millrace flows offsets show flights`
    """
    settings = context.settings
    flow = found_flow(settings, name)
    if flow.stream is not None:
        from millrace.flows.spark_host.incarnations import Incarnations, position

        states = Incarnations(settings, name)
        found = position(states.checkpoint(states.state)) or {}
    else:
        from millrace.flows.range_host.positions import positions_of

        found = {task: each.position for task, each in positions_of(settings, flow.name).items()}
    _print_offsets(found, as_json=context.as_json)


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
        raise InvalidArgument("name the positions to set: either LANE=POSITION, or --reset TO")
    settings = context.settings
    flow = found_flow(settings, name)
    asked = dict(map(_lane, put or ()))
    if flow.stream is not None:
        if reset:
            raise InvalidArgument(f"a stream cannot be reset; replay it: `millrace flows replay {name} --after TICK`")
        from millrace.flows.spark_host.incarnations import Incarnations

        found = Incarnations(settings, name).move(flow.stream, asked)
    elif reset:
        found = _reset(settings, flow, reset)
    else:
        from millrace.flows.range_host.offsets import require_tasks
        from millrace.flows.range_host.offsets import set_offsets as put_offsets

        require_tasks(stopped_flow(settings, flow), asked)
        found = put_offsets(settings, flow.name, asked)
    _print_offsets(found, as_json=context.as_json)


def _lane(text: str) -> tuple[str, int]:
    lane, _, position = text.rpartition("=")
    if not lane or not (position.isascii() and position.isdigit()):
        raise InvalidArgument(
            f"{text[:100]!r} is not a position: give a lane and its next position, such as flights-0=17"
        )
    return lane, int(position)


def _print_offsets(found: dict[str, int], *, as_json: bool) -> None:
    rows = [{"lane": lane, "position": position} for lane, position in sorted(found.items())]
    print_rows(rows, columns=("lane", "position"), as_json=as_json, empty="It has read nothing yet.")


def _reset(settings: Settings, flow: NamedFlow, to: str) -> dict[str, int]:
    from millrace.flows.range_host.offsets import offsets_at
    from millrace.flows.range_host.offsets import set_offsets as put_offsets

    return put_offsets(settings, flow.name, offsets_at(settings, stopped_flow(settings, flow), to))


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
        raise InvalidArgument("name the begin of the flow: either --after or --snapshot")

    def place(text: str | None) -> int | str | None:
        return text if text in (None, "now") else resolve_tick(int(text) if text.isdigit() else text)

    settings = context.settings
    flow = found_flow(settings, name)
    if flow.stream is None:
        if after is None:
            raise InvalidArgument(f"the pipeline {flow.name!r} has no snapshots: give --after")
        place(after)
        print_facts(_reset(settings, flow, "earliest" if after == "0" else after), as_json=context.as_json)
        return
    from millrace.flows.spark_host.incarnations import Begun, Incarnations

    state = Incarnations(settings, name).replay(flow.stream, Begun(after=place(after), snapshot=place(snapshot)))
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
    from millrace.flows.spark_host.incarnations import Incarnations

    settings = context.settings
    state = Incarnations(settings, name).upgrade(stream_named(settings, name, "upgrade"), keep_state=keep_state)
    print_facts({"flow": name, "incarnation": state.incarnation}, as_json=context.as_json)
