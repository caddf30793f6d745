"""A declaration as a DataFrame with its sink, and Spark's findings about the two before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from millrace.base.errors import InvalidArgument, InvalidStream
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.client.schemas import schema
from millrace.flows.declare.checks import Finding, as_written, creates, planned
from millrace.flows.declare.flow import Flow, RowSink, has_letters, letters_of
from millrace.flows.declare.rows import Table, function_of
from millrace.flows.errors.letters import LetterTopic, RowLetters, row_letters_of
from millrace.flows.guarantee import Guarantee, level
from millrace.flows.registry import promise_of
from millrace.flows.sinks.collection.fit import require_fit
from millrace.flows.sinks.collection.model import CollectionSink as CollectionDeclared
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.delta.model import DeltaSink as DeltaDeclared
from millrace.flows.sinks.delta.sink import DeltaSink, uri_of
from millrace.flows.sinks.function.model import FunctionSink as FunctionDeclared
from millrace.flows.sinks.function.sink import FunctionSink
from millrace.flows.sinks.kafka.model import KafkaSink as KafkaDeclared
from millrace.flows.sinks.kafka.sink import KafkaSink
from millrace.flows.sinks.memory import Folder, begun, below
from millrace.flows.sinks.models import Flush
from millrace.flows.sinks.opensearch.sink import OpenSearchSink
from millrace.flows.sinks.sink import Sink
from millrace.flows.sources.collection import frames as source
from millrace.flows.sources.collection.model import CollectionSource
from millrace.flows.sources.collection.rows import find_collection
from millrace.flows.sources.kafka import spark_source as topics
from millrace.flows.sources.kafka.model import KafkaSource
from millrace.flows.sources.kafka.planner import Place, Start
from millrace.flows.spark_host.incarnations import Begun, Incarnations
from millrace.flows.spark_host.isolated import IsolatedSink
from millrace.flows.spark_host.keyed import answered
from millrace.flows.spark_host.micro_batches import columns_of
from millrace.flows.spark_host.operated import both_sides, log_time, operator_of, right_rows
from millrace.flows.spark_host.skipped import FILE as SKIP_FILE
from millrace.flows.spark_host.skipped import declared_records, skipped_rows
from millrace.flows.spark_host.status import progress_name
from millrace.flows.spark_host.undecoded import UNDECODED, again_folder, undecoded_folder
from millrace.message.ids import Moment, resolve_tick, tick_physical_ms
from millrace.rpc.selection import Selection
from millrace.streams.keyed.clock import TICK
from millrace.streams.operators.declared import LOG_TIME
from millrace.tables.read import spark as tables
from millrace.tables.read.freshness import require_confirmed_ticks
from millrace.wal.visible.changes import CHANGE_COLUMNS

_STATEFUL: Final = ("Aggregate", "Deduplicate", "Distinct", "Join", "FlatMapGroups", "TransformWithState")
_MARKED: Final = re.compile(r"#\d+L?-T\d+ms")
"""A column with a watermark in Spark's plans."""
_WRAPPED: Final = re.compile(r"^\w+\((.*)\)$", re.DOTALL)
"""Expressions in the form of Scala's collections: ``List(a, b)``, ``Some(a)``."""
_NUMBERS: Final = re.compile(r"#\d+L?")


def rows_of(
    spark: SparkSession,
    settings: Settings,
    stream: Flow,
    begun: Begun = Begun(),  # noqa: B008 - frozen
) -> DataFrame:
    """Return the stream's source as a streaming DataFrame, from the start `begun`, with its watermark."""
    given = stream.row_source
    if isinstance(given, KafkaSource):
        read = _read_by(stream, given)
        if begun.ticks is not None:
            first = topics.beginning(read, offsets=begun.ticks)
        else:
            first = topics.beginning(read, _topic_start(given.start if begun.after is None else begun.after))
        undecoded = undecoded_folder(settings, stream.name)
        options = _topic_options(stream, given, first, undecoded)
        if given.dead_letters is not None or stream.errors_in_topic:
            options["again"] = str(again_folder(settings, stream.name))
            options |= topics.skip_options(
                declared_records(stream), below(Incarnations(settings, stream.name).folder, SKIP_FILE)
            )
        return _marked(stream, topics.stream(spark, options))
    anew = begun.after is not None or begun.snapshot is not None or begun.ticks is not None
    frame = source.stream(
        spark,
        settings,
        given.collection,
        after=begun.after if anew else given.after,
        snapshot=begun.snapshot if anew else given.snapshot,
        ticks=begun.ticks,
        channels=given.channels,
        columns=_asked(given),
        kinds=given.kinds,
        max_bytes=given.max_bytes,
        aligned=given.watermark is not None,
    )
    return _marked(stream, frame)


