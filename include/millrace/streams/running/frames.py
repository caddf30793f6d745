"""A declaration as a DataFrame, its sink beside it, and what Spark says of the two before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from millrace.base.errors import InvalidArgument, InvalidStream
from millrace.base.settings import Settings
from millrace.streams import source
from millrace.streams.declare.checks import Finding
from millrace.streams.declare.declaration import Stream, function_of
from millrace.streams.declare.kept import Begun
from millrace.streams.sinks.collection.sink import CollectionSink
from millrace.streams.sinks.delta import DeltaSink
from millrace.streams.sinks.frames import FrameSink, columns_of
from millrace.streams.sinks.function import FunctionSink
from millrace.streams.sinks.kafka import KafkaSink
from millrace.streams.sinks.sink import Sink

_STATEFUL = ("Aggregate", "Deduplicate", "Join", "FlatMapGroups", "TransformWithState")


def rows_of(spark: SparkSession, settings: Settings, stream: Stream, begun: Begun = Begun()) -> DataFrame:  # noqa: B008 - frozen
    """The stream's source as a streaming DataFrame, from where `begun` says, with its watermark."""
    given = stream.source
    anew = begun.after is not None or begun.snapshot is not None or begun.ticks is not None
    frame = source.stream(
        spark,
        settings,
        given.collection,
        after=begun.after if anew else given.after,
        snapshot=begun.snapshot if anew else given.snapshot,
        ticks=begun.ticks,
        columns=given.columns,
        kinds=given.kinds,
        max_bytes=given.max_bytes,
    )
    return _marked(stream, frame)


def batch_of(spark: SparkSession, settings: Settings, stream: Stream) -> DataFrame:
    """The same as a batch of all rows up to now, through the stream's transform: one way to declare, two ways to run."""
    given = stream.source
    after = None if given.after == "now" else given.after
    return transformed(
        spark,
        stream,
        _marked(
            stream,
            source.changes(spark, settings, given.collection, after=after, columns=given.columns, kinds=given.kinds),
        ),
    )


def _marked(stream: Stream, frame: DataFrame) -> DataFrame:
    mark = stream.source.watermark
    return frame if mark is None else frame.withWatermark(mark.column, mark.delay)


def transformed(spark: SparkSession, stream: Stream, rows: DataFrame) -> DataFrame:
    """What the stream makes of its rows. Raises InvalidStream where the transform fails on them, or gives no DataFrame."""
    try:
        if stream.sql is not None:
            rows.createOrReplaceTempView(f"`{stream.source.collection}`")
            return spark.sql(stream.sql)
        found = rows if stream.transform is None else function_of(stream.transform)(rows)
    except PySparkException as error:
        raise InvalidStream(f"the transform of {stream.name!r}: {str(error).splitlines()[0]}") from error
    if not isinstance(found, DataFrame):
        raise InvalidStream(f"the transform of {stream.name!r} gives {type(found).__name__} and no DataFrame")
    return found


def sink_of(settings: Settings, stream: Stream, folder: Path) -> Sink | FrameSink:
    """The stream's sink, with its memory in `folder`."""
    into, guarantee = stream.sink, stream.chosen_guarantee
    if into.collection is not None:
        return CollectionSink(
            settings,
            folder,
            into.collection,
            mode=into.mode,
            guarantee=guarantee,
            partition=into.partition,
            partition_by=into.partition_by,
            dead_letters=into.dead_letters,
            stream=stream.name,
        )
    if into.kind == "delta":
        return DeltaSink(folder, into.path, guarantee=guarantee, merge_schema=into.merge_schema)
    if into.kafka is not None:
        return KafkaSink(folder, str(into.topic), into.kafka, key=into.key, guarantee=guarantee)
    return FunctionSink(folder, function_of(str(into.function)), guarantee=guarantee)


def found_by_spark(spark: SparkSession, settings: Settings, stream: Stream) -> tuple[str, list[Finding]]:
    """The plan of the stream's query as text, and what is found in it: columns that its sink does not take, state without a bound."""
    try:
        frame = transformed(spark, stream, rows_of(spark, settings, stream, Begun(after=0)))
    except InvalidStream as error:
        return "", [Finding("error", "sql" if stream.sql else "transform", str(error))]
    if not frame.isStreaming:
        return "", [
            Finding("error", "transform", "it gives no streaming DataFrame: it must be made from the one it gets")
        ]
    plan = _plan(frame)
    findings = []
    stateful = [
        name for name in _STATEFUL if any(line.lstrip(" +-:~!'").startswith(name) for line in plan.splitlines())
    ]
    if stateful and "EventTimeWatermark" not in plan:
        findings.append(
            Finding(
                "warning", "source.watermark", f"{stateful[0]} without a watermark: its state grows without a bound"
            )
        )
    if stream.sink.collection is not None:
        try:
            _fits(settings, stream, frame)
        except InvalidArgument as error:
            findings.append(Finding("error", "sink", str(error)))
    return plan, findings


def _fits(settings: Settings, stream: Stream, frame: DataFrame) -> None:
    from millrace.streams.rows import find_collection
    from millrace.streams.sinks.collection.fit import require_fit

    collection = find_collection(settings, str(stream.sink.collection))
    require_fit(columns_of(frame), collection, changes=stream.sink.mode == "changes")


def _plan(frame: DataFrame) -> str:
    inside: Any = frame._jdf
    return str(inside.queryExecution().analyzed().toString())
