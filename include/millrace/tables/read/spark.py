"""``read_spark``: a collection at a time tick as a DataFrame, with the rows of
:func:`millrace.tables.read.arrow.read_arrow`.

Versions are pinned once, when `read_spark` is called: the DataFrame gives the same rows however often it is evaluated.
Rows up to the tick V of the published version that is the read's base come from the published table, whose deletion
vectors Spark applies. Later rows come from the rows table and from the tail of the WAL, and the deletes after V are one
left anti join, omitted if there are none. If there is little after V, it is read and judged here. Otherwise Spark opens
the tables, and a small tail is a local relation, a large one a batch data source whose tasks read and decode it.
Without a base that has all of this, V is 0.
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
from millrace.tables.read.deleted import deleted_mask
from millrace.tables.read.plan import ReadPlan, WalTail, plan_read, tail_rows, tick_span
from millrace.tables.read.spark_predicate import quote_name, spark_predicate
from millrace.wal.visible.collection_rows import ROW_COLUMNS, deletes_file_schema, rows_read_schema

FORMAT: Final = "millrace_tail"
SMALL_BYTES: Final = 8 << 20
"""Size of files up to which the tail, and what the tables have since a published version, become a local relation: no
Python worker, no task, no table to open.
"""

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
    use_published: bool = True,
) -> DataFrame:
    """Return the rows of a collection that are visible at `at` (default: the newest tick that all its channels have
    reached).

    Columns are the collection's fields at that tick, or those of `selection` (its `columns` and `where` apply).
    `with_ticks` adds
    the columns that locate a row (``_partition`` ...). Waits up to `deadline` seconds for a tick. `confirmed` and
    `use_published` are those of :func:`millrace.tables.read.plan.plan_read`.
    Raises TickNotReached, TickTooOld, CollectionNotFound, InvalidArgument.
    """
    plan = plan_read(
        settings, collection_id, at=at, deadline=deadline, confirmed=confirmed, use_published=use_published
    )
    fields = plan.schema.arrow()
    names, wanted = selection.names(fields), selection.condition
    selection.expression(fields)  # raises for an invalid selection, with the same message as every read
    target, gone = _nullable(rows_read_schema(plan.schema)), _nullable(deletes_file_schema(plan.schema))
    small_tail = plan.tail_bytes() <= SMALL_BYTES
    base = None if with_ticks else _whole_base(plan)
    published = None if base is None else _published_frame(spark, base, target)
    since = 0 if base is None or published is None else base.tick
    if published is not None and small_tail and _bytes_since(plan, since) <= SMALL_BYTES:
        rows = _with_little(published, plan, target, gone, since)
    else:
        rows = _joined(spark, plan, target, gone, published, since, small_tail=small_tail)
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


def _bytes_since(plan: ReadPlan, after: int) -> int:
    """Return the size of the files of the rows and deletes tables that may have something after a tick."""
    tables = ((plan.rows, rows_read_schema(plan.schema)), (plan.deletes, deletes_file_schema(plan.schema)))
    sizes = (files_within(table, schema, after, plan.tick)["size_bytes"] for table, schema in tables if table)
    return sum(pc.sum(each).as_py() or 0 for each in sizes)


def _with_little(published: DataFrame, plan: ReadPlan, target: pa.Schema, gone: pa.Schema, after: int) -> DataFrame:
    """Return the published rows with what came after their tick, which is read and judged here.

    Spark opens no other table, and takes the deleted keys and the new rows as local relations.
    """
    keys = key_columns(plan.schema)
    deletes, late = _read_since(plan, gone, after, deletes=True), _read_since(plan, target, after, deletes=False)
    rows, spark = published, published.sparkSession
    if deletes.num_rows:
        late = late.filter(pa.array(~deleted_mask(late, deletes, keys)))
        hit = deletes.select(keys).group_by(list(keys)).aggregate([])
        hit = hit.rename_columns([f"_d_key{place}" for place in range(len(keys))])
        rows = rows.join(spark.createDataFrame(hit), _same_key(keys), "left_anti")
    return rows if late.num_rows == 0 else rows.unionByName(_local(spark, late, target))


def _read_since(plan: ReadPlan, target: pa.Schema, after: int, *, deletes: bool) -> pa.Table:
    """Read the rows (or deletes) after a tick up to the plan's, from the table and from the tail."""
    table = plan.deletes if deletes else plan.rows
    parts = [*stored_table_rows(table, target, plan.tick, None, after=after), *plan.tail_rows(deletes=deletes)]
    rows = pa.concat_tables(each.cast(target) for each in parts)
    return rows.filter(pc.greater(rows["_time_tick"], after))  # the version may be newer than the pinned tables


