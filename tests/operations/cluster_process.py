"""Every operation with Spark tasks, once, on a cluster: python -m tests.operations.cluster_process.

The environment holds the settings of a deployment whose streaming node runs. Prints "done" at the end.
"""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from datetime import timedelta

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.operations.backfill.declaration import BackfillParams
from millrace.operations.backfill.derived import derived_uri
from millrace.operations.backfill.run import run as backfill
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import run as compact
from millrace.operations.quality.declaration import QualityParams
from millrace.operations.quality.run import run as check_quality
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.restore.run import run as restore
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.runtime.spark.session import session
from millrace.storage.table import open_table, table_at
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import read_checkpoints
from tests.operations.backfill_rig import START
from tests.waiting import until

ROWS = 400
DELETED = 100


def insert(db: Database, turn: int) -> None:
    dice = random.Random(turn)
    ids = list(range(turn * 100, turn * 100 + 100))
    times = [START + timedelta(minutes=dice.randrange(72 * 60)) for _ in ids]
    rows = {
        "id": ids,
        "at": pa.array(times, pa.timestamp("us", "UTC")),
        "place": [dice.choice(["north", "south", None]) for _ in ids],
        "amount": [dice.randrange(100) for _ in ids],
    }
    wait_until_flushed(db, db["trips"].insert(pa.table(rows)).last_tick)


def wait_until_flushed(db: Database, tick: int) -> None:
    names = db.definition("trips").pchannels

    def flushed() -> bool:
        table = open_table(db.settings.checkpoints_uri)
        found = {} if table is None else read_checkpoints(table)
        return all(name in found and found[name].time_tick >= tick for name in names)

    until(flushed, f"the tables have everything up to {tick}", seconds=240)


def compaction_rewrites_files_in_tasks(spark: SparkSession, db: Database) -> None:
    uri, before = rows_uri(db.settings, db.definition("trips").id), db["trips"].read(order_by="id")
    files = len(table_at(uri).live_files())
    params = CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum=False)
    report = compact(
        db.settings, params, Progress(), session_factory=lambda: nullcontext(spark), max_bytes_without_spark=0
    )
    assert {each.name: each.rows.rows_removed for each in report.collections}["trips"] == DELETED
    assert len(table_at(uri).live_files()) < files
    assert db["trips"].read(order_by="id").equals(before)


def a_range_is_rebuilt(spark: SparkSession, db: Database) -> None:
    params = {"table": "trips_hourly", "start": START, "end": START + timedelta(hours=72)}
    report = backfill(spark, db.settings, BackfillParams.parse(params), Progress())
    assert [each.outcome for each in report.slices] == ["written"] * 3
    found = table_at(derived_uri(db.settings, "trips_hourly")).dataset().to_table()
    assert pc.sum(found["trips"]).as_py() == db["trips"].count() == ROWS - DELETED


def the_tables_pass_their_checks(spark: SparkSession, db: Database) -> None:
    params = QualityParams(full=True)
    report = check_quality(db.settings, params, Progress(), session_factory=lambda: nullcontext(spark))
    assert report.passed, report.failed
    assert report.docs is not None
    assert all(each.ok for each in verify_collections(db.settings).values())


def an_earlier_state_becomes_a_collection(spark: SparkSession, db: Database, at: int) -> None:
    params = RestoreParams(collection="trips", into="earlier", at=str(at))
    report = restore(
        db.settings, params, Progress(), session_factory=lambda: nullcontext(spark), max_bytes_without_spark=0
    )
    assert report.rows == ROWS
    assert db["earlier"].read(order_by="id").equals(db["trips"].read(order_by="id", at=at))


def main() -> None:
    settings = Settings.load()
    spark = session("operations", settings=settings)
    try:
        with connect(settings=settings) as db:
            for turn in range(ROWS // 100):
                insert(db, turn)
            full = max(db.connection.tick(name) for name in db.definition("trips").pchannels)
            wait_until_flushed(db, db["trips"].delete(list(range(50, 50 + DELETED))).last_tick)
            an_earlier_state_becomes_a_collection(spark, db, full)
            compaction_rewrites_files_in_tasks(spark, db)
            a_range_is_rebuilt(spark, db)
            the_tables_pass_their_checks(spark, db)
    finally:
        spark.stop()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
