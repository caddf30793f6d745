"""``millrace produce``: rows (or keys to delete) from a file or stdin into a collection, in batches, each acknowledged."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from millrace.base.errors import InvalidArgument, MillraceError
from millrace.commands.parts.command_line import (
    FAILED,
    ROWS,
    AsJson,
    CollectionName,
    DataFolder,
    console,
    counted,
    find_collection,
    load_settings,
    moment,
    print_json,
    root,
)

if TYPE_CHECKING:
    from millrace.catalog.collection import Collection
    from millrace.client.produce.producer import Producer
    from millrace.client.produce.row_files import Batch
    from millrace.client.produce.written import Written

BATCH_ROWS = 50_000
SHOWN_BAD_ROWS = 20
"""Bad rows that are told one by one when they are skipped; the summary counts them all."""

_PROGRESS_SECONDS = 0.5


class Format(StrEnum):
    """Of the input."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


class OnError(StrEnum):
    """What becomes of a batch with a row that does not fit."""

    STOP = "stop"
    SKIP = "skip"


@dataclass(slots=True)
class Tally:
    """What became of the rows so far."""

    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    messages: int = 0
    bytes: int = 0
    last_tick: int = 0
    last_line: int = 0
    """Of the input, up to which everything was sent or skipped."""

    def add(self, written: Written) -> None:
        self.accepted += written.rows - written.rejected_rows
        self.rejected += written.rejected_by_reason
        self.messages += written.messages
        self.bytes += written.bytes
        self.last_tick = max(self.last_tick, written.last_tick)


@root.command(rich_help_panel=ROWS)
def produce(
    name: CollectionName,
    source: Annotated[
        Path, typer.Argument(metavar="[FILE|-]", help="The rows; - is stdin.", show_default=False)
    ] = Path("-"),
    file_format: Annotated[
        Format | None, typer.Option("--format", help="Of the rows. Without it: by the suffix; stdin is JSON lines.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="The partition that all rows go to.")] = None,
    partition_by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="A column that names each row's partition.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the rows with these primary keys instead.")] = False,
    on_error: Annotated[
        OnError, typer.Option(help="At a row that does not fit: stop before its batch is sent, or skip the row.")
    ] = OnError.STOP,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows that are checked and sent at a time.")] = BATCH_ROWS,
    data: DataFolder = None,
    as_json: AsJson = False,
) -> None:
    """Append rows to a collection, or delete rows from it.

    JSON lines (an object a line), CSV with a header, or Parquet. Timestamps and dates are ISO 8601, binary is base64. Every
    row is checked before it is sent; one that does not fit is told with its line. What the chain rejects is told by reason.
    The command returns when every row is durable and judged; the rows are readable when the streaming job has them.

    Example: `millrace produce flights flights.parquet --partition-by origin`

    Example: `echo '{"id": 1, "name": "Ada"}' | millrace produce users -`

    Example: `millrace produce users gone.csv --delete`
    """
    from millrace.client.client import Client
    from millrace.client.produce.row_files import InputFormat, format_of, read_batches

    if partition is not None and partition_by is not None:
        raise typer.BadParameter("--partition and --partition-by: give one of them")
    if delete and partition_by is not None:
        raise typer.BadParameter("--delete takes --partition, or deletes in all partitions")
    settings = load_settings(data)
    collection = find_collection(settings, name)
    _check_partitions(collection, partition, partition_by, delete)
    kind = format_of(source, None if file_format is None else InputFormat(file_format))
    allowed = None if partition_by is None else (partition_by, list(collection.partitions))
    tally, started, refused = Tally(), time.monotonic(), False
    try:
        with _opened(source) as rows, Client.connect(settings) as client:
            producer = client.producer()
            batches = read_batches(
                rows, kind, collection.schema, batch_rows=batch_rows, keys_only=delete, allowed=allowed
            )
            with _progress() as show:
                for batch in batches:
                    _note_bad(batch, tally, on_error)
                    if batch.rows.num_rows:
                        tally.add(_send(producer, collection, batch, partition, partition_by, delete))
                    tally.last_line = max(tally.last_line, batch.last_line)
                    show(tally, time.monotonic() - started)
                    if tally.rejected and on_error == OnError.STOP:
                        break
    except MillraceError:
        refused = True
        raise
    finally:
        if not refused or as_json or tally.messages or tally.skipped:  # else the error says all there is
            _summarise(tally, time.monotonic() - started, deleted=delete, as_json=as_json)
    if tally.rejected:
        typer.echo(
            "APPEND_REJECTED: the chain rejected rows; `millrace wal rejections` shows each message with its reason",
            err=True,
        )
        raise typer.Exit(FAILED)


