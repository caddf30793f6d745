"""Collections for Spark users: reads at a time tick, SQL views, and changes as a batch or a stream.

The only public module that imports Spark.

    from millrace.spark import read, register, stream

    flights = read(spark, "flights", at="2026-11-23T10:00:00Z", where="origin = 'JFK'", columns="day, delay")
    register(spark, ["flights", "planes"])       # spark.sql("select ... from flights join planes ...")
    hourly = stream(spark, "flights", kinds="inserts").withWatermark("time_hour", "1 day").groupBy(...)

The functions that name a collection take its data folder (`data`, default: $MILLRACE_DATA) or `settings`.
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
from millrace.client.database import Database, connect
from millrace.flows.guarantee import Guarantee as Guarantee
from millrace.flows.sinks.collection.sink import CollectionSink
from millrace.flows.sinks.collection.sink import Mode as Mode
from millrace.flows.sources.collection import frames as source
from millrace.flows.sources.collection.rows import Kinds as Kinds
from millrace.flows.spark_host import incarnations, micro_batches
from millrace.flows.spark_host.keyed import KeyedFrames
from millrace.message.ids import Moment, resolve_tick
from millrace.rpc.selection import ColumnNames, Selection
from millrace.runtime.spark.session import session as session
from millrace.storage.spark import spark_register
from millrace.storage.store import store_at
from millrace.streams.keyed.operator import Operator
from millrace.tables.collections.data_tables import find_published
from millrace.tables.read import spark as frames
from millrace.tables.read.freshness import require_confirmed_ticks

__all__ = ["changes_between", "operate", "read", "register", "register_published", "session", "stream", "write_stream"]


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
    """Read the rows of a collection that are visible at `at`, from the data folder `data` (default: $MILLRACE_DATA).

    `at` is a time tick, a datetime or ISO 8601 text; without it, everything decided before the call is visible, and the
    call waits up to `deadline` seconds for the streaming node. `where` and `columns` are those of
    :meth:`millrace.Collection.read`: Spark skips files and row groups by them, as it does by its own ``where`` and
    ``select``. Table versions are pinned when this returns, so the DataFrame does not change.

    Raises TickNotReached, TickTooOld, CollectionNotFound, InvalidArgument.
    """
    chosen = _settings(data, settings)
    selection = Selection.of(where=where, columns=columns)
    with connect(settings=chosen) as db:
        tick = None if at is None else resolve_tick(at)
        return _frame(spark, chosen, db, db.definition(name), tick, deadline, selection)


def register(
    spark: SparkSession,
    names: Sequence[str] | None = None,
    *,
    at: Moment | None = None,
    deadline: float | None = None,
    data: str | Path | None = None,
    settings: Settings | None = None,
) -> int:
    """Create a temporary view for each collection (or for those in `names`), all at one tick, and return the tick.

    The tick is `at`, or now. ``spark.table`` and SQL can use the views. Register again to see newer rows.

    Raises the errors of :func:`read`, and InvalidArgument if two names differ only in case.
    """
    chosen = _settings(data, settings)
    with connect(settings=chosen) as db:
        known = [each.name for each in db.catalog.collections()] if names is None else names
        found = require_distinct_sql_names(db.definition(name) for name in known)
        pchannels = {name for each in found for name in each.pchannels}
        tick = resolve_tick(at) if at is not None else db.current_tick(pchannels) if found else 0
        for each in found:
            _frame(spark, chosen, db, each, tick, deadline, Selection()).createOrReplaceTempView(f"`{each.name}`")
    return tick


def register_published(
    spark: SparkSession,
    names: Sequence[str] | None = None,
    *,
    database: str = "millrace",
    data: str | Path | None = None,
    settings: Settings | None = None,
) -> list[str]:
    """Create a table in the session's catalog for the published table of each collection (or for those in `names`).

    Returns the names of the tables, ``<database>.<collection>``. The tables are external: a query reads the newest
    version, and dropping one leaves the collection alone. Register again after collections were created or dropped;
    tables of `database` that this call did not make stay. The session needs Delta's catalog (:func:`session` has it).
    Without `names`, collections that are not published yet are left out. So are names that Spark's catalog does not
    allow: letters, digits and ``_`` are.

    Raises TableNotFound for a name that is not published yet, CollectionNotFound, StoreCannotPublish, and
    InvalidArgument if two names differ only in case, or if a table of that name is not one of a collection.
    """
    chosen = _settings(data, settings)
    with connect(settings=chosen) as db:
        known = [each.name for each in db.catalog.collections()] if names is None else names
        found = require_distinct_sql_names(db.definition(name) for name in known)
        places = {each.name: find_published(chosen, each.id) for each in found}
        if names is not None:
            places = {each.name: db.tables.published_uri(each) for each in found}
    return spark_register(spark, database, {name: store_at(uri) for name, uri in places.items() if uri is not None})


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
    """Read the changes of a collection after `after` up to `until`, in its newest schema.

    The defaults are the collection's beginning and now.

    The rows are those of :meth:`millrace.Collection.changes_between`, or only `columns` of them; tasks read and decode.
    A DataFrame has no order: sort by ``_vchannel, _time_tick, _write_tick``. `channels` restricts it to these
    VChannels, or to those on these PChannels. `kinds` is "all"; "inserts", for which any other change raises
    ChangesRefused; or "skip others", which leaves other changes out.

    Raises the errors of :func:`read`; tasks raise PositionTruncated.
    """
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
    """Stream the changes of a collection as a DataFrame.

    `channels`, `columns` and `kinds` are those of :func:`changes_between`.

    The stream starts at the collection's beginning, or after a tick or time (`after`; "now": after everything decided
    before the call), or with the rows that are visible at a tick or "now" (`snapshot`), as inserts, followed by the
    changes after it. A micro-batch takes `max_bytes` of files (default: ``max_bytes_per_trigger``) of each PChannel, up
    to one log time for all. With `aligned`, PChannels also wait for each other, unless one is idle for 10 s of log
    time: for queries with a watermark. The query's checkpoint stores ticks, so flushes and compactions do not affect
    it.

    The query fails with PositionTruncated, TickTooOld, ChangesRefused, CollectionNotFound, or SchemaChanged (restart
    the query: it continues with the new schema).
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
    """Start a query that writes a streaming DataFrame into the collection `name`.

    See :mod:`millrace.flows.sinks.collection.sink`.

    `mode` is "append", "upsert", or "changes" (what the column ``_change`` says). `guarantee` is "exactly once", "at
    least once" or "at most once". `checkpoint` is the query's folder, which includes the sink's state: remove all of
    it, or nothing. Rows that do not fit go to the collection `dead_letters`, or stop the stream. A micro-batch starts
    every `seconds` (default: when there are rows), or the query ends after the existing rows (`available_now`).

    Raises CollectionNotFound, InvalidArgument if columns do not fit, StreamBusy.
    """
    chosen, place = _settings(data, settings), Path(checkpoint)
    sink = CollectionSink(
        chosen,
        name,
        memory=incarnations.sink_folder(place),
        mode=mode,
        guarantee=guarantee,
        partition=partition,
        partition_by=partition_by,
        dead_letters=dead_letters,
        stream=query or name,
    )
    return micro_batches.start(
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
    """Start a query that applies an operator of docs/operators.md to a streaming DataFrame.

    Operators are patterns, windows, time joins and deduplication.

    Outputs, late rows and the keys' state are written to the Delta table at the URI `table`, exactly once; ``kind`` is
    ``output``, ``late`` or ``state``. The watermark is `delay` before the newest event time of the previous
    micro-batches (a timedelta for times, a number for numbers). Keys are distributed over `shards`, one task each; the
    number is fixed for the table. Rows whose event time is more than `max_ahead` (default: no bound) ahead of their
    tick's (the column ``_time_tick``) are diverted and do not advance the watermark. `checkpoint` is the query's
    folder; table and checkpoint belong to each other.

    Raises InvalidArgument if the operator does not accept the columns, or the table belongs to another query.
    """
    place = Path(checkpoint)
    schema = micro_batches.columns_of(frame)
    memory = incarnations.sink_folder(place)
    taken = KeyedFrames(memory, table, operator, schema, delay=delay, shards=shards, max_ahead=max_ahead)
    return micro_batches.start(frame, taken, place, name=query, seconds=seconds, available_now=available_now)


def _frame(
    spark: SparkSession,
    settings: Settings,
    client: Database,
    collection: CollectionInfo,
    tick: int | None,
    deadline: float | None,
    selection: Selection,
) -> DataFrame:
    seconds = settings.read_deadline if deadline is None else deadline
    confirmed = require_confirmed_ticks(
        settings, collection.name, collection.pchannels, client.connection, tick, seconds
    )
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