def _joined(
    spark: SparkSession,
    plan: ReadPlan,
    target: pa.Schema,
    gone: pa.Schema,
    published: DataFrame | None,
    after: int,
    *,
    small_tail: bool,
) -> DataFrame:
    """Return the rows after a tick, beside the published ones up to it, without those that deletes after it hit."""
    parts = _frames(spark, plan, target, after=after, deletes=False, small_tail=small_tail)
    parts = [_without_dropped(each, plan) for each in parts] if published is None else [published, *parts]
    rows = _union(spark, parts, target)
    deletes = _frames(spark, plan, gone, after=after, deletes=True, small_tail=small_tail)
    return without_deleted(rows, _union(spark, deletes, gone), key_columns(plan.schema)) if deletes else rows


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


def _local(spark: SparkSession, rows: pa.Table, target: pa.Schema) -> DataFrame:
    """Return rows as a local relation. Arrow from end to end: no row passes through Python objects."""
    return spark.createDataFrame(rows.cast(target), from_arrow_schema(target))


def _frames(
    spark: SparkSession, plan: ReadPlan, target: pa.Schema, *, after: int, deletes: bool, small_tail: bool
) -> list[DataFrame]:
    """Return the rows (or deletes) after a tick up to the plan's, from the table and from the tail."""
    table = plan.deletes if deletes else plan.rows
    tails = [tail for tail in plan.tails if tail.range.files]
    found = []
    files = [] if table is None else files_within(table, target, after, plan.tick)["path"].to_pylist()
    if table is not None and files:
        found.append(_table_frame(spark, table, files, target, after, plan.tick))
    if tails and not (deletes and not plan.has_tail_deletes()):
        if small_tail:
            parts = list(plan.tail_rows(deletes=deletes))
            tail = _local(spark, pa.concat_tables(parts), target) if parts else None
        else:
            tail = _tail_frame(spark, plan, tails, target, deletes=deletes)
        if tail is not None:  # the published version may be newer than the pinned tables
            found.append(tail.where(F.col("_time_tick") > after) if after else tail)
    return found


def _table_frame(
    spark: SparkSession, table: TableHandle, files: Sequence[str], target: pa.Schema, after: int, tick: int
) -> DataFrame:
    """Return the rows of a table after a tick up to another, which are in some of its files."""
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
    spark: SparkSession, plan: ReadPlan, tails: Sequence[WalTail], target: pa.Schema, *, deletes: bool
) -> DataFrame:
    """Return the rows (or deletes) of large tails, which tasks read."""
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
    hit = (
        _same_key(key)
        & ((F.col("_d_partition") == 0) | (F.col("_d_partition") == F.col("_partition_id")))
        & (F.struct("_time_tick", "_write_tick") < F.col("_d_at"))
    )
    return rows.join(last, hit, "left_anti")


def _same_key(key: Sequence[str]) -> Column:
    """Return whether a row has the key of the columns ``_d_key0``, ``_d_key1`` ..."""
    same = (F.col(quote_name(name)) == F.col(f"_d_key{place}") for place, name in enumerate(key))
    return reduce(operator.and_, same)


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
