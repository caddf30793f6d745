"""Whether a declared stream can run, found without running it: its source, columns, event time, sink and letters, its function.

What only Spark can tell (the columns that its transform gives, whether its state is bounded) is in
:mod:`millrace.streams.running.frames`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from millrace.base.errors import InvalidStream, MillraceError
from millrace.base.settings import Settings
from millrace.catalog.collection import Collection
from millrace.catalog.records import known_collections
from millrace.streams.declare.declaration import Stream, function_of
from millrace.streams.sinks.collection.poison import LETTERS
from millrace.wal.visible.changes import change_schema

_TIMES = ("timestamp", "timestamp_ntz", "date")


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with a declaration (an error: it cannot run), or to be known (a warning)."""

    level: Literal["error", "warning"]
    field: str
    words: str

    def __str__(self) -> str:
        return f"{self.field}: {self.words}"


def check(settings: Settings, stream: Stream) -> list[Finding]:
    """What can be found of `stream` by the deployment's catalog alone."""
    known = {each.name: each for each in known_collections(settings.data_dir) if each.state == "active"}
    found = [*_source(stream, known), *_sink(stream, known)]
    for field, name in (("transform", stream.transform), ("sink.function", stream.sink.function)):
        if name is not None:
            try:
                function_of(name)
            except InvalidStream as error:
                found.append(Finding("error", field, str(error)))
    if stream.sql is not None:
        found += _sql(stream)
    return found


def require_runnable(stream: Stream, findings: list[Finding]) -> None:
    """Raises InvalidStream with all errors among the findings."""
    errors = [str(each) for each in findings if each.level == "error"]
    if errors:
        raise InvalidStream(f"the stream {stream.name!r} cannot run: {'; '.join(errors)}")


def _source(stream: Stream, known: dict[str, Collection]) -> Iterator[Finding]:
    source = stream.source
    collection = known.get(source.collection)
    if collection is None:
        yield Finding("error", "source.collection", f"there is no collection {source.collection!r}")
        return
    names = change_schema(collection.schema).names
    for name in source.columns:
        if name not in names:
            yield Finding(
                "error", "source.columns", f"{source.collection!r} has no column {name!r}: {', '.join(names)}"
            )
    mark = source.watermark
    if mark is None:
        if stream.output_mode == "update" or stream.sql is not None or stream.transform is not None:
            yield Finding(
                "warning",
                "source.watermark",
                "without one an aggregate, a join or a deduplication keeps its state for good",
            )
        return
    kinds = {field.name: field.type for field in collection.schema.fields}
    if kinds.get(mark.column) not in _TIMES:
        yield Finding("error", "source.watermark.column", f"{mark.column!r} is no timestamp of {source.collection!r}")
    elif source.columns and mark.column not in source.columns:
        yield Finding("error", "source.watermark.column", f"{mark.column!r} is none of the stream's columns")
    if mark.delay.startswith("0 "):
        yield Finding(
            "warning", "source.watermark.delay", "without a delay a row as old as the newest one is late already"
        )


def _sink(stream: Stream, known: dict[str, Collection]) -> Iterator[Finding]:
    sink = stream.sink
    if sink.kind != "collection":
        return
    collection = known.get(str(sink.collection))
    if collection is None:
        yield Finding("error", "sink.collection", f"there is no collection {sink.collection!r}: create it")
    elif sink.partition is not None and sink.partition not in collection.partitions:
        yield Finding("error", "sink.partition", f"{sink.collection!r} has no partition {sink.partition!r}")
    if sink.dead_letters is not None:
        letters = known.get(sink.dead_letters)
        if letters is None:
            yield Finding(
                "error",
                "sink.dead_letters",
                f"there is no collection {sink.dead_letters!r}: `millrace streams letters` makes it",
            )
        elif letters.schema.arrow() != LETTERS.arrow():
            yield Finding(
                "error", "sink.dead_letters", f"{sink.dead_letters!r} has other columns than dead letters have"
            )
    if sink.mode == "append" and stream.output_mode == "update":
        yield Finding(
            "error", "sink.mode", "in the output mode 'update' a row comes again when it changes: use 'upsert'"
        )
    if sink.mode == "changes" and stream.source.kinds != "all":
        yield Finding("error", "source.kinds", "a sink that applies changes needs all of them: kinds 'all'")
    if sink.collection == stream.source.collection:
        yield Finding("error", "sink.collection", "a stream into its own source never ends")


def _sql(stream: Stream) -> Iterator[Finding]:
    import sqlglot
    from sqlglot import errors, exp

    try:
        parsed = sqlglot.parse_one(str(stream.sql), dialect="spark")
    except errors.SqlglotError as error:
        yield Finding("error", "sql", str(error).splitlines()[0])
        return
    tables = {each.name for each in parsed.find_all(exp.Table)}
    ours = {each.alias for each in parsed.find_all(exp.CTE)}
    if stream.source.collection not in tables:
        yield Finding("error", "sql", f"it does not read {stream.source.collection!r}")
    for name in sorted(tables - ours - {stream.source.collection}):
        yield Finding("error", "sql", f"it reads {name!r}, which is not the stream's source")


def checked(settings: Settings, stream: Stream) -> list[Finding]:
    """:func:`check`, with what cannot even be looked at as a finding."""
    try:
        return check(settings, stream)
    except MillraceError as error:
        return [Finding("error", "it", str(error))]
