"""A declared stream's operator: its right side combined with its rows, its table, and its sinks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from millrace.base.settings import Settings
from millrace.flows.declare.checks import given_columns
from millrace.flows.declare.flow import Flow, RowSink
from millrace.flows.sinks.memory import Folder, below
from millrace.flows.sinks.sink import Sink
from millrace.flows.sources.collection import frames as source
from millrace.flows.sources.collection.rows import Kinds
from millrace.flows.spark_host.error_window import LATE
from millrace.flows.spark_host.into import KeyedInto
from millrace.flows.spark_host.keyed import KeyedFrames
from millrace.flows.spark_host.micro_batches import columns_of
from millrace.message.ids import LOGICAL_BITS, Moment
from millrace.streams.keyed.clock import TICK
from millrace.streams.keyed.operator import Operator
from millrace.streams.operators.declared import GONE, ORDER, RIGHT, AsOfOf, duration, late_names, right_name, sink_names


def operator_of(stream: Flow, frame: DataFrame) -> Operator:
    """Return the stream's operator over `frame` (for an as-of join, its left side). Raises InvalidArgument."""
    operation, mark = stream.transform.operator, stream.row_source.watermark
    assert operation is not None
    assert mark is not None
    return operation.made(mark.column, columns_of(frame))


def right_rows(
    spark: SparkSession, settings: Settings, stream: Flow, *, until: Moment | None = None, batch: bool = False
) -> DataFrame | None:
    """Return the right side of an as-of join, as a stream from the collection's beginning or a batch up to `until`.

    None for another operator.
    """
    joined = None if stream.transform.operator is None else stream.transform.operator.as_of
    if joined is None:
        return None
    kinds: Kinds = "all" if joined.versioned else "skip others"
    if batch:
        return source.changes(spark, settings, joined.collection, until=until, kinds=kinds)
    return source.stream(spark, settings, joined.collection, kinds=kinds)


def log_time() -> Column:
    """Return the column of when a row became visible, by its time tick."""
    return F.timestamp_millis(F.shiftright(TICK, LOGICAL_BITS))


def both_sides(stream: Flow, left: DataFrame, right: DataFrame | None) -> DataFrame:
    """Return both sides of an as-of join as one DataFrame; for another operator, `left`."""
    joined = None if stream.transform.operator is None else stream.transform.operator.as_of
    mark = stream.row_source.watermark
    if joined is None or right is None or mark is None:
        return left
    first = left.withColumn(RIGHT, F.lit(False)).withColumn(GONE, F.lit(False)).withColumn(ORDER, F.lit(0).cast("long"))
    ticks = [TICK] if TICK in left.columns else []
    return first.unionByName(_versions(joined, right, mark.column, ticks), allowMissingColumns=True)


def _versions(joined: AsOfOf, right: DataFrame, time: str, ticks: list[str]) -> DataFrame:
    """Return the right side's rows in the form of the combined stream; with `ticks`, each has its tick."""
    change = F.col("_change")
    if joined.versioned:
        words = (
            f"{joined.collection}: a partition or the collection was dropped, replaced or"
            " restored: start the join again"
        )
        unretracted = F.when(change == "retract", F.raise_error(F.lit(words)).cast("boolean")).otherwise(F.lit(True))
        right = right.where(unretracted)
        at = log_time()
    else:
        at = F.col(_quoted(joined.time))
    # An upsert is the delete of its key and then the row, at one tick.
    order = F.col("_write_tick") * 2 + F.when(change == "insert", 1).otherwise(0)
    return right.select(
        *(F.col(_quoted(each)).alias(each) for each in joined.keys),
        at.alias(time),
        *(F.col(_quoted(each)).alias(right_name(each)) for each in joined.columns),
        F.lit(True).alias(RIGHT),
        (change == "delete").alias(GONE),
        order.alias(ORDER),
        *ticks,
    )


def operated_sink(
    stream: Flow,
    frame: DataFrame,
    operator: Operator,
    folder: Folder,
    sink_in: Callable[[Folder, RowSink | None], Sink],
) -> KeyedInto:
    """Return the operator with the stream's sinks; `frame` is its input. Raises InvalidArgument."""
    operation, mark = stream.transform.operator, stream.row_source.watermark
    assert operation is not None
    assert mark is not None
    schema = columns_of(frame)
    table = str(below(folder, "operator"))
    keyed = KeyedFrames(
        folder, table, operator, schema,
        delay=duration(mark.delay), max_ahead=mark.ahead, shards=operation.shards,
    )  # fmt: skip
    opened: list[Sink] = []
    try:
        opened.append(sink_in(folder, None))
        given = given_columns(stream, operator, schema)
        if stream.late is not None:
            opened.append(sink_in(below(folder, LATE), stream.late))
        for sink, columns in zip(opened, given, strict=False):
            sink.check(columns)
        names = partial(sink_names, collection=stream.row_sink.kind == "collection")
        if stream.late is None:
            return KeyedInto(keyed, opened[0], names=names)
        beside = partial(late_names, collection=stream.late.kind == "collection")
        return KeyedInto(keyed, opened[0], opened[1], names=names, late_names=beside)
    except BaseException:
        for sink in opened:
            sink.close()
        raise


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
