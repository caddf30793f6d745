"""``read_spark``: a collection at a time tick as a DataFrame, with the rows of
:func:`millrace.tables.read.arrow.read_arrow`.

Versions are pinned once, when `read_spark` is called: the DataFrame gives the same rows however often it is evaluated.
Rows up to the tick V of the published version that is the read's base come from the published table, whose deletion
vectors Spark applies. Later rows, up to the tables' ticks, come from the rows table. The tail of the WAL comes as a
local relation if it is small, otherwise through a batch data source whose tasks read and decode it. The deletes after V
are one left anti join, omitted if there are none. Without a base that has all of this, V is 0.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import DataType, StructType

from millrace.base.settings import Settings
from millrace.message.field_types import FieldType, parse_type
from millrace.message.ids import Moment
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.stored_columns import MAX_TIMESTAMP_DAYS, key_columns
from millrace.message.types import MessageType
from millrace.rpc.selection import ALL_ROWS, Selection
from millrace.storage.file_sink import check_live_files
from millrace.storage.published_log import physical_names
from millrace.storage.spark import spark_frame
from millrace.storage.store import store_at
from millrace.storage.table import TableHandle
from millrace.tables.collections.data_tables import earliest_readable_tick
from millrace.tables.read.arrow import files_within, stored_table_rows
from millrace.tables.read.base import PublishedBase
from millrace.tables.read.plan import ReadPlan, WalTail, plan_read, tail_rows, tick_span
from millrace.tables.read.spark_predicate import quote_name, spark_predicate
from millrace.wal.visible.collection_rows import ROW_COLUMNS, deletes_file_schema, rows_read_schema

FORMAT: Final = "millrace_tail"
SMALL_TAIL_BYTES: Final = 8 << 20
"""Size of WAL files up to which the tail becomes a local relation: no Python worker, no task."""

_TOO_OLD: Final = "DELTA_UNSUPPORTED_TIME_TRAVEL_BEYOND_DELETED_FILE_RETENTION_DURATION"

_log: Final = logging.getLogger(__name__)


def read_spark(
    spark: SparkSession,
    settings: Settings,
    collection_id: int,
    *,
    at: Moment | None = None,
    deadline: float | None = None,
    confirmed: Mapping[str, int] | None = None,
    selection: Selection = ALL_ROWS,
    with_ticks: bool = False,
) -> DataFrame:
    """Return the rows of a collection that are visible at `at` (default: the newest tick that all its channels have
    reached).

    Columns are the collection's fields at that tick, or those of `selection` (its `columns` and `where` apply).
    `with_ticks` adds
    the columns that locate a row (``_partition`` ...). Waits up to `deadline` seconds for a tick. `confirmed` as in
    :func:`millrace.tables.read.plan.plan_read`.
    Raises TickNotReached, TickTooOld, CollectionNotFound, InvalidArgument.
    """
    plan = plan_read(settings, collection_id, at=at, deadline=deadline, confirmed=confirmed)
    fields = plan.schema.arrow()
    names, wanted = selection.names(fields), selection.condition
    selection.expression(fields)  # raises for an invalid selection, with the same message as every read
    small = plan.tail_bytes() <= SMALL_TAIL_BYTES
    target = _nullable(rows_read_schema(plan.schema))
    base = None if with_ticks else _whole_base(plan)
    published = None if base is None else _published_frame(spark, base, target)
    since = 0 if base is None or published is None else base.tick
    parts = _frames(spark, plan, target, after=since, deletes=False, small_tail=small)
    if published is None:
        parts = [_without_dropped(each, plan) for each in parts]
    else:
        parts = [published, *parts]
    rows = _union(spark, parts, target)
    gone = _nullable(deletes_file_schema(plan.schema))
    deletes = _frames(spark, plan, gone, after=since, deletes=True, small_tail=small)
    if deletes:
        rows = without_deleted(rows, _union(spark, deletes, gone), key_columns(plan.schema))
    rows = rows.select(*field_columns(plan.schema), *(ROW_COLUMNS.names if with_ticks else ()))
    if wanted is not None:  # Spark pushes it down to the files, past the deletes, and reads only the needed columns
        rows = rows.where(spark_predicate(wanted, fields))
    return rows.select(*map(quote_name, names), *(ROW_COLUMNS.names if with_ticks else ()))


def _whole_base(plan: ReadPlan) -> PublishedBase | None:
    """Return the base if its rows, with the rows and deletes after it, are all that the read needs.

    None if there is no base; if something after its tick hides rows of it by where they are, which the published
    columns do not tell (a drop, a replacing import, a delete in one partition); or if compaction has removed deletes
    that hit them.
    """
    base = plan.base
    if base is None or earliest_readable_tick(plan.rows) > base.tick:
        return None
    begins = (info.first_visible_tick(plan.tick) for info in plan.vchannels.values())
    if any(tick > base.tick for tick in (*begins, *(tick for _, _, tick in plan.partition_drops))):
        return None
    return None if _deletes_in_partitions(plan, base.tick) else base


def _deletes_in_partitions(plan: ReadPlan, after: int) -> bool:
    """Return whether a delete after that tick may name a partition."""
    gone = deletes_file_schema(plan.schema)
    stored = stored_table_rows(plan.deletes, gone, plan.tick, None, after=after, columns=["_partition_id"])
    store, kinds = store_at(plan.settings.wal_uri), [MessageType.DELETE.name]
    tails = (tail.messages(store, types=kinds, columns=["type", "partition_id"]) for tail in plan.tails)
    return any(pc.any(pc.greater(rows["_partition_id"], 0)).as_py() for rows in stored) or any(
        pc.any(pc.greater(rows["partition_id"], 0)).as_py() for each in tails for rows in each
    )


def _published_frame(spark: SparkSession, base: PublishedBase, target: pa.Schema) -> DataFrame | None:
    """Return the base's rows with the columns of `target`, as far as they tell; None if Spark cannot read them now."""
    table = base.table
    gone = [path for path in table.files if table.store.size(path) is None]
    if gone:
        _log.warning("a read uses no published version: %d files of %s are missing", len(gone), table.uri)
        return None
    try:
        frame = spark_frame(spark, table.store, table.version)
    except AnalysisException as error:
        if error.getCondition() != _TOO_OLD:
            raise
        return None
    named = {physical: name for name, physical in physical_names(table.schema).items()}
    known = {"_time_tick": F.lit(base.tick), "_write_tick": F.lit(base.tick)}
    columns = []
    for field in from_arrow_schema(target).fields:
        value = F.col(quote_name(named[field.name])) if field.name in named else known.get(field.name, F.lit(None))
        columns.append(value.cast(field.dataType).alias(field.name))
    return frame.select(*columns)