def batch_of(
    spark: SparkSession,
    settings: Settings,
    stream: Flow,
    *,
    after: Moment | None = None,
    until: Moment | None = None,
) -> DataFrame:
    """Return the stream's transformed rows as a batch: the same declaration, run once.

    It has the rows after `after` (default: from the declared start) and up to `until` (default: to the present).
    """
    given = stream.row_source
    if isinstance(given, KafkaSource):
        read, undecoded = _read_by(stream, given), below(Incarnations(settings, stream.name).home, UNDECODED)
        first = topics.beginning(read, _topic_start(given.start if after is None else after))
        last = topics.beginning(read, "latest" if until is None else tick_physical_ms(resolve_tick(until)) + 1)
        rows = topics.batch(spark, _topic_options(stream, given, first, below(undecoded, "batch")), last)
    else:
        if after is None and given.after != "now":
            after = given.after
        rows = source.changes(
            spark,
            settings,
            given.collection,
            after=after,
            until=until,
            channels=given.channels,
            columns=_asked(given),
            kinds=given.kinds,
        )
    frame = transformed(spark, settings, stream, _marked(stream, rows))
    if stream.transform.operator is None:
        return frame
    right = right_rows(spark, settings, stream, until=until, batch=True)
    ahead = None if given.watermark is None else given.watermark.ahead
    joined = both_sides(stream, frame, right)
    return answered(joined, operator_of(stream, frame), stream.transform.operator.shards, max_ahead=ahead)


def _read_by(stream: Flow, given: KafkaSource) -> KafkaSource:
    """Return the topics of `stream` with its consumer group."""
    return given.model_copy(update={"group": given.group or f"millrace-{stream.name}"})


def _topic_start(moment: Moment) -> Start | int:
    """Return where a stream begins in its topics; 0 is the beginning, as for a collection."""
    if moment in ("earliest", 0):
        return "earliest"
    return "latest" if moment == "now" else tick_physical_ms(resolve_tick(moment))


def _topic_options(stream: Flow, given: KafkaSource, first: Place, undecoded: Folder) -> dict[str, str]:
    return topics.options_of(
        _read_by(stream, given),
        first,
        columns=given.columns,
        record=given.record_columns,
        tombstones=given.tombstones,
        undecoded=undecoded,
        max_bytes=given.max_bytes,
        max_records=given.max_records,
    )


def _asked(given: CollectionSource) -> tuple[str, ...]:
    """Return the columns to request from the source: the stream's, and the watermark's input."""
    made = given.columns and given.watermark is not None and given.watermark.column == LOG_TIME
    return (*given.columns, TICK) if made and TICK not in given.columns else given.columns


def _marked(stream: Flow, frame: DataFrame) -> DataFrame:
    given, mark = stream.row_source, stream.row_source.watermark
    if mark is None:
        return frame
    if mark.column == LOG_TIME and isinstance(given, CollectionSource):
        frame = frame.withColumn(LOG_TIME, log_time())
        frame = frame if _asked(given) == given.columns else frame.drop(TICK)
    return frame.withWatermark(mark.column, mark.delay)


def transformed(spark: SparkSession, settings: Settings, stream: Flow, rows: DataFrame) -> DataFrame:
    """Apply the stream's transform to its rows and tables. Raises InvalidStream if it fails or returns no DataFrame."""
    beside = {name: table_rows(spark, settings, each) for name, each in stream.transform.tables.items()}
    try:
        if stream.transform.sql is not None:
            for name, each in {stream.row_source.table: rows, **beside}.items():
                each.createOrReplaceTempView(f"`{name}`")
            return spark.sql(stream.transform.sql)
        found = rows if stream.transform.function is None else function_of(stream.transform.function)(rows, **beside)
    except PySparkException as error:
        raise InvalidStream(f"the transform of {stream.name!r}: {str(error).splitlines()[0]}") from error
    if not isinstance(found, DataFrame):
        raise InvalidStream(f"the transform of {stream.name!r} returns {type(found).__name__}, not a DataFrame")
    return found


