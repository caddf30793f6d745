"""``millrace segments`` and ``millrace checkpoints``: the flusher's tables. Needs no server."""

from __future__ import annotations

from typing import Annotated

import typer

from millrace.base.errors import InvalidArgument
from millrace.catalog.sqlite_file import read_collections_by_id
from millrace.commands.parts.command_line import (
    INSPECT_PANEL,
    JsonContext,
    complete_collection,
    find_collection,
    print_rows,
    root,
    tick_time,
)

STATES = ("growing", "flushed", "dropped")


@root.command(rich_help_panel=INSPECT_PANEL)
def segments(
    context: JsonContext,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[COLLECTION]", help="Only segments of this collection.", autocompletion=complete_collection
        ),
    ] = None,
    state: Annotated[str | None, typer.Option(metavar="|".join(STATES), help="Only segments in this state.")] = None,
) -> None:
    """List segments with their state, rows and size.

    Example: `millrace segments flights --state flushed`
    """
    from millrace.storage.table import open_table
    from millrace.tables.collections.flush_tables import read_segments

    if state is not None and state not in STATES:
        raise InvalidArgument(f"no state {state!r}; states are {', '.join(STATES)}")
    settings = context.settings
    vchannels = None if name is None else find_collection(settings, name).vchannels
    table = read_segments(open_table(settings.segments_uri), vchannels=vchannels)
    known = read_collections_by_id(settings.data_dir, table["collection_id"].unique().to_pylist())
    names = {each.id: each.name for each in known.values()}
    partitions = {
        (each.id, number): partition for each in known.values() for partition, number in each.partitions.items()
    }
    rows = [
        row
        | {
            "collection": names.get(row["collection_id"], str(row["collection_id"])),
            "partition": partitions.get((row["collection_id"], row["partition_id"]), str(row["partition_id"])),
            "created": tick_time(row["created_tick"]),
            "since": tick_time(row["time_tick"]),
        }
        for row in table.to_pylist()
        if state is None or row["state"] == state
    ]
    columns = (
        "segment_id", "collection", "partition", "vchannel", "state", "rows", "bytes", "policy", "created", "since",
    )  # fmt: skip
    print_rows(rows, columns=columns, as_json=context.as_json, empty="No segments: the flusher has seen none yet.")


@root.command(rich_help_panel=INSPECT_PANEL)
def checkpoints(context: JsonContext) -> None:
    """Show the flusher's checkpoint of each PChannel.

    Example: `millrace checkpoints`
    """
    from millrace.storage.table import open_table
    from millrace.tables.collections.flush_tables import read_checkpoints

    path = context.settings.checkpoints_uri
    rows = [
        {
            "pchannel": name,
            "time_tick": found.time_tick,
            "time": tick_time(found.time_tick),
            "last_confirmed": str(found.confirmed),
            "term": found.term,
            "flush_ticks": found.flush_ticks,
        }
        for name, found in sorted(read_checkpoints(open_table(path)).items())
    ]
    columns = ("pchannel", "time_tick", "time", "last_confirmed", "term", "flush_ticks")
    print_rows(
        rows, columns=columns, as_json=context.as_json, empty="No checkpoints: the flusher has committed nothing yet."
    )
