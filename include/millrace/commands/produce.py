"""``millrace produce``: append rows, or delete keys, from files or stdin, in acknowledged batches."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from millrace.base.errors import InvalidArgument, MillraceError
from millrace.base.failpoint import hit
from millrace.commands.parts.command_line import (
    DATA_PANEL,
    EXIT_ERROR,
    CollectionName,
    JsonContext,
    find_collection,
    format_count,
    print_json,
    root,
    tick_time,
)
from millrace.message.types import OnDuplicate

if TYPE_CHECKING:
    from millrace.base.settings import Settings
    from millrace.catalog.collection import CollectionInfo
    from millrace.client.produce.files.formats import CsvOptions, InputFormat
    from millrace.client.produce.files.journal import LoadJournal, LoadPosition
    from millrace.client.produce.files.row_conversion import BadRow, RowBatch
    from millrace.client.produce.producer import Producer
    from millrace.client.produce.written import Written

BATCH_ROWS = 50_000
SHOWN_BAD_ROWS = 20
"""Skipped bad rows that are printed; the summary counts all."""

MAX_BAD_ROWS = 1_000


class SourceFormat(StrEnum):
    """Format of the input."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"
    AVRO = "avro"


class OnError(StrEnum):
    """Treatment of a batch with an invalid row."""

    STOP = "stop"
    SKIP = "skip"


@dataclass(slots=True)
class Tally:
    """Counts of the rows by outcome."""

    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    messages: int = 0
    bytes: int = 0
    last_tick: int = 0
    last_line: int = 0
    """Line of the current file up to which every row was sent or skipped."""
    files: int = 0
    """Files that were read completely."""

    def add(self, written: Written) -> None:
        self.accepted += written.rows - written.rejected_rows
        self.rejected += written.rejected_by_reason
        self.messages += written.messages
        self.bytes += written.bytes
        self.last_tick = max(self.last_tick, written.last_tick)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"rejected": dict(self.rejected)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        return cls(**value | {"rejected": Counter(value.get("rejected", {}))})


