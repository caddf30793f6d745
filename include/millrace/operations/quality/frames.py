"""Inputs of the checks, as Spark DataFrames over pinned versions.

A frame holds the rows of a range, with the columns that the suites need. It omits payloads and prunes by partition and
tick, so its cost is that of its range. A law about neighbouring rows becomes a column here, computed by a window
function in the order of the PChannel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Window
from pyspark.sql import functions as F

from millrace.base.settings import Settings
from millrace.message.ids import LOGICAL_BITS
from millrace.operations.quality import suites
from millrace.operations.quality.checks import Check
from millrace.operations.quality.ranges import Ranges, TickRange
from millrace.storage.spark import spark_frame
from millrace.storage.store import store_at
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable, WalTotals
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION, KIND_STATE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MESSAGE_ID_COLUMNS: Final = ("ledger", "entry", "index", "ordinal")
LAST_CONFIRMED_COLUMNS: Final = ("lc_ledger", "lc_entry", "lc_index", "lc_ordinal")


@dataclass(frozen=True, slots=True)
class ValidationInput:
    """One table over one range, with its suite."""

    table: str
    data: DataFrame
    checks: tuple[Check, ...]
    ranges: Ranges
    row_id: tuple[str, ...]
    """Columns that identify the row of an unexpected value."""
    collection_id: int = 0


@dataclass(frozen=True, slots=True)
class WalVersion:
    """One version of the ``wal`` table."""

    table: WalTable
    snapshot: WalSnapshot

    @property
    def committed_ticks(self) -> dict[str, int]:
        """The last committed tick of each PChannel."""
        return {name: self.table.last_tick(name) for name in self.table.pchannels()}


def in_ranges(ranges: Mapping[str, TickRange], *, key: Column, tick: str, inclusive: bool = False) -> Column:
    """Select rows whose tick lies in the range of their PChannel. `inclusive` includes the range's open end."""
    return reduce(
        lambda left, right: left | right,
        (
            (key == pchannel)
            & ((F.col(tick) >= each.after) if inclusive else (F.col(tick) > each.after))
            & (F.col(tick) <= each.up_to)
            for pchannel, each in ranges.items()
            if inclusive or not each.empty
        ),
        F.lit(False),
    )


def messages(spark: SparkSession, wal: WalVersion, ranges: Ranges) -> ValidationInput:
    """Return the messages of the range, each with columns that compare it to the previous message of its PChannel."""
    order = Window.partitionBy("pchannel").orderBy(*MESSAGE_ID_COLUMNS)
    opened = F.last(F.when(F.col("type") == "TERM_OPENING", F.col("term")), ignorenulls=True)
    so_far = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = {name: _term_at(wal, name, each.after) for name, each in ranges.items()}
    known = [F.when(F.col("pchannel") == name, F.lit(term)) for name, term in before.items() if term is not None]
    expected = F.coalesce(opened.over(so_far), *known, F.first("term").over(so_far))
    identity, confirmed = (
        F.struct(*MESSAGE_ID_COLUMNS),
        F.struct(*(F.col(name).alias(to) for name, to in zip(LAST_CONFIRMED_COLUMNS, MESSAGE_ID_COLUMNS, strict=True))),
    )
    tick_ms = F.shiftright("time_tick", LOGICAL_BITS)
    rows = _wal_rows(spark, wal, KIND_MESSAGE).where(in_ranges(ranges, key=F.col("pchannel"), tick="time_tick"))
    data = rows.select(
        *("pchannel", "time_tick", *MESSAGE_ID_COLUMNS, "type", "vchannel", "term", "rows", "reason"),
        (F.col("time_tick") - F.lag("time_tick").over(order)).alias("tick_step"),
        (F.col("term") - expected).alias("term_step"),
        (confirmed > identity).cast("int").alias("confirmed_ahead"),
        F.when(confirmed < F.lag(confirmed).over(order), F.lit(-1)).otherwise(F.lit(0)).alias("confirmed_step"),
        (F.col("physical_ms") - tick_ms).alias("tick_behind_ms"),
        (F.to_date(F.timestamp_millis(tick_ms)) != F.col("date")).cast("int").alias("date_differs"),
        (F.col("reason").isNotNull()).cast("int").alias("has_reason"),
        ((F.col("vchannel") != "") & ~F.col("vchannel").startswith(F.concat("pchannel", F.lit("_"))))
        .cast("int")
        .alias("foreign_vchannel"),
    )
    return ValidationInput("wal", data, suites.WAL, ranges, ("pchannel", "time_tick", *MESSAGE_ID_COLUMNS))


