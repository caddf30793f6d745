"""The source of a backfill: a collection pinned at one time tick, and the slices that changed between two ticks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F

from millrace.base.errors import CollectionNotFound, LogUnavailable, TickNotReached
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.append_client import AppendClient
from millrace.message.ids import compose_tick
from millrace.operations.backfill.derived import LOG_TIME, DerivedTable
from millrace.operations.backfill.slices import EPOCH, TimeSlice
from millrace.tables.read.freshness import ConfirmedTicks, confirm_ticks
from millrace.tables.read.plan import plan_read
from millrace.tables.read.spark import read_spark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, SparkSession


class PinnedTick(NamedTuple):
    """The tick to read at, and by PChannel the tick up to which the ``wal`` table is known to be complete."""

    tick: int
    confirmed: dict[str, int]


def pin_tick(settings: Settings, collection: CollectionInfo, *, at: int | None) -> PinnedTick:
    """Pin the tick `at`, or the newest readable one, so that every later read agrees on it.

    If the log's server runs, an idle PChannel does not hold the tick back. Otherwise the ``wal`` table alone decides.

    Raises TickNotReached, TickTooOld, CollectionNotFound.
    """
    confirmed = ConfirmedTicks({}, "")
    try:
        with AppendClient.connect(settings.data_dir, start=False, deadline=settings.read_deadline) as client:
            confirmed = confirm_ticks(settings, collection.pchannels, client, at=at, seconds=settings.read_deadline)
    except LogUnavailable:
        pass
    if confirmed.missing and at is None:
        raise TickNotReached(
            f"{collection.name!r} cannot be read completely after {settings.read_deadline:.0f} s: {confirmed.missing}"
        )
    plan = plan_read(settings, collection.id, at=at, deadline=0.0, confirmed=confirmed.ticks)
    return PinnedTick(plan.tick, confirmed.ticks)


def source_rows(
    spark: SparkSession, settings: Settings, table: DerivedTable, collection: CollectionInfo, pinned: PinnedTick
) -> DataFrame:
    """Return the source's rows at the pinned tick."""
    log_time = table.event_time == LOG_TIME
    return read_spark(
        spark, settings, collection.id, at=pinned.tick, confirmed=pinned.confirmed, deadline=0.0, with_ticks=log_time
    )


def in_slice(event: Column, part: TimeSlice) -> Column:
    """Return whether a row with that event time belongs to the slice."""
    return (event >= F.lit(part.start)) & (event < F.lit(part.end))


def row_hash(frame: DataFrame) -> Column:
    """Return a hash of a row that distinguishes a null from a value in another column."""
    nulls = [F.col(f"`{name}`").isNull() for name in frame.columns]
    return F.xxhash64(*(F.col(f"`{name}`") for name in frame.columns), *nulls)


def digest_columns(frame: DataFrame) -> tuple[Column, Column]:
    """Return (rows, sum of row hashes) as aggregates. They are equal for the same rows in any order."""
    return F.count(F.lit(1)).alias("rows"), F.sum(row_hash(frame).cast("decimal(38,0)")).alias("hashes")


def changed_slices(
    spark: SparkSession,
    settings: Settings,
    table: DerivedTable,
    collection: CollectionInfo,
    pinned: PinnedTick,
    *,
    start: datetime,
    end: datetime,
    hours: int,
) -> Sequence[TimeSlice]:
    """Return the slices of event time whose source rows differ between `start` and `end` (in log time).

    Compares the two states, and so finds the effects of inserts, deletes, dropped partitions and restores alike.
    """
    after = min(compose_tick(_ms(end)) - 1, pinned.tick)
    before = min(compose_tick(_ms(start)) - 1, after)
    try:
        newer = _stretches(spark, settings, table, collection, pinned._replace(tick=after), hours)
    except CollectionNotFound:
        return []  # the range ended before the collection was created
    try:
        older = _stretches(spark, settings, table, collection, pinned._replace(tick=before), hours)
    except CollectionNotFound:
        older = newer.limit(0)  # the collection was created after `start`
    older = older.withColumnsRenamed({"rows": "rows_before", "hashes": "hashes_before"})
    same = F.col("rows").eqNullSafe(F.col("rows_before")) & F.col("hashes").eqNullSafe(F.col("hashes_before"))
    places = sorted(row["stretch"] for row in newer.join(older, "stretch", "full_outer").where(~same).collect())
    width = timedelta(hours=hours)
    return [TimeSlice(EPOCH + place * width, EPOCH + (place + 1) * width) for place in places]


def _stretches(
    spark: SparkSession,
    settings: Settings,
    table: DerivedTable,
    collection: CollectionInfo,
    pinned: PinnedTick,
    hours: int,
) -> DataFrame:
    rows = source_rows(spark, settings, table, collection, pinned)
    event = table.event_column(collection)
    stretch = F.floor(F.unix_micros(event) / F.lit(hours * 3_600_000_000)).alias("stretch")
    return rows.where(event.isNotNull()).groupBy(stretch).agg(*digest_columns(rows))


def _ms(moment: datetime) -> int:
    return (moment.astimezone(UTC) - EPOCH) // timedelta(milliseconds=1)
