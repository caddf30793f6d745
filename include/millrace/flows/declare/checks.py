"""Check whether a flow on Spark can run, without running it: source, columns, event time, sink, letters, function.

What only Spark can tell (the columns that its transform gives, whether its state is bounded) is in
:mod:`millrace.flows.spark_host.frames`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from millrace.base.errors import InvalidArgument, InvalidStream, MillraceError
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.catalog.sqlite_file import read_aliases, read_collection, read_collections
from millrace.flows.declare import spellings
from millrace.flows.declare.flow import Flow, RowSink, letters_of
from millrace.flows.declare.rows import Table, function_of
from millrace.flows.sinks.collection.fit import require_fit
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sinks.collection.poison import LETTERS
from millrace.flows.sinks.function.model import FunctionSink
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.kafka.model import RECORD_TIME, KafkaSource
from millrace.streams.keyed.clock import Clock
from millrace.streams.keyed.operator import Operator, late_schema, one_name_each
from millrace.streams.operators.declared import LOG_TIME, duration, late_names, sink_names
from millrace.streams.patterns.sorted_rows import column_of
from millrace.wal.visible.changes import change_schema

_TIMES = ("timestamp", "timestamp_ntz", "date")


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a declaration: an error (the flow cannot run) or a warning."""

    level: Literal["error", "warning"]
    field: str
    words: str

    def __str__(self) -> str:
        return f"{self.field}: {self.words}"


def check(settings: Settings, stream: Flow) -> list[Finding]:
    """Return the problems of `stream` that the deployment's catalog shows, without asking Spark."""
    by_id = {each.id: each for each in read_collections(settings.data_dir) if each.state == "active"}
    known = {each.name: each for each in by_id.values()}
    for alias, number in read_aliases(settings.data_dir).items():
        if number in by_id:
            known.setdefault(alias, by_id[number])
    found = _findings(stream, known)
    if stream.host == "spark" and _is_pipeline(settings, stream.name):
        words = "a pipeline of this data folder has the same name, and lists and metrics would merge them: rename one"
        found = [Finding("error", "name", words), *found]
    return as_written(stream, found)


def _is_pipeline(settings: Settings, name: str) -> bool:
    from millrace.flows.range_host.observed import pipelines_here

    return name in pipelines_here(settings)


def as_written(stream: Flow, findings: Iterable[Finding]) -> list[Finding]:
    """Return `findings` at the paths of the spelling that `stream` was declared in."""
    return [replace(each, field=spellings.as_written(each.field, None, stream.spelling)) for each in findings]


def _findings(stream: Flow, known: dict[str, CollectionInfo]) -> list[Finding]:
    found = [*_source(stream, known), *_sink(stream, stream.row_sink, "sink", known)]
    if stream.late is not None:
        found += _sink(stream, stream.late, "late", known)
    for name, table in stream.transform.tables.items():
        found += _table(f"transform.tables.{name}", table, known)
    if stream.transform.operator is not None:
        found += _operator(stream, known)
    functions: dict[str, str | None] = {
        "transform.function": stream.transform.function,
        "sink.function": stream.row_sink.function if isinstance(stream.row_sink, FunctionSink) else None,
    }
    for field, function in functions.items():
        if function is not None:
            try:
                function_of(function)
            except InvalidStream as error:
                found.append(Finding("error", field, str(error)))
    if stream.transform.sql is not None:
        found += _sql(stream)
    elif stream.transform.function is None and stream.transform.operator is None:
        found += _rows(stream, known)
    return found


def creates(settings: Settings, sink: RowSink) -> bool:
    """Return whether the sink's collection is created when the stream starts."""
    if not isinstance(sink, CollectionSink) or not sink.create:
        return False
    found = read_collection(settings.data_dir, sink.collection)
    return found is None or found.state != "active"


def require_runnable(stream: Flow, findings: list[Finding]) -> None:
    """Raise InvalidStream with all errors among `findings`, if there are any."""
    errors = [str(each) for each in findings if each.level == "error"]
    if errors:
        raise InvalidStream(f"the stream {stream.name!r} cannot run: {'; '.join(errors)}")