def rejections(spark: SparkSession, wal: WalVersion, ranges: Ranges) -> ValidationInput:
    """Return the rejections of the range, including those at its open end.

    Rejections have no tick of their own, so further ones may have arrived at the open end since the last check.
    """
    rows = _wal_rows(spark, wal, KIND_REJECTION)
    rows = rows.where(in_ranges(ranges, key=F.col("pchannel"), tick="time_tick", inclusive=True))
    data = rows.select("pchannel", "time_tick", *MESSAGE_ID_COLUMNS, "physical_ms", "type", "vchannel", "reason")
    return ValidationInput("wal/rejections", data, suites.REJECTIONS, ranges, ("pchannel", *MESSAGE_ID_COLUMNS))


def channels(spark: SparkSession, wal: WalVersion, trimmed: Mapping[str, WalTotals]) -> ValidationInput:
    """Return one row per PChannel: what its commits counted compared with what the Delta log lists.

    Reads no data file. `trimmed` maps a PChannel to the rows that retention has removed.
    """
    actions = wal.table.table.actions()
    counted = actions.group_by(["partition.pchannel", "partition.kind"]).aggregate(
        [("num_records", "sum"), ("num_records", "count")]
    )
    stored = {
        (row["partition.pchannel"], row["partition.kind"]): (row["num_records_sum"] or 0, row["num_records_count"])
        for row in counted.to_pylist()
    }
    rows = []
    for name, position in wal.table.positions(wal.table.pchannels()).items():
        gone = trimmed.get(name, WalTotals())
        state = position.state
        rows.append(
            {
                "pchannel": name,
                "messages_missing": position.totals.messages
                - gone.messages
                - stored.get((name, KIND_MESSAGE), (0, 0))[0],
                "rejections_missing": position.totals.rejections
                - gone.rejections
                - stored.get((name, KIND_REJECTION), (0, 0))[0],
                "states": stored.get((name, KIND_STATE), (0, 0))[1],
                "tick_differs": position.last_tick - (0 if state is None else state.last_tick),
            }
        )
    schema = "pchannel string, messages_missing long, rejections_missing long, states long, tick_differs long"
    return ValidationInput("wal/channels", spark.createDataFrame(rows, schema), suites.CHANNELS, {}, ("pchannel",))


def checkpoints(spark: SparkSession, settings: Settings, version: int, wal: WalVersion) -> ValidationInput:
    """Return the live rows of a version of ``checkpoints`` that is not newer than `wal`."""
    rows = spark_frame(spark, store_at(settings.checkpoints_uri), version)
    reached = wal.committed_ticks
    known = F.coalesce(*(F.when(F.col("pchannel") == name, F.lit(tick)) for name, tick in reached.items()), F.lit(0))
    data = rows.select(
        *("pchannel", "time_tick", "lc_entry", "term"),
        F.length("catalog").alias("catalog"),
        F.count("*").over(Window.partitionBy("pchannel")).alias("live_rows"),
        (F.col("time_tick") - known).alias("ahead_of_wal"),
    )
    return ValidationInput("checkpoints", data, suites.CHECKPOINTS, {}, ("pchannel", "time_tick"))