@root.command(rich_help_panel=DATA_PANEL)
def produce(
    context: JsonContext,
    name: CollectionName,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE…|-]", help="Files, folders or patterns; - is stdin.", show_default=False),
    ] = None,
    file_format: Annotated[
        SourceFormat | None,
        typer.Option("--format", help="Format of the rows. Default: by suffix; JSON lines for stdin."),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="The partition for all rows.")] = None,
    partition_by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column with each row's partition.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete rows by primary key instead.")] = False,
    upsert: Annotated[
        bool,
        typer.Option("--upsert", help="Replace rows with existing keys. Repeating the load is idempotent."),
    ] = False,
    create: Annotated[
        bool, typer.Option("--create", help="Create a missing collection with the first file's columns.")
    ] = False,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="COLUMN", help="With --create: a column of the primary key. Repeat it."),
    ] = None,
    on_duplicate: Annotated[
        OnDuplicate | None,
        typer.Option(
            help="With --create: an insert of an existing key replaces the older row, or keeps both. Asked for if"
            " omitted.",
            show_default=False,
        ),
    ] = None,
    evolve: Annotated[
        bool,
        typer.Option("--evolve", help="Add columns that the collection lacks; widen types for typed files."),
    ] = False,
    on_error: Annotated[
        OnError, typer.Option(help="On an invalid row: stop before its batch is sent, or skip the row.")
    ] = OnError.STOP,
    bad_rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Skip invalid rows and write them to this file as JSON lines."),
    ] = None,
    max_bad: Annotated[int, typer.Option(min=0, help="With --bad-rows: stop after this many.")] = MAX_BAD_ROWS,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="JOURNAL", help="Record the progress in this file; repeat the command to resume."),
    ] = None,
    delimiter: Annotated[str, typer.Option(help="Delimiter of CSV.")] = ",",
    quote: Annotated[str, typer.Option(help="Quote character of CSV; empty if cells are never quoted.")] = '"',
    header: Annotated[bool, typer.Option(help="Whether CSV has a header.")] = True,
    encoding: Annotated[str, typer.Option(help="Encoding of CSV.")] = "utf-8",
    decimal: Annotated[str, typer.Option(help="Decimal separator of CSV: a point or a comma.")] = ".",
    null: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text of a null cell in CSV, in addition to the empty cell."),
    ] = None,
    date_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Format of dates in CSV, such as %d.%m.%Y.")
    ] = None,
    time_format: Annotated[str | None, typer.Option(metavar="FORMAT", help="Format of timestamps in CSV.")] = None,
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows to check and send at a time.")] = BATCH_ROWS,
) -> None:
    """Append rows to a collection, or delete rows from it.

    Reads JSON lines, a JSON array, CSV, Parquet, Arrow or Avro, compressed with gzip, zstd or bzip2 as their first
    bytes show. Timestamps and dates are ISO 8601, binary is base64. Every row is checked before it is sent; an invalid
    row is reported with its line and column. Rejections by the chain are reported by reason. The command returns when
    every row is durable and judged. Rows are readable once the streaming job has processed them.

    Example: `millrace produce flights flights.parquet --partition-by origin`

    Example: `millrace produce flights "2026/*.csv.gz" --delimiter ";" --decimal , --bad-rows bad.jsonl --resume
    flights.journal`

    Example: `echo '{"id": 1, "name": "Ada"}' | millrace produce users -`

    Example: `millrace produce users users.csv --create --key id --on-duplicate replace`

    Example: `millrace produce users gone.csv --delete`
    """
    from millrace.client.database import connect
    from millrace.client.produce.files.formats import STDIN, CsvOptions, InputFormat, expand_paths, format_of
    from millrace.client.produce.files.reader import read_batches

    _check_options(
        partition, partition_by, delete=delete, upsert=upsert, chooses=on_duplicate is not None and not create
    )
    settings = context.settings
    form = CsvOptions(delimiter, quote, header, encoding, ("", *(null or ())), decimal, date_format, time_format)
    given = None if file_format is None else InputFormat(file_format)
    files = expand_paths(sources or [Path(STDIN)], given)
    kinds = [format_of(each, given) for each in files]
    if create:
        _create(settings, name, files[0], key or [], given, form, on_duplicate=on_duplicate, upsert=upsert)
    collection = find_collection(settings, name)
    if on_duplicate not in (None, collection.schema.on_duplicate):
        raise InvalidArgument(
            f"{name} was created with --on-duplicate {collection.schema.on_duplicate}, which cannot change: omit the"
            " option, or use --upsert"
        )
    if evolve and not delete:
        collection = _evolve(settings, collection, files, given, form)
    _check_partitions(collection, partition, partition_by, delete)
    allowed = None if partition_by is None else (partition_by, list(collection.partitions))
    started, refused = time.monotonic(), False
    load = {
        "collection": collection.id,
        "schema version": collection.schema_version,
        "partition": partition,
        "partition column": partition_by,
        "deletes": delete,
        "rows of a batch": batch_rows,
        "form of CSV": asdict(form),
        "upserts": upsert or None,  # None matches journals of builds without upserts
    }
    tally = Tally()
    try:
        with ExitStack() as opened:
            journal = None if resume is None else opened.enter_context(_journal(resume, load, files))
            place = None if journal is None else journal.position
            if place is not None and place.counts:
                tally = Tally.from_json(place.counts)
                typer.echo(f"Resuming after {format_count(tally.accepted, 'row')} of this load.", err=True)
            bad = (
                None
                if bad_rows is None
                else opened.enter_context(BadRowsFile.open(bad_rows, max_bad, tally.skipped, place))
            )
            db = opened.enter_context(connect(settings=settings))
            producer = db.new_producer(resumed=None if journal is None else journal.producer_id)
            if journal is not None:
                place = journal.position
                if not place.ticks:  # before anything is sent
                    place.ticks = {each: db.connection.tick(each, persist=False) for each in collection.pchannels}
                    journal.save()
                producer.resume(place.numbers, place.ticks)
            show, reading = opened.enter_context(_progress()), BytesRead(files)
            read = partial(
                read_batches,
                schema=collection.schema,
                batch_rows=batch_rows,
                keys_only=delete,
                allowed=allowed,
                form=form,
            )
            for number, done, batch in _batches(files, kinds, place, read, reading):
                if batch is None:
                    tally.files, tally.last_line = tally.files + 1, 0 if number < len(files) else tally.last_line
                elif batch.bad:
                    _note_bad(batch, files[number], tally, on_error, bad)
                if batch is not None and batch.rows.num_rows:
                    tally.add(_send(producer, collection, batch, partition, partition_by, delete, upsert))
                tally.last_line = max(tally.last_line, 0 if batch is None else batch.last_line)
                if journal is not None:
                    hit("produce.sent")
                    _keep(journal, number, done, producer, tally, bad)
                    hit("produce.kept")
                show(tally, time.monotonic() - started, reading)
                if tally.rejected and on_error == OnError.STOP:
                    break
    except MillraceError:
        refused = True
        raise
    finally:
        if not refused or context.as_json or tally.messages or tally.skipped:  # otherwise the error alone says it
            _summarise(tally, time.monotonic() - started, deleted=delete, as_json=context.as_json)
    if tally.rejected:
        typer.echo(
            "APPEND_REJECTED: the chain rejected rows: see each message with its reason with `millrace wal rejections`",
            err=True,
        )
        raise typer.Exit(EXIT_ERROR)


