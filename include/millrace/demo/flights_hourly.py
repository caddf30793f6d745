"""The derived table of the demo: departures and delays by origin and hour, over the flights' own times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millrace.operations.backfill.derived import DerivedTable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LATE_MINUTES: Final = 15
"""A departure counts as late from here on, as the airlines' own statistics have it."""


def flights_hourly(flights: DataFrame) -> DataFrame:
    """Of the flights that were due to depart in an hour from an origin: how many did, and how late they were (minutes)."""
    from pyspark.sql import functions as F

    late = F.col("dep_delay") >= LATE_MINUTES
    return flights.groupBy("origin", F.date_trunc("hour", "time_hour").alias("hour")).agg(
        F.count("*").alias("scheduled"),
        F.count("dep_time").alias("departed"),
        (F.count("*") - F.count("dep_time")).alias("cancelled"),
        F.count(F.when(late, 1)).alias("late"),
        F.avg("dep_delay").alias("mean_dep_delay"),
        F.max("dep_delay").alias("max_dep_delay"),
        F.avg("arr_delay").alias("mean_arr_delay"),
        F.countDistinct("carrier").alias("carriers"),
    )


TABLES: Final = [
    DerivedTable(
        name="flights_hourly",
        source="flights",
        build=flights_hourly,
        bucket="hour",
        grain="hour",
        event_time="time_hour",
        words="Departures and delays by origin and hour, over the flights' own times.",
    )
]
