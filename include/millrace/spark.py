"""Collections for Spark users: read one at a time tick as a DataFrame. The one module of the face that imports Spark.

from millrace.spark import read

flights = read(spark, "flights", at="2026-11-23T10:00:00Z")
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from millrace.base.settings import Settings
from millrace.client.client import Client
from millrace.message.ids import Moment, resolve_tick
from millrace.runtime.spark_session import session as session
from millrace.tables.read import spark as frames
from millrace.tables.read.freshness import confirm

__all__ = ["read", "session"]


def read(
    spark: SparkSession,
    name: str,
    *,
    at: Moment | None = None,
    deadline: float | None = None,
    where: str | Path | None = None,
    settings: Settings | None = None,
) -> DataFrame:
    """The rows of a collection of the data folder `where` (default: $MILLRACE_DATA) that are visible at `at`.

    `at` is a time tick, a datetime or ISO 8601 text; without one everything counts that was decided before the call, and it
    waits up to `deadline` seconds for the streaming node to have come that far. Versions are pinned when this returns: the
    DataFrame stays as it is. Raises TickNotReached, TickTooOld, CollectionNotFound.
    """
    chosen = settings or Settings.load()
    chosen = chosen if where is None else replace(chosen, data_dir=Path(where))
    seconds = chosen.read_deadline if deadline is None else deadline
    tick = None if at is None else resolve_tick(at)
    with Client.connect(chosen) as client:
        collection = client.collection(name)
        confirmed, _ = confirm(chosen, collection.pchannels, client.append, at=tick, seconds=seconds)
    return frames.read(spark, chosen, collection.id, at=tick, deadline=0.0, confirmed=confirmed)