class BytesRead:
    """Progress of reading the files, in bytes."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._sizes = [each.stat().st_size if each.is_file() else 0 for each in files]
        self._before = 0
        self._file: BinaryIO | None = None
        self.total = sum(self._sizes)
        """Bytes of all files; 0 if unknown, as for stdin."""

    @property
    def done(self) -> int:
        """Bytes read so far."""
        return self._before if self._file is None else self._before + self._file.tell()

    def begin(self, number: int, file: BinaryIO) -> None:
        """Note that `file` is read, the file of that number."""
        self._before, self._file = sum(self._sizes[:number]), file if self._sizes[number] else None

    def end(self, number: int) -> None:
        """Note that the file of that number was read to its end."""
        self._before, self._file = sum(self._sizes[: number + 1]), None


def _batches(
    files: list[Path],
    kinds: list[InputFormat],
    place: LoadPosition | None,
    read: Callable[[BinaryIO, InputFormat], Iterator[RowBatch]],
    reading: BytesRead,
) -> Iterator[tuple[int, int, RowBatch | None]]:
    """Yield (file number, its batches so far, batch) after `place`, and (next number, 0, None) after each file."""
    begin, passed = (0, 0) if place is None else (place.file, place.batches)
    for number in range(begin, len(files)):
        with _opened(files[number]) as rows:
            reading.begin(number, rows)
            for done, batch in enumerate(read(rows, kinds[number]), 1):
                if done > passed or number > begin:
                    yield number, done, batch
            reading.end(number)
        yield number + 1, 0, None


def _create(
    settings: Settings,
    name: str,
    source: Path,
    key: Sequence[str],
    kind: InputFormat | None,
    form: CsvOptions,
    *,
    on_duplicate: OnDuplicate | None,
    upsert: bool,
) -> None:
    """Create the collection if it is missing, and print the inferred schema."""
    from millrace.client.database import connect
    from millrace.commands.parts.collection_schema import make_schema

    with connect(settings=settings) as db:
        if name in db:
            return
        if str(source) == "-":
            raise typer.BadParameter("--create looks into a file, and stdin is read once: make the collection first")
        schema = make_schema(fields=[], source=source, key=key, event_time=None, kind=kind, form=form)
        chosen = on_duplicate or ("keep" if upsert else _asked_on_duplicate(schema.key_names))
        schema = replace(schema, on_duplicate=chosen)
        shown = ", ".join(f"{each.name}:{each.type}{'?' * each.nullable}" for each in schema.fields)
        typer.echo(f"Made {name}, as {source.name} has it: {shown}; key {', '.join(schema.key_names)}.", err=True)
        db.catalog.create_collection(name, schema)


def _asked_on_duplicate(key: Sequence[str]) -> OnDuplicate:
    """Ask at the terminal what an insert of an existing key does.

    Raises InvalidArgument without a terminal.
    """
    words = f"whose key ({', '.join(key)}) is there already"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidArgument(
            f"choose what happens to a row {words}: --on-duplicate replace (the new row replaces the older"
            " one; the same"
            " load again changes nothing) or --on-duplicate keep (both stay: for data that is only appended)"
        )
    replaces = typer.confirm(f"Does a row {words} replace the older one? (No: both stay.)", default=True, err=True)
    return "replace" if replaces else "keep"


def _evolve(
    settings: Settings, collection: CollectionInfo, files: list[Path], kind: InputFormat | None, form: CsvOptions
) -> CollectionInfo:
    """Change the schema to fit the files' columns, print the changes, and return the collection."""
    from millrace.client.database import connect
    from millrace.commands.parts.collection_schema import file_changes
    from millrace.message.schema_changes import AddField, WidenField

    made = file_changes(files, collection.schema, kind=kind, form=form)
    if not made:
        return collection
    with connect(settings=settings) as db:
        version = db.catalog.alter(collection.name, made)
        added = [f"added {each.field.name}:{each.field.type}" for each in made if isinstance(each, AddField)]
        widened = [f"widened {each.name} to {each.type}" for each in made if isinstance(each, WidenField)]
        shown = ", ".join([*added, *widened])
        typer.echo(f"{collection.name} has schema version {version}: {shown}.", err=True)
        return db.definition(collection.name)


