"""What the tests of backfill work on.

A deployment with a collection of trips, and a table of trips by hour and place.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.backfill.declaration import BackfillParams
from millrace.operations.backfill.derived import DerivedTable, derived_uri
from millrace.operations.backfill.run import BackfillReport, run
from millrace.runtime.progress import Progress

START = datetime(2024, 3, 1, tzinfo=UTC)
SCHEMA = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("at", "timestamp", True),
        FieldSpec("place", "string", True),
        FieldSpec("amount", "int64", True),
    ),
    "id",
    event_time="at",
)


def by_hour(trips: DataFrame) -> DataFrame:
    """Trips and amounts by hour and place."""
    return trips.groupBy(F.date_trunc("hour", "at").alias("hour"), "place").agg(
        F.count("*").alias("trips"), F.sum("amount").alias("amount")
    )


def shifted(trips: DataFrame) -> DataFrame:
    """A definition that is wrong: its buckets lie a day behind the rows'."""
    return by_hour(trips).withColumn("hour", F.col("hour") + F.expr("interval 1 day"))


def misspelt(trips: DataFrame) -> DataFrame:
    """A definition that is wrong: it names a column that is not there."""
    return trips.groupBy(F.date_trunc("hour", "when").alias("hour")).count()


ALIKE = tuple(f"trips_{name}" for name in ("hourly", "again", "mixed", "seen", "moved", "ticked", "killed", "bench"))
"""Tables of one definition: a test takes one of its own."""

TABLES = [
    *(DerivedTable(name=name, source="trips", build=by_hour, bucket="hour") for name in ALIKE),
    DerivedTable(name="trips_shifted", source="trips", build=shifted, bucket="hour"),
    DerivedTable(name="trips_misspelt", source="trips", build=misspelt, bucket="hour"),
    DerivedTable(name="of_no_rows", source="void", build=by_hour, bucket="hour"),
    DerivedTable(name="of_nothing", source="nothing", build=by_hour, bucket="hour"),
]


@dataclass(frozen=True)
class Rig:
    """A running deployment; the jobs' work is done in process."""

    settings: Settings
    client: Database
    collection: CollectionInfo
    spark: SparkSession

    def insert(self, ids: list[int], *, hours: int = 72, seed: int = 0) -> None:
        """Trips somewhere in the `hours` behind START."""
        dice = random.Random(seed)
        rows = pa.table(
            {
                "id": ids,
                "at": pa.array(
                    [START + timedelta(minutes=dice.randrange(hours * 60)) for _ in ids], pa.timestamp("us", "UTC")
                ),
                "place": [dice.choice(["north", "south", None]) for _ in ids],
                "amount": [dice.randrange(100) for _ in ids],
            }
        )
        self.client.new_producer().insert(self.collection, rows)

    def delete(self, ids: list[int]) -> None:
        self.client.new_producer().delete(self.collection, ids)

    def catch_up(self) -> None:
        """Have the streaming node, and then the flusher, come as far as the log is."""
        ingest_to_end(self.settings, self.client.log)
        flush_to_end(self.settings)

    def params(self, start: int, end: int, *, table: str = "trips_hourly", **more: Any) -> BackfillParams:
        """Hours from START."""
        moments = {"start": START + timedelta(hours=start), "end": START + timedelta(hours=end)}
        return BackfillParams.parse({"table": table, **moments, **more})

    def rebuild(self, start: int, end: int, *, table: str = "trips_hourly", **more: Any) -> BackfillReport:
        return run(self.spark, self.settings, self.params(start, end, table=table, **more), Progress())

    def rebuild_between(self, start: datetime, end: datetime, *, table: str) -> BackfillReport:
        """Rebuild what changed in the source between two moments."""
        params = BackfillParams.parse({"table": table, "start": start, "end": end, "range_of": "ticks"})
        return run(self.spark, self.settings, params, Progress())

    def rows(self, table: str = "trips_hourly") -> list[tuple[Any, ...]]:
        """The derived table's rows, in one order."""
        frame = self.spark.read.format("delta").load(str(Path(derived_uri(self.settings, table))))
        return sorted((tuple(row) for row in frame.collect()), key=str)

    def exists(self, table: str) -> bool:
        return Path(derived_uri(self.settings, table)).exists()


@contextmanager
def running(folder: Path, spark: SparkSession) -> Iterator[Rig]:
    """A deployment with an empty collection; its log server ends with the block."""
    settings = Settings(
        data_dir=folder, spark_cores=2, read_deadline=5.0, derived_modules="tests.operations.backfill_rig"
    )
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(2)
        collection = client.catalog.create_collection("trips", SCHEMA, vchannels=2)
        client.catalog.create_collection("void", SCHEMA)
        try:
            yield Rig(settings, client, collection, spark)
        finally:
            client.connection.service.shutdown()