def source_schema(stream: Flow, known: dict[str, CollectionInfo]) -> pa.Schema | None:
    """Return the columns of the stream's rows as its source returns them, without a derived event time.

    None if its collection does not exist. Raises InvalidArgument if a topic's columns have no such types.
    """
    source = stream.row_source
    if isinstance(source, KafkaSource):
        from millrace.flows.sources.kafka.columns import RecordRows

        return RecordRows(source.columns, source.record_columns).schema
    collection = known.get(source.collection)
    return None if collection is None else rows_schema(collection, source.columns)


def _source(stream: Flow, known: dict[str, CollectionInfo]) -> Iterator[Finding]:
    source = stream.row_source
    found = _topics(stream, source, known) if isinstance(source, KafkaSource) else _collection(stream, source, known)
    yield from found
    mark = source.watermark
    if mark is not None and mark.delay.startswith("0 "):
        yield Finding("warning", "source.watermark.delay", "without a delay, any row older than the newest one is late")
    if mark is None and stream.transform.function is not None:
        yield Finding(
            "warning",
            "source.watermark",
            "without a watermark, aggregates, joins and deduplication keep their state forever",
        )


def _topics(stream: Flow, source: KafkaSource, known: dict[str, CollectionInfo]) -> Iterator[Finding]:
    try:
        schema = source_schema(stream, known)
    except InvalidArgument as error:
        yield Finding("error", "source.columns", str(error))
        return
    assert schema is not None
    if source.dead_letters is not None:
        yield from _letters("source.dead_letters", source.dead_letters, known)
    mark = source.watermark
    if mark is None:
        return
    if mark.column not in schema.names or not pa.types.is_temporal(schema.field(mark.column).type):
        words = f"{mark.column!r} is neither a timestamp or date column of the source nor {RECORD_TIME!r}"
        yield Finding("error", "source.watermark.column", words)


def _collection(stream: Flow, source: CollectionSource, known: dict[str, CollectionInfo]) -> Iterator[Finding]:
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
    windows = stream.transform.operator is not None and stream.transform.operator.windows is not None
    chosen = "kinds" in source.model_fields_set
    if windows and not chosen and collection.schema.on_duplicate == "replace":
        words = (
            f"{source.collection!r} replaces rows, and windows count each version of a row:"
            " set 'skip others' to accept that, or 'inserts' to stop at a replaced row"
        )
        yield Finding("warning", "source.kinds", words)
    mark = source.watermark
    if mark is None:
        return
    kinds = {field.name: field.type for field in collection.schema.fields}
    if mark.column == LOG_TIME:
        return
    if kinds.get(mark.column) not in _TIMES:
        yield Finding(
            "error", "source.watermark.column", f"{mark.column!r} is not a timestamp column of {source.collection!r}"
        )
    elif source.columns and mark.column not in source.columns:
        yield Finding("error", "source.watermark.column", f"{mark.column!r} is not a column of the stream")


def _table(field: str, table: Table, known: dict[str, CollectionInfo]) -> Iterator[Finding]:
    collection = known.get(table.collection)
    if collection is None:
        yield Finding("error", f"{field}.collection", f"there is no collection {table.collection!r}")
        return
    names = [each.name for each in collection.schema.fields]
    for name in table.columns:
        if name not in names:
            yield Finding(
                "error", f"{field}.columns", f"{table.collection!r} has no column {name!r}: {', '.join(names)}"
            )