def _journal(path: Path, load: dict[str, Any], files: list[Path]) -> AbstractContextManager[LoadJournal]:
    from millrace.client.produce.files.journal import file_fingerprints, open_journal

    if any(str(each) == "-" for each in files):
        raise typer.BadParameter("--resume needs files: stdin can be read only once")
    return open_journal(path, load | {"files": file_fingerprints(files)})


def _keep(
    journal: LoadJournal, file: int, batches: int, producer: Producer, tally: Tally, bad: BadRowsFile | None
) -> None:
    """Record in the journal that everything up to here was acknowledged."""
    place = journal.position
    place.file, place.batches, place.numbers = file, batches, producer.numbers()
    place.ticks = place.ticks | producer.ticks()
    place.bad_bytes = 0 if bad is None else bad.flush()
    place.counts = tally.to_json()
    journal.save()


class BadRowsFile:
    """The file of invalid rows: JSON lines with file, line, column, value and reason."""

    def __init__(self, file: BinaryIO, most: int, count: int) -> None:
        self._file = file
        self._most = most
        self._count = count

    @classmethod
    @contextmanager
    def open(cls, path: Path, most: int, count: int, place: LoadPosition | None) -> Iterator[BadRowsFile]:
        """Open `path` as a new file, or truncated to its length at `place`. Raises InvalidArgument."""
        try:
            file = path.open("r+b" if place is not None and place.bad_bytes and path.exists() else "wb")
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be written: {error.strerror}") from None
        with file:
            file.truncate(0 if place is None else place.bad_bytes)
            file.seek(0, 2)
            yield cls(file, most, count)

    def write(self, file: Path, rows: list[BadRow]) -> None:
        """Write the rows. Raises InvalidArgument once the limit is exceeded."""
        for row in rows:
            if self._count == self._most:
                self._file.flush()
                raise InvalidArgument(
                    f"{file.name}, line {row.line}: {row.why}; this is one more than the"
                    f" {format_count(self._most, 'bad row')} that --max-bad allows. Its batch was not sent"
                )
            record = {"file": str(file), "line": row.line, "column": row.column, "value": row.value, "reason": row.why}
            self._file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
            self._count += 1

    def flush(self) -> int:
        """Flush, and return the bytes written so far."""
        self._file.flush()
        return self._file.tell()


def _check_options(
    partition: str | None, partition_by: str | None, *, delete: bool, upsert: bool, chooses: bool
) -> None:
    if partition is not None and partition_by is not None:
        raise typer.BadParameter("give either --partition or --partition-by")
    if delete and upsert:
        raise typer.BadParameter("give either --delete or --upsert")
    if chooses:
        raise typer.BadParameter("--on-duplicate needs --create: an existing collection has its own")
    if delete and partition_by is not None:
        raise typer.BadParameter(
            "--delete does not take --partition-by: give --partition, or neither to delete in all partitions"
        )