def table_rows(spark: SparkSession, settings: Settings, table: Table) -> DataFrame:
    """Return a table's rows at its moment; pins versions, so that every micro-batch joins with the same ones."""
    tick = None if table.at in (None, "now") else resolve_tick(table.at)
    with connect(settings=settings) as db:
        found = db.definition(table.collection)
        confirmed = require_confirmed_ticks(
            settings, found.name, found.pchannels, db.connection, tick, settings.read_deadline
        )
        selection = Selection.of(columns=table.columns or None)
        return tables.read_spark(
            spark, settings, found.id, at=tick, deadline=0.0, confirmed=confirmed, selection=selection
        )


def create_sink(settings: Settings, stream: Flow, into: RowSink | None, columns: pa.Schema) -> None:
    """Create the collection of a sink with `create`, with these columns, unless it exists. Raises InvalidArgument."""
    if not isinstance(into, CollectionDeclared) or not into.create:
        return
    plain = pa.schema([each for each in columns if each.name not in CHANGE_COLUMNS.names])
    made = schema(plain, key=into.keys or None, generated_key=None if into.keys else "row_key")
    with connect(settings=settings) as db:
        known = [each.name for each in db.catalog.collections()]
        if into.collection not in known:
            given, vchannels = stream.row_source, 1
            if isinstance(given, CollectionSource):
                vchannels = len(find_collection(settings, given.collection).vchannels)
            db.catalog.create_collection(into.collection, made, vchannels=vchannels, exist_ok=True)


def sink_of(settings: Settings, stream: Flow, folder: Folder, into: RowSink | None = None) -> Sink:
    """Return the stream's sink, or that of late rows, `into`, with its memory in `folder` and its dead letters."""
    named = stream.name if into is None else late_letters(stream.name)
    into = into or stream.row_sink
    sink = plain_sink_of(settings, stream, folder, into, named)
    if not has_letters(stream, into):
        return sink
    lane = progress_name(named)
    return IsolatedSink(
        sink,
        row_letters_of(settings, stream, letters_of(stream, into), stream=named, begun=begun(folder)),
        stream.errors,
        memory=folder,
        lane=lane,
        parts=repeats_rows(stream, into),
        skip=partial(skipped_rows, settings, stream, lane),
    )


def repeats_rows(stream: Flow, into: RowSink) -> bool:
    """Return whether rows of a batch may be written again under its number, so that parts of it may be written."""
    return not isinstance(into, CollectionDeclared) and guarantee_in(stream, into) != "exactly once"


def guarantee_in(stream: Flow, into: RowSink) -> Guarantee:
    """Return the guarantee of `into`, a stream's sink or that of late rows, which may not offer the chosen one."""
    return level(promise_of(stream.source, into, rows=True, chosen=stream.chosen_guarantee))


def late_letters(stream: str) -> str:
    """Return the name in letters of a stream's late rows, which are written to another sink."""
    return f"{stream}/late"


def plain_sink_of(settings: Settings, stream: Flow, folder: Folder, into: RowSink, named: str) -> Sink:
    """Return a sink of the stream without dead letters, except for a collection, which stores them under `named`."""
    guarantee = guarantee_in(stream, into)
    if isinstance(into, CollectionDeclared):
        return CollectionSink(
            settings,
            into.collection,
            memory=folder,
            mode=into.mode,
            guarantee=guarantee,
            partition=into.partition,
            partition_by=into.partition_by,
            dead_letters=into.dead_letters,
            letters=_topic_letters(stream, folder, named) if into.dead_letters is None else None,
            stream=named,
        )
    if isinstance(into, DeltaDeclared):
        uri = into.path or uri_of(settings, into)
        return DeltaSink(uri, memory=folder, guarantee=guarantee, merge_schema=into.merge_schema)
    if isinstance(into, KafkaDeclared):
        return KafkaSink(into, memory=folder, key=into.key, guarantee=guarantee)
    if isinstance(into, FunctionDeclared):
        return FunctionSink(folder, function_of(into.function), guarantee=guarantee)
    flush = Flush()
    size = int(flush.mib * (1 << 20))
    by_key = into.model_copy(update={"ids": "key"})
    index = OpenSearchSink(by_key, flush_items=flush.items, flush_bytes=size, memory=folder, key=into.keys)
    index.open()
    return index