def _operator(stream: Flow, known: dict[str, CollectionInfo]) -> Iterator[Finding]:
    """Yield the operator's problems. With a function or SQL before it, its input columns are unknown until it runs."""
    operation = stream.transform.operator
    assert operation is not None
    right = None if operation.as_of is None else known.get(operation.as_of.collection)
    if operation.as_of is not None and right is None:
        yield Finding(
            "error", "transform.operator.as_of.collection", f"there is no collection {operation.as_of.collection!r}"
        )
        return
    if operation.as_of is not None and operation.as_of.versioned and right is not None:
        keys = right.schema.key_names
        if set(keys) != set(operation.as_of.keys):
            words = (
                f"by {LOG_TIME} rows are versions of their primary key: use that of {right.name!r}, {', '.join(keys)}"
            )
            yield Finding("error", "transform.operator.as_of.keys", words)
            return
    schema = _plain_schema(stream, known)
    if schema is None or stream.transform.function is not None or stream.transform.sql is not None:
        return
    if stream.row_source.watermark is not None and stream.row_source.watermark.column == LOG_TIME:
        schema = schema.append(pa.field(LOG_TIME, pa.timestamp("us", "UTC")))
    if not stream.row_source.columns:
        words = "list the columns that the operator needs: a new column of the source would end the stream"
        yield Finding("warning", "source.columns", words)
    try:
        answers, aside, warnings = planned(stream, schema, right)
        for each in warnings:
            yield Finding("warning", "transform.operator", each)
        into = _collection_of(stream.row_sink, known)
        if into is not None:
            require_fit(answers, into, changes=_changes(stream.row_sink))
        beside = _collection_of(stream.late, known)
        if beside is not None:
            require_fit(aside, beside, changes=False)
    except InvalidArgument as error:
        yield Finding("error", "transform.operator", str(error))
        return
    windows = operation.windows
    if (
        windows is not None
        and windows.late == "correct"
        and isinstance(stream.row_sink, CollectionSink)
        and stream.row_sink.mode == "append"
    ):
        yield Finding("error", "sink.mode", "a corrected window is written again: use 'upsert'")


def _rows(stream: Flow, known: dict[str, CollectionInfo]) -> Iterator[Finding]:
    """Yield why untransformed rows do not fit the sink's collection: columns, types, partition column."""
    schema, into = _plain_schema(stream, known), _collection_of(stream.row_sink, known)
    if schema is None or into is None or not isinstance(stream.row_sink, CollectionSink):
        return
    by = stream.row_sink.partition_by
    try:
        require_fit(schema, into, changes=_changes(stream.row_sink))
    except InvalidArgument as error:
        yield Finding("error", "sink", str(error))
    if by is not None and by not in schema.names:
        yield Finding("error", "sink.partition_by", f"{by!r} is not a column of the stream")


def _collection_of(sink: RowSink | None, known: dict[str, CollectionInfo]) -> CollectionInfo | None:
    return known.get(sink.collection) if isinstance(sink, CollectionSink) else None


def _changes(sink: RowSink) -> bool:
    return isinstance(sink, CollectionSink) and sink.mode == "changes"


def _plain_schema(stream: Flow, known: dict[str, CollectionInfo]) -> pa.Schema | None:
    """Return the columns of the source's rows, or None if they are wrong, which :func:`_source` reports."""
    try:
        return source_schema(stream, known)
    except (InvalidArgument, KeyError):
        return None


def rows_schema(collection: CollectionInfo, columns: Sequence[str]) -> pa.Schema:
    """Return the columns of a stream's rows as its source returns them; `columns` empty means all."""
    every = change_schema(collection.schema)
    every = every.set(every.get_field_index("_change"), pa.field("_change", pa.utf8()))
    return pa.schema([every.field(name) for name in columns]) if columns else every


def planned(stream: Flow, schema: pa.Schema, right: CollectionInfo | None) -> tuple[pa.Schema, pa.Schema, list[str]]:
    """Return the columns of the operator's results over rows of `schema`, those of late rows, and warnings about state.

    The columns are those that the sinks get. Raises InvalidArgument.
    """
    operation, mark = stream.transform.operator, stream.row_source.watermark
    assert operation is not None
    assert mark is not None
    operator = operation.made(mark.column, schema)
    if operation.as_of is not None and right is not None:
        schema = operation.as_of.both(schema, rows_schema(right, ()), mark.column)
    warnings = operator.check(schema)
    Clock(duration(mark.delay), mark.ahead).check(operator, schema)
    return *given_columns(stream, operator, schema), warnings


def given_columns(stream: Flow, operator: Operator, schema: pa.Schema) -> tuple[pa.Schema, pa.Schema]:
    """Return the columns of the operator's results and of late rows, as their sinks name them.

    Raises InvalidArgument if two columns have the same name.
    """
    mark = stream.row_source.watermark
    assert mark is not None
    answers = operator.output_schema(schema)
    aside = late_schema(schema, schema.field(column_of(schema, mark.column)).type)
    into = sink_names(answers.names, collection=stream.row_sink.kind == "collection")
    beside = late_names(aside.names, collection=stream.late is not None and stream.late.kind == "collection")
    return (
        one_name_each(answers.field(each).with_name(name) for each, name in into.items()),
        one_name_each(aside.field(each).with_name(name) for each, name in beside.items()),
    )