def _check_partitions(
    collection: CollectionInfo, partition: str | None, partition_by: str | None, delete: bool
) -> None:
    known = ", ".join(collection.partitions)
    if partition is not None and partition not in collection.partitions:
        raise InvalidArgument(f"{collection.name} has no partition {partition!r}; it has {known}")
    if partition_by is not None:
        types = {each.name: each.type for each in collection.schema.fields}
        if types.get(partition_by) != "string":
            raise InvalidArgument(f"--partition-by needs a string field; {partition_by!r} is not one")
    if partition is None and partition_by is None and not delete and collection.default_partition is None:
        raise InvalidArgument(f"give the partition with --partition or --partition-by; {collection.name} has {known}")


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


def _note_bad(batch: RowBatch, file: Path, tally: Tally, on_error: OnError, bad: BadRowsFile | None) -> None:
    """Handle the invalid rows of a batch. Raises InvalidArgument for the first if errors stop the load."""
    if bad is not None:
        bad.write(file, batch.bad)
    elif on_error == OnError.STOP:
        first, others = batch.bad[0], len(batch.bad) - 1
        more = f" (and {others} more rows of this batch)" if others else ""
        before = f"everything up to line {tally.last_line} was sent" if tally.last_line else "nothing was sent"
        if tally.files:
            before = (
                f"{format_count(tally.files, 'file')} before it and {before if tally.last_line else 'nothing'} of it"
            )
        raise InvalidArgument(
            f"{'' if str(file) == '-' else f'{file.name}, '}line {first.line}: {first.why}{more}; {before}."
            " Use --on-error skip to skip such rows, or --bad-rows FILE to write them to a file"
        )
    else:
        for each in batch.bad[: max(0, SHOWN_BAD_ROWS - tally.skipped)]:
            typer.echo(f"line {each.line}: {each.why}", err=True)
        if tally.skipped < SHOWN_BAD_ROWS <= tally.skipped + len(batch.bad):
            typer.echo("(further bad rows are counted, not shown)", err=True)
    tally.skipped += len(batch.bad)


def _send(
    producer: Producer,
    collection: CollectionInfo,
    batch: RowBatch,
    partition: str | None,
    partition_by: str | None,
    delete: bool,
    upsert: bool,
) -> Written:
    if delete:
        return producer.delete(collection, batch.rows, partition=partition, raise_rejected=False)
    if upsert:
        return producer.upsert(collection, batch.rows, partition=partition, partition_by=partition_by)
    return producer.insert(collection, batch.rows, partition=partition, partition_by=partition_by, raise_rejected=False)


@contextmanager
def _progress() -> Iterator[Callable[[Tally, float, BytesRead], None]]:
    """Show the progress of the load."""
    from millrace.client.progress import progress_line, progress_words, rows_words

    with progress_line("connecting …") as line:

        def show(tally: Tally, seconds: float, reading: BytesRead) -> None:
            sent = f"{rows_words(tally.accepted, seconds)}, {tally.bytes / 1e6:,.1f} MB"
            line(", ".join(filter(None, (progress_words(reading.done, reading.total, seconds), sent))))

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
                "files": tally.files,
                "seconds": round(seconds, 3),
            }
        )
        return
    accepted = format_count(tally.accepted, "key" if deleted else "row") + (" to delete" if deleted else "")
    typer.echo(f"Accepted {accepted} in {format_count(tally.messages, 'message')}, {seconds:.1f} s.")
    if tally.last_tick:
        typer.echo(f"Last time tick {tally.last_tick} ({tick_time(tally.last_tick)}).")
    for reason, rows in sorted(tally.rejected.items()):
        typer.echo(f"Rejected {format_count(rows, 'row')}: {reason}")
    if tally.skipped:
        typer.echo(f"Skipped {format_count(tally.skipped, 'invalid row')}.")