def _topic_letters(stream: Flow, folder: Folder, named: str) -> RowLetters | None:
    return LetterTopic(stream, stream=named, begun=begun(folder)) if stream.errors_in_topic else None


def found_by_spark(spark: SparkSession, settings: Settings, stream: Flow) -> tuple[str, list[Finding]]:
    """Return the query's plan as text, and findings: columns that do not fit the sink, unbounded state."""
    plan, findings = _found_by_spark(spark, settings, stream)
    return plan, as_written(stream, findings)


def _found_by_spark(spark: SparkSession, settings: Settings, stream: Flow) -> tuple[str, list[Finding]]:
    try:
        frame = transformed(spark, settings, stream, rows_of(spark, settings, stream, Begun(after=0)))
    except InvalidStream as error:
        return "", [Finding("error", "transform.sql" if stream.transform.sql else "transform.function", str(error))]
    if not frame.isStreaming:
        return "", [
            Finding(
                "error", "transform.function", "it returns no streaming DataFrame: derive the result from its argument"
            )
        ]
    analyzed = _analyzed(frame)
    plan = str(analyzed.toString())
    findings = [Finding("warning", "source.watermark", each) for each in dict.fromkeys(_unbounded(analyzed))]
    try:
        columns = columns_of(frame)
        if stream.transform.operator is not None:
            columns, more, words = _operated(settings, stream, columns)
            plan, findings = f"{words}\n{plan}", findings + more
        if isinstance(stream.row_sink, CollectionDeclared) and not creates(settings, stream.row_sink):
            collection = find_collection(settings, stream.row_sink.collection)
            require_fit(columns, collection, changes=stream.row_sink.mode == "changes")
    except InvalidArgument as error:
        findings.append(
            Finding("error", "sink" if stream.transform.operator is None else "transform.operator", str(error))
        )
    return plan, findings


def _operated(settings: Settings, stream: Flow, columns: pa.Schema) -> tuple[pa.Schema, list[Finding], str]:
    """Return the result columns of the stream's operator, findings about it, and a description of it."""
    operation, mark = stream.transform.operator, stream.row_source.watermark
    assert operation is not None
    assert mark is not None
    right = None if operation.as_of is None else find_collection(settings, operation.as_of.collection)
    answers, aside, warnings = planned(stream, columns, right)
    keys = ", ".join(operation.made(mark.column, columns).keys) or "nothing, so in one shard"
    words = [
        f"Operator {operation.kind}, keyed by {keys}, in {operation.shards} shards,"
        f" {mark.delay} behind the newest {mark.column}",
        f"  answers: {', '.join(f'{each.name} {each.type}' for each in answers)}",
        f"  late rows, to {stream.late.target if stream.late else 'its table alone'}: {', '.join(aside.names)}",
        *(f"  {each}" for each in warnings),
    ]
    return answers, [Finding("warning", "transform.operator", each) for each in warnings], "\n".join(words)


def _analyzed(frame: DataFrame) -> Any:
    inside: Any = frame._jdf
    return inside.queryExecution().analyzed()


def _unbounded(node: Any) -> Iterator[str]:
    """Yield the operators of a plan with unbounded state: no watermarked event time in key or condition.

    Joins with a table and operations on tables only have no state.
    """
    children = [node.children().apply(each) for each in range(node.children().size())]
    for each in children:
        yield from _unbounded(each)
    name, streams = str(node.nodeName()), [each for each in children if each.isStreaming()]
    if not streams or not name.startswith(_STATEFUL) or (name == "Join" and len(streams) < 2):
        return
    if "EventTimeWatermark" not in str(node.toString()):
        yield f"{name} without a watermark: its state grows without a bound"
        return
    key = {"Aggregate": "groupingExpressions", "Deduplicate": "keys", "Distinct": "output", "Join": "condition"}.get(
        name
    )
    if key is None:
        return
    text = _WRAPPED.sub(r"\1", str(getattr(node, key)().toString()))
    if not _MARKED.search(text):
        key = _NUMBERS.sub("", text)
        yield f"{name} by [{key}], without an event time (a window of it, say): its state grows without a bound"
