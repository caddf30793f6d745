"""``millrace rebuild``: the aggregates of an event store, folded anew from their events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.base.errors import InvalidArgument
from millrace.commands.parts.command_line import (
    EXIT_VERIFICATION_FAILED,
    INSPECT_PANEL,
    CollectionName,
    JsonContext,
    print_rows,
    root,
)

if TYPE_CHECKING:
    from millrace.streams.sourcing.aggregate import Aggregate


@root.command(rich_help_panel=INSPECT_PANEL)
def rebuild(
    context: JsonContext,
    name: CollectionName,
    aggregate: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="The aggregate, in a module that Python finds (PYTHONPATH).")
    ],
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY…]", help="Show the states of these aggregates instead.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="TICK|TIMESTAMP", help="As of this tick or time. Default: now."),
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="Divide the memory by this; read all events so often.")] = 1,
    digest: Annotated[
        str | None, typer.Option(metavar="HEX", help="Fail with exit code 3 unless the digest is this.")
    ] = None,
) -> None:
    """Fold the aggregates of an event store from their events; print their number and the digest of their states.

    The digest is equal wherever and whenever you rebuild at a tick. Snapshots are not used. `millrace history` shows
    the events of an aggregate.

    Example: `millrace rebuild payments event_sourcing:ACCOUNTS --at 2026-11-21T10:15:00Z`

    Example: `millrace rebuild payments event_sourcing:ACCOUNTS A-17 B-2`
    """
    from millrace.client.database import connect
    from millrace.streams.sourcing.store import EventStore

    found = _named(aggregate)
    if keys and (digest is not None or passes > 1):
        raise InvalidArgument("--digest and --passes are for all aggregates: give no keys")
    with connect(settings=context.settings) as database:
        store = EventStore(database, database.collection(name), found)
        rows: list[dict[str, Any]]
        if keys:
            loaded = store.load_all(keys, at=at)
            rows = [
                {"aggregate": each.key, "version": each.version, "state": json.loads(found.encode(each.state))}
                for each in loaded.values()
            ]
        else:
            made = store.rebuild(at=at, passes=passes)
            rows = [{name: getattr(made, name) for name in ("tick", "aggregates", "events", "digest")}]
    print_rows(rows, columns=list(rows[0]), as_json=context.as_json, empty="")
    if digest is not None and rows[0]["digest"] != digest.lower():
        typer.echo(f"the digest is {rows[0]['digest']}, not {digest}", err=True)
        raise typer.Exit(EXIT_VERIFICATION_FAILED)


def _named(text: str) -> Aggregate[Any]:
    """Return the aggregate ``module:name``. Raises InvalidArgument."""
    from importlib import import_module

    from millrace.streams.sourcing.aggregate import Aggregate

    module, _, attribute = text.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # the module is the user's code and may raise anything
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        words = f"there is no aggregate {text!r} ({said}): name it as module:name, and its folder in PYTHONPATH"
        raise InvalidArgument(words) from None
    if not isinstance(found, Aggregate):
        raise InvalidArgument(f"{text} is of type {type(found).__name__}, not a millrace.Aggregate")
    return found
