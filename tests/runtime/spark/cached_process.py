"""A driver that caches a DataFrame and idles until the executors that hold it are gone, then counts it again.

Prints the executors and the cached partitions before and after, and both counts, as JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from millrace.base.settings import Settings
from millrace.spark import read, session
from tests.waiting import until

PARTITIONS = 8


def main() -> None:
    """Run it by the settings of the environment."""
    settings = Settings.load()
    spark = session("cached", settings=settings)
    frame = read(spark, "numbers", settings=settings).repartition(PARTITIONS, "id").select("id", F.col("v") * 2)
    frame.cache()
    spark.sparkContext.parallelize(range(PARTITIONS), PARTITIONS).map(lambda _: time.sleep(4)).count()
    first = sorted(tuple(row) for row in frame.collect())
    before = {"executors": executors(spark), "cached": cached(spark)}
    until(lambda: executors(spark) <= 1, "the executors that hold the cached rows are gone", seconds=120)
    after = {"executors": executors(spark), "cached": cached(spark)}
    again = sorted(tuple(row) for row in frame.collect())
    print(json.dumps({"before": before, "after": after, "rows": len(first), "equal": first == again}), flush=True)
    spark.stop()


def executors(spark: SparkSession) -> int:
    """Return how many executors the driver has now."""
    return int(context(spark).getExecutorMemoryStatus().size()) - 1


def cached(spark: SparkSession) -> int:
    """Return how many partitions are cached now."""
    return sum(int(each.numCachedPartitions()) for each in context(spark).getRDDStorageInfo())


def context(spark: SparkSession) -> Any:
    """Return the JVM's context."""
    return spark.sparkContext._jsc.sc()


if __name__ == "__main__":
    main()
