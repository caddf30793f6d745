"""``millrace get`` and ``millrace history``: rows of primary keys at a time tick, and their changes, without a JVM."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace.base.errors import InvalidArgument
from millrace.commands.parts.command_line import DATA_PANEL, CollectionName, JsonContext, find_collection, root
from millrace.commands.parts.output import FileFormat, Output, OutputFormat, print_table, resolve_format, write_output
from millrace.commands.read import plan_newest
from millrace.message.ids import resolve_span, resolve_tick

if TYPE_CHECKING:
    import pyarrow as pa

    from millrace.catalog.collection import CollectionInfo

PrimaryKeys = Annotated[
    list[str], typer.Argument(metavar="KEY…", help="Primary keys; `a,b` if the key has two fields.")
]
ColumnNames = Annotated[
    list[str] | None, typer.Option("--columns", metavar="NAME[,NAME…]", help="Only these columns, in this order.")
]
LongestWait = Annotated[
    float | None, typer.Option(min=0, help="Maximum wait for the streaming job, in seconds.", show_default=False)
]


@root.command(rich_help_panel=DATA_PANEL)
def get(
    context: JsonContext,
    name: CollectionName,
    keys: PrimaryKeys,
    at: Annotated[
        str | None,
        typer.Option(metavar="TICK|TIMESTAMP", help="Read as of this tick or time. Default: now."),
    ] = None,
    columns: ColumnNames = None,
    file_format: FileFormat = None,
    output: Output = None,
    wait: LongestWait = None,
) -> None:
    """Read the rows of primary keys, deletes applied, as of any time tick.

    Finds them by the key index of a published collection; other files are read as `millrace read` does.

    Example: `millrace get flights 17`

    Example: `millrace get prices LX318,2026-11-21 LX319,2026-11-21 --columns price`
    """
    from millrace.rpc.selection import name_list
    from millrace.tables.read.keys import read_keys

    found = find_collection(context.settings, name)
    wanted = _keys(found, keys)
    plan = plan_newest(context.settings, found, None if at is None else resolve_tick(at), wait)
    rows = read_keys(plan, wanted, columns=name_list(",".join(columns)) if columns else None)
    _written(context, rows, file_format, output)


@root.command(rich_help_panel=DATA_PANEL)
def history(
    context: JsonContext,
    name: CollectionName,
    keys: PrimaryKeys,
    after: Annotated[
        str | None,
        typer.Option(metavar="TICK|TIMESTAMP", help="Only changes after this tick or time. Default: all."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TICK|TIMESTAMP", help="Only changes up to this tick or time. Default: now."),
    ] = None,
    columns: ColumnNames = None,
    file_format: FileFormat = None,
    output: Output = None,
    wait: LongestWait = None,
) -> None:
    """Read what happened to the rows of primary keys, oldest first: inserts, upserts, deletes, retractions.

    Compaction and retention remove old changes. If some of the range are gone, it fails and names the earliest tick.

    Example: `millrace history flights 17`

    Example: `millrace history prices LX318,2026-11-21 --after 2026-11-20T00:00:00Z --columns price`
    """
    from millrace.rpc.selection import name_list
    from millrace.tables.read.key_history import read_key_history

    found = find_collection(context.settings, name)
    wanted = _keys(found, keys)
    begin, end = resolve_span(after, until)
    plan = plan_newest(context.settings, found, end, wait)
    rows = read_key_history(plan, wanted, after=begin, columns=name_list(",".join(columns)) if columns else None)
    _written(context, rows, file_format, output)


def _written(context: JsonContext, rows: pa.Table, file_format: OutputFormat | None, output: Path | None) -> None:
    chosen = resolve_format(file_format, output, as_json=context.as_json)
    if chosen == OutputFormat.TABLE:
        print_table(rows)
        return
    write_output(rows.to_reader(), chosen, output)


def _keys(collection: CollectionInfo, texts: list[str]) -> pa.RecordBatch:
    """Return keys from their texts. Raises InvalidArgument."""
    import pyarrow as pa

    schema = collection.schema.key_arrow()
    several = len(schema) > 1
    parts = [next(csv.reader([text]), [""]) if several else [text] for text in texts]
    for text, values in zip(texts, parts, strict=True):
        if len(values) != len(schema):
            raise InvalidArgument(f"{text!r} is not a key of {collection.name}: it has {', '.join(schema.names)}")
    try:
        fields = zip(schema, zip(*parts, strict=True), strict=True)
        columns = [pa.array(values).cast(each.type) for each, values in fields]
    except pa.ArrowException as error:
        wanted = ", ".join(f"{each.name} {each.type}" for each in schema)
        raise InvalidArgument(f"these are not keys of {collection.name} ({wanted}): {error}") from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)
