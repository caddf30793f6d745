"""The declared streams of the demo, over the flights of 2013."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from millrace.flows.declare.flow import Flow, Transform
from millrace.flows.declare.rows import Watermark
from millrace.flows.sinks.collection.model import CollectionSink
from millrace.flows.sources.collection.model import CollectionSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LATE_MINUTES: Final = 15
"""A departure counts as late from this many minutes on, as in the airlines' own statistics."""

HOURLY: Final[dict[str, str]] = {
    "origin": "string",
    "hour": "timestamp",
    "scheduled": "int64?",
    "departed": "int64?",
    "cancelled": "int64?",
    "late": "int64?",
    "mean_dep_delay": "float64?",
    "max_dep_delay": "float64?",
    "mean_arr_delay": "float64?",
    "carriers": "int64?",
}
"""The columns of the result of :func:`flights_hourly`."""


def flights_hourly(flights: DataFrame) -> DataFrame:
    """Aggregate flights by origin and scheduled hour: how many departed, and how late (minutes).

    Gives the same for a stream and a batch. The hour is a window, so that a stream drops its state once the watermark
    has passed.
    """
    from pyspark.sql import functions as F

    late = F.col("dep_delay") >= LATE_MINUTES
    grouped = flights.groupBy("origin", F.window("time_hour", "1 hour").alias("window")).agg(
        F.count("*").alias("scheduled"),
        F.count("dep_time").alias("departed"),
        (F.count("*") - F.count("dep_time")).alias("cancelled"),
        F.count(F.when(late, 1)).alias("late"),
        F.avg("dep_delay").alias("mean_dep_delay"),
        F.max("dep_delay").alias("max_dep_delay"),
        F.avg("arr_delay").alias("mean_arr_delay"),
        F.size(F.collect_set("carrier")).cast("long").alias("carriers"),
    )
    columns: list[Any] = [F.col("window.start").alias("hour") if name == "hour" else F.col(name) for name in HOURLY]
    return grouped.select(*columns)


FLOWS: Final = [
    Flow(
        name="flights_hourly",
        description="Departures and delays by origin and scheduled hour.",
        source=CollectionSource(
            collection="flights",
            columns=("origin", "time_hour", "dep_delay", "dep_time", "arr_delay", "carrier"),
            # The demo sends the year again and again, so rows may be up to a year late.
            watermark=Watermark(column="time_hour", delay="400 days"),
        ),
        transform=Transform(function=flights_hourly, output_mode="update"),
        sink=CollectionSink(collection="flights_by_hour", mode="upsert", create=True, key="origin, hour"),
    )
]