def segments(
    spark: SparkSession,
    settings: Settings,
    version: int,
    ranges: Ranges,
    versions: Callable[[list[int]], Mapping[int, tuple[int, int]]],
) -> ValidationInput:
    """Return the segment states that became known in the range, flushed ones compared with their stored rows.

    `versions` maps collections to the version of their table and the tick up to which its rows were rewritten. It is
    asked for those with flushed segments in the range.
    """
    rows = spark_frame(spark, store_at(settings.segments_uri), version)
    # Compaction adds a later flushed row to a segment that absorbed others. Their rows keep their own segment ids.
    history = Window.partitionBy("pchannel", "segment_id", "state").orderBy("time_tick")
    rows = rows.withColumn("nth", F.row_number().over(history))
    rows = rows.where(in_ranges(ranges, key=F.col("pchannel"), tick="time_tick"))
    rows = rows.withColumn("age_ticks", F.col("time_tick") - F.col("created_tick"))
    flushed = rows.where((F.col("state") == "flushed") & (F.col("nth") == 1))
    bounds = flushed.groupBy("collection_id").agg(F.min("created_tick").alias("low"), F.max("time_tick").alias("high"))
    counts: list[DataFrame] = []
    flushed_collections = bounds.collect()
    stored = versions([row["collection_id"] for row in flushed_collections])
    for found in flushed_collections:
        if found["collection_id"] in stored:
            of_rows, rewritten = stored[found["collection_id"]]
            part = spark_frame(spark, store_at(rows_uri(settings, found["collection_id"])), of_rows)
            part = part.where((F.col("_time_tick") >= found["low"]) & (F.col("_time_tick") <= found["high"]))
            part = part.groupBy(F.col("_vchannel").alias("vchannel"), F.col("_segment_id").alias("segment_id")).agg(
                F.count("*").alias("stored_rows")
            )
            counts.append(part.withColumn("rewritten", F.lit(rewritten)))
    if counts:
        rows = rows.join(reduce(lambda a, b: a.unionByName(b), counts), ["vchannel", "segment_id"], "left")
    else:
        rows = rows.withColumn("stored_rows", F.lit(None).cast("long")).withColumn("rewritten", F.lit(0))
    known = pa.array(sorted(stored), pa.int64()).to_pylist()
    folded = reduce(
        lambda column, item: column.when(F.col("collection_id") == item[0], F.lit(item[1][1])),
        stored.items(),
        F.when(F.lit(False), F.lit(0)),
    )
    comparable = (
        (F.col("state") == "flushed")
        & (F.col("nth") == 1)
        & F.col("collection_id").isin(known)
        & (F.col("created_tick") > F.coalesce(folded, F.lit(0)))
    )
    missing = F.when(comparable, F.col("rows") - F.coalesce("stored_rows", F.lit(0)))
    columns = ("pchannel", "vchannel", "segment_id", "state", "rows", "bytes", "created_tick", "time_tick", "age_ticks")
    data = rows.select(*columns, missing.alias("rows_missing"))
    return ValidationInput("segments", data, suites.SEGMENTS, ranges, ("pchannel", "segment_id", "state"))


def _wal_rows(spark: SparkSession, wal: WalVersion, kind: str) -> DataFrame:
    return spark_frame(spark, wal.table.table.store, wal.table.version).where(F.col("kind") == kind)


def _term_at(wal: WalVersion, pchannel: str, tick: int) -> int | None:
    """Return the term of the last message at or before `tick`.

    Returns 0 before the first message and None if retention removed it. Reads one file.
    """
    files = wal.snapshot.plan(pchannel, up_to_tick=tick).files if tick else ()
    if files:
        with wal.table.table.open_file(files[-1].path) as parquet:
            rows = parquet.read(columns=["time_tick", "term"])
        rows = rows.filter(pc.less_equal(rows["time_tick"], tick))
        if rows.num_rows:
            return int(rows["term"][-1].as_py())
    return None if wal.snapshot.trimmed(pchannel)[0] else 0
