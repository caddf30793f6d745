"""Streams on Spark go on from a backup that was made while they ran: state of windows, appended rows, each once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import millrace.testing
from millrace.base.errors import InvalidStream
from millrace.base.metrics import Metrics
from millrace.demo.streams import HOURLY
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.stream import From, Into, Stream
from millrace.flows.spark_host.incarnations import Incarnations, newest_batch
from millrace.flows.spark_host.query import StreamQuery
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import run as make_backup
from millrace.runtime.progress import Progress
from tests.failpoints import at_failpoints
from tests.flows.spark_host.test_running import FLIGHTS, by_duckdb, flights, hourly, rows_of, run
from tests.operations.backup_world import settings_in
from tests.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def copied() -> Flow:
    return Stream(name="copied", source=From(collection="flights"), sink=Into(collection="copied", mode="append"))


def to_table(folder: Path) -> Flow:
    return Stream(name="out", source=From(collection="flights"), sink=Into(delta=str(folder / "out")))


@pytest.mark.slow
def test_streams_that_run_while_a_backup_is_made_have_each_row_once_after_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    streams = [hourly("hourly", "flights"), copied(), to_table(tmp_path)]
    ended = threading.Event()
    with millrace.testing.deployment(tmp_path / "data") as db:
        source = db.create_collection("flights", FLIGHTS, key="id", vchannels=2)
        db.create_collection("copied", FLIGHTS, key="id", vchannels=2)
        db.create_collection("hourly", HOURLY, key=("origin", "hour"), vchannels=2)
        source.insert(flights(0, 100))
        db.settle()

        def feed() -> None:
            start = 100
            while not ended.wait(0.05):
                source.insert(flights(start, 20))
                start += 20

        def newest(stream: Flow) -> int:
            kept = Incarnations(db.settings, stream.name)
            return newest_batch(kept.checkpoint(kept.state))

        begun = [StreamQuery(each) for each in streams]
        queries = [each(spark, settings=db.settings, metrics=Metrics()) for each in begun]
        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            until(lambda: all(newest(each) >= 3 for each in streams), "each has taken some batches", seconds=90)

            def act(name: str) -> None:
                if name == "backup.held":
                    time.sleep(0.5)

            with at_failpoints(act):
                make_backup(db.settings, BackupParams.parse({"to": str(tmp_path / "backups")}), Progress())
            after = [newest(each) for each in streams]
            until(lambda: all(newest(each) >= was + 3 for each, was in zip(streams, after, strict=True)), "they go on")
        finally:
            ended.set()
            feeder.join()
            for query, each in zip(queries, begun, strict=True):
                query.stop()
                each.close()
    restore_backup(settings_in(tmp_path / "restored"), tmp_path / "backups")
    with millrace.testing.deployment(tmp_path / "restored") as db:
        source = db.collection("flights")
        source.insert(flights(10_000_000, 50))
        for each in streams[:2]:
            run(spark, db, each)
        rows = source.read()
        assert len(rows) >= 150
        assert sorted(db.collection("copied").read(columns=["id"])["id"].to_pylist()) == sorted(rows["id"].to_pylist())
        assert rows_of(db, "hourly") == by_duckdb(rows)
        with pytest.raises(InvalidStream, match="the sink of 'out' has micro-batches up to"):
            run(spark, db, streams[2])