def _check_partitions(collection: Collection, partition: str | None, partition_by: str | None, delete: bool) -> None:
    known = ", ".join(collection.partitions)
    if partition is not None and partition not in collection.partitions:
        raise InvalidArgument(f"{collection.name} has no partition {partition!r}; it has {known}")
    if partition_by is not None:
        types = {each.name: each.type for each in collection.schema.fields}
        if types.get(partition_by) != "string":
            raise InvalidArgument(f"--partition-by takes a string field, and {partition_by!r} is none")
    if partition is None and partition_by is None and not delete and len(collection.partitions) != 1:
        raise InvalidArgument(f"name the partition with --partition or --partition-by; {collection.name} has {known}")


@contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    if str(source) == "-":
        yield sys.stdin.buffer
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise InvalidArgument(f"{source} cannot be read: {error.strerror}") from None
    with file:
        yield file


def _note_bad(batch: Batch, tally: Tally, on_error: OnError) -> None:
    """Raises InvalidArgument for the first bad row where that is to stop."""
    if not batch.bad:
        return
    if on_error == OnError.STOP:
        first, others = batch.bad[0], len(batch.bad) - 1
        more = f" (and {others} more rows of this batch)" if others else ""
        before = f"everything up to line {tally.last_line} was sent" if tally.last_line else "nothing was sent"
        raise InvalidArgument(
            f"line {first.line}: {first.why}{more}; {before}. --on-error skip leaves such rows out and goes on"
        )
    for bad in batch.bad[: max(0, SHOWN_BAD_ROWS - tally.skipped)]:
        typer.echo(f"line {bad.line}: {bad.why}", err=True)
    if tally.skipped < SHOWN_BAD_ROWS <= tally.skipped + len(batch.bad):
        typer.echo("(further bad rows are counted, not shown)", err=True)
    tally.skipped += len(batch.bad)


def _send(
    producer: Producer,
    collection: Collection,
    batch: Batch,
    partition: str | None,
    partition_by: str | None,
    delete: bool,
) -> Written:
    if delete:
        return producer.delete(collection, batch.rows.column(0), partition=partition, raise_rejected=False)
    return producer.insert(collection, batch.rows, partition=partition, partition_by=partition_by, raise_rejected=False)


@contextmanager
def _progress() -> Iterator[Any]:
    """A line on stderr that is rewritten, on a terminal alone."""
    if not sys.stderr.isatty():
        yield lambda tally, seconds: None
        return
    with console(err=True).status("connecting …") as line:

        def show(tally: Tally, seconds: float) -> None:
            rate = tally.accepted / max(seconds, 1e-3)
            line.update(f"{tally.accepted:,} rows, {rate:,.0f} rows/s, {tally.bytes / 1e6:,.1f} MB")

        yield show


def _summarise(tally: Tally, seconds: float, *, deleted: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "accepted": tally.accepted,
                "rejected": dict(tally.rejected),
                "skipped": tally.skipped,
                "messages": tally.messages,
                "bytes": tally.bytes,
                "last_tick": tally.last_tick,
                "last_line": tally.last_line,
                "seconds": round(seconds, 3),
            }
        )
        return
    accepted = counted(tally.accepted, "key" if deleted else "row") + (" to delete" if deleted else "")
    typer.echo(f"Accepted {accepted} in {counted(tally.messages, 'message')}, {seconds:.1f} s.")
    if tally.last_tick:
        typer.echo(f"Last time tick {tally.last_tick} ({moment(tally.last_tick)}).")
    for reason, rows in sorted(tally.rejected.items()):
        typer.echo(f"Rejected {counted(rows, 'row')}: {reason}")
    if tally.skipped:
        typer.echo(f"Skipped {counted(tally.skipped, 'row')} that did not fit.")