def _without_dropped(rows: DataFrame, plan: ReadPlan) -> DataFrame:
    """Remove rows of dropped partitions, of replacing imports, and of an earlier collection."""
    for name, number, tick in plan.partition_drops:
        hidden = (F.col("_vchannel") == name) & (F.col("_partition_id") == number) & (F.col("_time_tick") < tick)
        rows = rows.where(~hidden)
    first = plan.first_ticks()
    for name, info in plan.vchannels.items():
        if first[name] < (begin := info.first_visible_tick(plan.tick)):
            rows = rows.where((F.col("_vchannel") != name) | (F.col("_time_tick") >= begin))
    return rows


def field_columns(schema: CollectionSchema) -> list[Column]:
    """Return the fields of a schema from a frame with their stored columns (millrace.message.stored_columns)."""
    return [_field(field).alias(field.name) for field in schema.fields]


def _field(field: FieldSpec) -> Column:
    parts = [
        _widened(F.col(quote_name(each.name)), parse_type(each.type), field.parsed_type_of(each), field.parsed_type)
        for each in field.stored_columns
    ]
    return parts[0] if len(parts) == 1 else F.coalesce(*reversed(parts))


def _widened(value: Column, stored: FieldType, narrow: FieldType, wide: FieldType) -> Column:
    """Return a column of type `stored`, with the current names of `narrow`, cast to the field's type."""
    if stored == narrow == wide:
        return value
    match wide.kind:
        case "struct":
            own = zip(stored.names, stored.children, narrow.children, strict=True)
            parts = dict(zip(narrow.names, own, strict=True))
            fields = [
                (
                    _widened(value.getField(parts[name][0]), *parts[name][1:], each)
                    if name in parts
                    else F.lit(None).cast(_spark_type(each))
                ).alias(name)
                for name, each in zip(wide.names, wide.children, strict=True)
            ]
            return F.when(value.isNotNull(), F.struct(*fields))
        case "list":
            return F.transform(
                value, lambda each: _widened(each, stored.children[0], narrow.children[0], wide.children[0])
            )
        case "map":
            inner = (stored.children[1], narrow.children[1], wide.children[1])
            return F.transform_values(value, lambda _, each: _widened(each, *inner))
        case "timestamp" | "timestamp_ntz":
            days = F.when(  # least and greatest skip nulls
                value.isNotNull(),
                F.least(F.greatest(F.unix_date(value), F.lit(-MAX_TIMESTAMP_DAYS)), F.lit(MAX_TIMESTAMP_DAYS)),
            )
            if wide.kind == "timestamp":
                return F.timestamp_micros(days.cast("long") * 86_400_000_000)
            return F.date_from_unix_date(days).cast("timestamp_ntz")
    return value.cast(_spark_type(wide))


def _spark_type(kind: FieldType) -> DataType:
    return from_arrow_schema(pa.schema([pa.field("_", kind.arrow)])).fields[0].dataType


def _nullable(schema: pa.Schema) -> pa.Schema:
    """Return the columns, all nullable, so that all sides of a union have one type."""
    return pa.schema([field.with_nullable(True) for field in schema])


