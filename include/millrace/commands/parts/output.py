"""The destination and format of a command's rows, and the options for them."""

from __future__ import annotations

import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.base.errors import InvalidArgument, MillraceError
from millrace.commands.parts.command_line import print_rows

if TYPE_CHECKING:
    import pyarrow as pa

TABLE_ROWS: Final = 50
"""Rows of a table on the screen unless --limit says otherwise."""


class OutputFormat(StrEnum):
    """Format of the output."""

    TABLE = "table"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"


_SUFFIXES: Final = {
    ".jsonl": OutputFormat.JSONL,
    ".ndjson": OutputFormat.JSONL,
    ".json": OutputFormat.JSONL,
    ".csv": OutputFormat.CSV,
    ".parquet": OutputFormat.PARQUET,
    ".pq": OutputFormat.PARQUET,
    ".arrow": OutputFormat.ARROW,
    ".feather": OutputFormat.ARROW,
}

FileFormat = Annotated[
    OutputFormat | None, typer.Option("--format", help="Of the output. Without it: by --output's suffix, else a table.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file.")]


def resolve_format(asked: OutputFormat | None, output: Path | None, *, as_json: bool) -> OutputFormat:
    """Return the output format: the one asked for, else JSON lines with --json, else by the file's suffix.

    Raises InvalidArgument or typer.BadParameter if the destination cannot take the format.
    """
    chosen = asked or (OutputFormat.JSONL if as_json else _format_of(output))
    if chosen in (OutputFormat.PARQUET, OutputFormat.ARROW) and output is None and sys.stdout.isatty():
        raise typer.BadParameter(f"{chosen.title()} is binary: give --output FILE, or send stdout to a file")
    if chosen == OutputFormat.TABLE and output is not None:
        raise InvalidArgument("a table is for the screen: --format jsonl, csv, parquet or arrow writes a file")
    return chosen


def _format_of(output: Path | None) -> OutputFormat:
    if output is None:
        return OutputFormat.TABLE
    found = _SUFFIXES.get(output.suffix.lower())
    if found is None:
        raise InvalidArgument(f"{output.name}: the suffix {output.suffix!r} names no format; say --format")
    return found


def write_output(rows: pa.RecordBatchReader, chosen: OutputFormat, output: Path | None) -> None:
    """Stream rows to a file or stdout. Raises InvalidArgument if the file cannot be written."""
    from millrace.commands.parts.row_writers import write_rows

    if output is None:
        write_rows(chosen, rows, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    try:
        with output.open("wb") as file:
            written = write_rows(chosen, rows, file)
    except OSError as error:
        if isinstance(error, MillraceError):
            raise
        raise InvalidArgument(f"{output} cannot be written: {error.strerror}") from None
    typer.echo(f"Wrote {written:,} rows to {output}.", err=True)


def print_table(rows: pa.Table) -> None:
    """Print rows as a table on the screen."""
    cells = [{name: _cell(value) for name, value in row.items()} for row in rows.to_pylist()]
    print_rows(cells, columns=rows.column_names, as_json=False, empty="No rows.")


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case list():
            return f"[{', '.join(_cell(each) for each in value)}]"
        case _:
            return str(value)
