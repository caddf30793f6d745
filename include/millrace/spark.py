"""Collections for Spark users: read at a time tick, by name in SQL, their changes as a batch or a stream. The one module of the face that imports Spark.

from millrace.spark import read, register, stream

flights = read(spark, "flights", at="2026-11-23T10:00:00Z", where="origin = 'JFK'", columns="day, delay")
register(spark, ["flights", "planes"])       # spark.sql("select ... from flights join planes ...")
hourly = stream(spark, "flights", kinds="inserts").withWatermark("time_hour", "1 day").groupBy(...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millrace.base.data_folder import require_deployment
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo, require_distinct_sql_names
from millrace.client.client import Client
from millrace.message.ids import Moment, resolve_tick
from millrace.rpc.selection import ColumnNames, Selection
from millrace.runtime.spark_session import session as session
from millrace.streams import source
from millrace.streams.keyed.frames import KeyedFrames
from millrace.streams.keyed.operator import Operator
from millrace.streams.rows import Kinds as Kinds
from millrace.streams.sinks import frames as sinks
from millrace.streams.sinks.collection.sink import CollectionSink
from millrace.streams.sinks.collection.sink import Mode as Mode
from millrace.streams.sinks.guarantee import Guarantee as Guarantee
from millrace.tables.read import spark as frames
from millrace.tables.read.freshness import require_confirmed_ticks

__all__ = ["changes_between", "operate", "read", "register", "session", "stream", "write_stream"]


def read(
    spark: SparkSession,
    name: str,
    *,
    at: Moment | None = None,
    where: str | None = None,
    columns: ColumnNames | None = None,
    deadline: float | None = None,
    data: str | Path | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """The rows of a collection of the data folder `data` (default: $MILLRACE_DATA) that are visible at `at`.

    `at` is a time tick, a datetime or ISO 8601 text; without one everything counts that was decided before the call, and it
    waits up to `deadline` seconds for the streaming node to have come that far. Rows for which `where` holds, with `columns`, as
    :meth:`millrace.Collection.read` takes them: Spark leaves out files and row groups by them, as it does by its own ``where`` and
    ``select``. Versions are pinned when this returns: the DataFrame stays as it is. Raises TickNotReached, TickTooOld,
    CollectionNotFound, InvalidArgument.
    """
    chosen = _settings(data, settings)
    selection = Selection.of(where=where, columns=columns)
    with Client.connect(chosen) as client:
        tick = None if at is None else resolve_tick(at)
        return _frame(spark, chosen, client, client.collection(name), tick, deadline, selection)


def register(
    spark: SparkSession,
    names: Sequence[str] | None = None,
    *,
    at: Moment | None = None,
    deadline: float | None = None,
    data: str | Path | None = None,
    settings: Settings | None = None,
) -> int:
    """Make a temporary view of each collection (or of those in `names`) under its name, for ``spark.table`` and SQL, all at one tick,
    which is returned: `at`, or now. Register again for newer rows. Raises as :func:`read`, and InvalidArgument
    for names that differ by case alone."""
    chosen = _settings(data, settings)
    with Client.connect(chosen) as client:
        known = [each.name for each in client.catalog.collections()] if names is None else names
        found = require_distinct_sql_names(client.collection(name) for name in known)
        pchannels = {name for each in found for name in each.pchannels}
        tick = resolve_tick(at) if at is not None else client.current_tick(pchannels) if found else 0
        for each in found:
            _frame(spark, chosen, client, each, tick, deadline, Selection()).createOrReplaceTempView(f"`{each.name}`")
    return tick


def changes_between(
    spark: SparkSession,
    name: str,
    after: Moment | None = None,
    until: Moment | None = None,
    *,
    channels: Sequence[str] = (),
    columns: Sequence[str] = (),
    kinds: Kinds = "all",
    deadline: float | None = None,
    data: str | Path | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """The changes of a collection behind `after` (default: from its beginning) up to `until` (default: now), in its newest schema,
    as :meth:`millrace.Collection.changes_between` gives them, or only `columns` of them; tasks read and decode. A frame has no order: sort
    by ``_vchannel, _time_tick, _write_tick``. `channels`: of these VChannels alone, or of those on these PChannels. `kinds`: "all" changes; "inserts" alone, where any other is the error ChangesRefused;
    "skip others" gives the inserts and leaves the others out. Raises as :func:`read`; its tasks raise PositionTruncated."""
    chosen = _settings(data, settings)
    return source.changes(
        spark,
        chosen,
        name,
        after=after,
        until=until,
        channels=channels,
        columns=columns,
        kinds=kinds,
        deadline=deadline,
    )


def stream(
    spark: SparkSession,
    name: str,
    *,
    after: Moment | None = None,
    snapshot: Moment | None = None,
    channels: Sequence[str] = (),
    columns: Sequence[str] = (),
    kinds: Kinds = "all",
    max_bytes: int | None = None,
    aligned: bool = False,
    deadline: float | None = None,
    data: str | Path | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """The changes of a collection as a streaming DataFrame, with the `channels`, `columns` and `kinds` of :func:`changes_between`.

    It begins at the collection's beginning, behind a tick or moment (`after`; "now": behind all that was decided before the call), or with
    the rows that are visible at a tick or "now" (`snapshot`), as inserts, and the changes behind it. `max_bytes` of files (default:
    ``max_bytes_per_trigger``) are taken of each PChannel and micro-batch, up to one log time for all. With `aligned` they also wait for each other, until one is
    idle for 10 s of log time: for a query with a watermark. The query's checkpoint keeps ticks, so that flushes and
    compactions change nothing. Its end is an error that says why: PositionTruncated, TickTooOld, SchemaChanged (start the query
    again: it goes on with the new one), ChangesRefused, CollectionNotFound.
    """
    return source.stream(
        spark,
        _settings(data, settings),
        name,
        after=after,
        snapshot=snapshot,
        channels=channels,
        columns=columns,
        kinds=kinds,
        max_bytes=max_bytes,
        aligned=aligned,
        deadline=deadline,
    )


def write_stream(
    frame: DataFrame,
    name: str,
    *,
    checkpoint: str | Path,
    mode: Mode = "append",
    guarantee: Guarantee = "exactly once",
    partition: str | None = None,
    partition_by: str | None = None,
    dead_letters: str | None = None,
    seconds: float | None = None,
    available_now: bool = False,
    output_mode: str | None = None,
    query: str | None = None,
    data: str | Path | None = None,
    settings: Settings | None = None,
) -> StreamingQuery:
    """Start a query that writes a streaming DataFrame into the collection `name`: see :mod:`millrace.streams.sinks.collection.sink`.

    `mode` is "append", "upsert", or "changes" (what the column ``_change`` says); `guarantee` "exactly once", "at least once" or "at most
    once". `checkpoint` is the query's folder, with what the sink remembers in it: remove it as a whole, or not at all. Rows that do not fit go to the
    collection `dead_letters`, or stop the stream. A micro-batch begins every `seconds` (default: when there is something), or
    the query ends at what there is (`available_now`). Raises CollectionNotFound, InvalidArgument for columns that do not fit, StreamBusy.
    """
    chosen, place = _settings(data, settings), Path(checkpoint)
    sink = CollectionSink(
        chosen,
        sinks.sink_folder(place),
        name,
        mode=mode,
        guarantee=guarantee,
        partition=partition,
        partition_by=partition_by,
        dead_letters=dead_letters,
        stream=query or name,
    )
    return sinks.start(
        frame, sink, place, name=query, seconds=seconds, available_now=available_now, output_mode=output_mode
    )


def operate(
    frame: DataFrame,
    operator: Operator,
    *,
    table: str,
    checkpoint: str | Path,
    delay: timedelta | int,
    shards: int = 2,
    max_ahead: timedelta | None = None,
    seconds: float | None = None,
    available_now: bool = False,
    query: str | None = None,
) -> StreamingQuery:
    """Start a query that runs an operator of docs/operators.md (patterns, windows, joins by time, deduplication) over a streaming DataFrame.

    Answers, late rows and the keys' state become the Delta table at the URI `table`, exactly once: ``kind`` is ``output``, ``late`` or
    ``state``. The watermark is `delay` behind the newest event time of the micro-batches before (a timedelta for times, a number for numbers); keys
    lie in `shards`, a task each, which stays as it is for this table. Rows whose event time is more than `max_ahead` (default: no bound) ahead of that of
    their tick (the column ``_time_tick``) go to the side and move no watermark. `checkpoint` is the query's folder: table and checkpoint belong together. Raises
    InvalidArgument: columns that the operator does not take, or a table of another query.
    """
    place = Path(checkpoint)
    schema = sinks.columns_of(frame)
    memory = sinks.sink_folder(place)
    taken = KeyedFrames(memory, table, operator, schema, delay=delay, shards=shards, max_ahead=max_ahead)
    return sinks.start(frame, taken, place, name=query, seconds=seconds, available_now=available_now)


def _frame(
    spark: SparkSession,
    settings: Settings,
    client: Client,
    collection: CollectionInfo,
    tick: int | None,
    deadline: float | None,
    selection: Selection,
) -> DataFrame:
    seconds = settings.read_deadline if deadline is None else deadline
    confirmed = require_confirmed_ticks(settings, collection.name, collection.pchannels, client.append, tick, seconds)
    return frames.read_spark(
        spark, settings, collection.id, at=tick, deadline=0.0, confirmed=confirmed, selection=selection
    )


def _settings(data: str | Path | None, settings: Settings | None) -> Settings:
    chosen = settings or Settings.load()
    if data is None:
        return chosen
    folder = Path(data).expanduser().absolute()
    require_deployment(folder)
    return replace(chosen, data_dir=folder)