def _union(spark: SparkSession, parts: Sequence[DataFrame], target: pa.Schema) -> DataFrame:
    if not parts:
        return spark.createDataFrame([], from_arrow_schema(target))
    return reduce(DataFrame.unionByName, parts)


def _frames(
    spark: SparkSession, plan: ReadPlan, target: pa.Schema, *, after: int, deletes: bool, small_tail: bool
) -> list[DataFrame]:
    """Return the rows (or deletes) after a tick up to the plan's, from the table and from the tail."""
    table = plan.deletes if deletes else plan.rows
    found = None if table is None else _table_frame(spark, table, target, after, plan.tick)
    tail = _tail_frame(spark, plan, target, deletes=deletes, small=small_tail)
    if tail is not None and after:  # the published version may be newer than the pinned tables
        tail = tail.where(F.col("_time_tick") > after)
    return [each for each in (found, tail) if each is not None]


def _table_frame(spark: SparkSession, table: TableHandle, target: pa.Schema, after: int, tick: int) -> DataFrame | None:
    """Return the rows of a table after a tick up to another; None if no file may have some."""
    files = files_within(table, target, after, tick)["path"].to_pylist()
    if not files:
        return None
    check_live_files(table, files)  # Spark would fail in a task, with a less clear message
    frame = spark_frame(spark, table.store, table.version)
    have = set(frame.columns)
    types = {field.name: field.dataType for field in from_arrow_schema(target).fields}
    columns = [
        F.col(quote_name(name)) if name in have else F.lit(None).cast(types[name]).alias(name) for name in target.names
    ]
    first, last = tick_span(table)
    if last > tick:
        frame = frame.where(F.col("_time_tick") <= tick)
    if after and first <= after:
        frame = frame.where(F.col("_time_tick") > after)
    return frame.select(*columns)


def _tail_frame(
    spark: SparkSession, plan: ReadPlan, target: pa.Schema, *, deletes: bool, small: bool
) -> DataFrame | None:
    tails = [tail for tail in plan.tails if tail.range.files]
    if not tails or (deletes and not plan.has_tail_deletes()):
        return None
    if small:
        parts = list(plan.tail_rows(deletes=deletes))
        if not parts:
            return None
        # Arrow from end to end: no row passes through Python objects.
        return spark.createDataFrame(pa.concat_tables(parts).cast(target), from_arrow_schema(target))
    spark.dataSource.register(TailDataSource)
    options = {
        "settings": json.dumps(plan.settings.environment()),
        "collection": str(plan.collection_id),
        "schema": json.dumps(plan.schema.to_json()),
        "tails": json.dumps([tail.to_json() for tail in tails]),
        "deletes": str(deletes).lower(),
    }
    return spark.read.format(FORMAT).options(**options).schema(from_arrow_schema(target)).load()


def without_deleted(rows: DataFrame, deletes: DataFrame, key: Sequence[str]) -> DataFrame:
    """Remove rows that a delete hits by the fields `key`. Per key and partition, the last delete decides."""
    keys = [F.col(quote_name(name)).alias(f"_d_key{place}") for place, name in enumerate(key)]
    last = deletes.groupBy(*keys, F.col("_partition_id").alias("_d_partition")).agg(
        F.max(F.struct("_time_tick", "_write_tick")).alias("_d_at")
    )
    same = (F.col(quote_name(name)) == F.col(f"_d_key{place}") for place, name in enumerate(key))
    hit = (
        reduce(operator.and_, same)
        & ((F.col("_d_partition") == 0) | (F.col("_d_partition") == F.col("_partition_id")))
        & (F.struct("_time_tick", "_write_tick") < F.col("_d_at"))
    )
    return rows.join(last, hit, "left_anti")


class TailDataSource(DataSource):
    """A large tail of the WAL, one partition per PChannel. Registered by :func:`read_spark`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        return TailReader(dict(self.options), to_arrow_schema(schema, timezone="UTC"))


class TailPartition(InputPartition):
    """One PChannel's tail."""

    def __init__(self, tail: WalTail) -> None:
        self.value = tail


class TailReader(DataSourceReader):
    """Plans from its options alone. `read` runs in a task."""

    def __init__(self, options: dict[str, str], target: pa.Schema) -> None:
        self._options = options
        self._target = target

    def partitions(self) -> Sequence[InputPartition]:
        return [TailPartition(WalTail.from_json(tail)) for tail in json.loads(self._options["tails"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        rows = tail_rows(
            partition.value,
            settings=Settings.load(env=json.loads(self._options["settings"])),
            collection_id=int(self._options["collection"]),
            schema=CollectionSchema.from_json(json.loads(self._options["schema"])),
            deletes=self._options["deletes"] == "true",
        )
        for table in rows:
            yield from table.cast(self._target).combine_chunks().to_batches()