def _sink(stream: Flow, sink: RowSink, field: str, known: dict[str, CollectionInfo]) -> Iterator[Finding]:
    letters = letters_of(stream, sink)
    if letters is not None:
        yield from _letters(f"{field}.dead_letters", letters, known)
    if not isinstance(sink, CollectionSink):
        return
    collection = known.get(sink.collection)
    if collection is None and sink.create:
        pass
    elif collection is None:
        yield Finding("error", f"{field}.collection", f"there is no collection {sink.collection!r}: create it")
    elif sink.partition is not None and sink.partition not in collection.partitions:
        yield Finding(
            "error", f"{field}.partition", f"{sink.collection!r} has no partition {sink.partition!r}: create it"
        )
    if sink.mode == "append" and stream.transform.output_mode == "update":
        yield Finding(
            "error", f"{field}.mode", "in the output mode 'update' a changed row is written again: use 'upsert'"
        )
    if sink.mode == "changes" and isinstance(stream.row_source, KafkaSource):
        yield Finding("error", f"{field}.mode", "a topic has records, not changes: use 'upsert' or 'append'")
    elif (
        sink.mode == "changes" and isinstance(stream.row_source, CollectionSource) and stream.row_source.kinds != "all"
    ):
        yield Finding(
            "error", "source.kinds", "a sink that applies changes needs every kind of change: set kinds to 'all'"
        )
    if f"collection:{sink.collection}" == stream.row_source.target:
        yield Finding(
            "error",
            f"{field}.collection",
            "the sink is the stream's own source, which would never end: choose another collection",
        )


def _letters(field: str, name: str, known: dict[str, CollectionInfo]) -> Iterator[Finding]:
    letters = known.get(name)
    if letters is None:
        yield Finding("error", field, f"there is no collection {name!r}: `millrace flows errors create` makes it")
    elif letters.schema.arrow() != LETTERS.arrow():
        yield Finding("error", field, f"{name!r} does not have the columns of dead letters")


def _sql(stream: Flow) -> Iterator[Finding]:
    import sqlglot
    from sqlglot import errors, exp

    try:
        parsed = sqlglot.parse_one(str(stream.transform.sql), dialect="spark")
    except errors.SqlglotError as error:
        yield Finding("error", "transform.sql", str(error).splitlines()[0])
        return
    tables = {each.name for each in parsed.find_all(exp.Table)}
    ours = {each.alias for each in parsed.find_all(exp.CTE)}
    if stream.row_source.table not in tables:
        yield Finding("error", "transform.sql", f"it does not read {stream.row_source.table!r}")
    for name in sorted(tables - ours - {stream.row_source.table} - set(stream.transform.tables)):
        yield Finding(
            "error", "transform.sql", f"it reads {name!r}, which is neither the stream's source nor one of its tables"
        )
    for name in sorted(set(stream.transform.tables) - tables):
        yield Finding("warning", "transform.sql", f"it does not read the table {name!r}")
    yield from _state(stream, parsed)


def _state(stream: Flow, parsed: Any) -> Iterator[Finding]:
    """Yield warnings on state of the SQL that grows without bound, because its text does not use the event time.

    `explain` asks Spark.
    """
    from sqlglot import exp

    if not any(parsed.find_all(exp.Group, exp.Distinct, exp.AggFunc)):
        return
    mark = stream.row_source.watermark
    if mark is None:
        yield Finding(
            "warning", "source.watermark", "without a watermark, the state of GROUP BY and DISTINCT is never removed"
        )
        return
    named = any(each.name in (mark.column, "*") for each in parsed.find_all(exp.Column))
    if not named and not any(each.is_star for each in parsed.find_all(exp.Select)):
        words = f"the state of GROUP BY and DISTINCT is never removed: no expression in it uses {mark.column!r}"
        yield Finding("warning", "transform.sql", words)


def checked(settings: Settings, stream: Flow) -> list[Finding]:
    """Return the findings of :func:`check`; an error that prevents the check is a finding, too."""
    try:
        return check(settings, stream)
    except MillraceError as error:
        return [Finding("error", "it", str(error))]
