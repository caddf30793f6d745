"""The rows of a collection under Spark, as a batch, as a stream, and as a snapshot with what follows.

Python's changes, row for row.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

import millrace.spark as face
from millrace.base.errors import InvalidArgument, TickNotReached
from millrace.flows.sources.collection import frames as source
from millrace.flows.sources.collection.rows import Place, RowsOf, RowsPlanner, rows_of
from millrace.flows.sources.collection.spark_source import RowsSource
from millrace.runtime.job import error_json
from millrace.testing import Deployment, deployment
from tests.docs.pages import python_blocks
from tests.docs.test_examples import run as run_block

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    """One for the module: a test takes collections of its own."""
    with deployment() as made:
        yield made


def python_changes(db: Deployment, **options: Any) -> Counter[tuple[Any, ...]]:
    """What a program gets that reads the changes up to now without Spark."""
    until = max(db.connection.tick(name) for name in db.definition("people").pchannels)
    with db.collection("people").changes(until=until, **options) as stream:
        return Counter(tuple(row.values()) for batch in stream for row in batch.rows.to_pylist())


def counted(rows: Any) -> Counter[tuple[Any, ...]]:
    return Counter(map(tuple, rows))


def run(frame: DataFrame, folder: Path) -> list[tuple[Any, ...]]:
    """The rows of a stream up to now, from where its checkpoint in `folder` says."""
    found: list[tuple[Any, ...]] = []

    def take(batch: DataFrame, number: int) -> None:
        found.extend(map(tuple, batch.collect()))

    query = (
        frame.writeStream.foreachBatch(take)
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


@pytest.mark.slow
def test_a_batch_and_a_stream_that_is_started_again_are_pythons_changes(
    spark: SparkSession, db: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = db.create_collection("people", {"id": "int64", "name": "string"}, key="id")
    people.insert([{"id": number, "name": f"n{number}"} for number in range(20)])
    people.upsert([{"id": 1, "name": "one"}])
    people.delete([2, 3])
    db.settle()
    batch = face.changes_between(spark, "people", settings=db.settings)
    assert batch.columns[:3] == ["id", "name", "_change"]
    every = python_changes(db)
    assert counted(batch.collect()) == every
    first = run(face.stream(spark, "people", settings=db.settings, max_bytes=1), tmp_path / "all")
    assert counted(first) == every
    [tick] = batch.selectExpr("max(_time_tick)").collect()[0]
    shown = run(face.stream(spark, "people", snapshot="now", settings=db.settings), tmp_path / "snapshot")
    assert sorted(row[:3] for row in shown) == sorted((*row.values(), "insert") for row in people.read().to_pylist())
    people.upsert([{"id": 4, "name": "four"}])
    people.insert(pa.table({"id": [100], "name": ["new"]}))
    db.settle()
    more = python_changes(db, after=tick)
    again = run(face.stream(spark, "people", after=None, settings=db.settings), tmp_path / "snapshot")
    assert counted(again) == more, "it goes on where it was, whatever its start says now"
    later = face.changes_between(spark, "people", after=tick, columns=["_change", "id"], settings=db.settings)
    assert counted(later.collect()) == Counter([("delete", 4), ("insert", 4), ("insert", 100)])
    monkeypatch.setenv("MILLRACE_DATA", str(db.settings.data_dir))
    names: dict[str, Any] = {}
    for block in python_blocks("docs/streams.md"):
        run_block(block.text, names)
    assert names["every"].count() == sum(every.values()) + sum(more.values())
    assert names["late"].count() == names["every"].count(), "all of it is of the last hour"
    assert names["rows"].isStreaming
    assert counted(names["one"].collect()) == counted(row.values() for row in names["same"].read_all().to_pylist())
    names["db"].close()
    for begin in (tick, tick + 1):  # nothing lies in between
        assert face.changes_between(spark, "people", after=begin, until=tick, settings=db.settings).collect() == []
    with pytest.raises(TickNotReached, match="ahead of the log's clock"):
        face.changes_between(spark, "people", until="2999-01-01T00:00:00Z", deadline=0.1, settings=db.settings)


def test_a_process_that_reads_for_spark_loads_no_client() -> None:
    code = (
        "import sys, millrace.flows.sources.collection.spark_source; print(*(name for name in sys.modules if"
        " name.startswith('millrace.client')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_channels_are_read_alone_in_python_and_by_the_options_of_the_source(db: Deployment) -> None:
    parted = db.create_collection("parted", {"id": "int64"}, key="id", vchannels=3)
    parted.insert({"id": list(range(30))})
    parted.delete([1, 2, 3])
    db.settle()
    every = parted.changes_between().read_all()
    vchannels, pchannels = parted.definition.vchannels, parted.definition.pchannels
    assert len(pchannels) == 2
    for name in (*vchannels, *pchannels):
        own = [row for row in every.to_pylist() if row["_vchannel"] == name or row["_vchannel"].startswith(f"{name}_")]
        assert own
        assert parted.changes_between(channels=[name]).read_all().to_pylist() == own
        rows = RowsOf.find(db.settings, "parted", channels=[name])
        sent = replace(rows, settings=pickle.loads(pickle.dumps(rows.settings)))
        assert RowsSource(source._options(rows, Place.behind(rows)))._rows == sent, (
            "what each task makes of its options"
        )
        planner = RowsPlanner(rows)
        parts = planner.tasks(Place.behind(rows), planner.next(Place.behind(rows)))
        assert [row for part in parts for batch in rows_of(rows, part) for row in batch.to_pylist()] == own
    with parted.changes(channels=[vchannels[0]]) as begun:
        assert set(begun.positions) == {pchannels[0]}
    for refused in (
        lambda: parted.changes(channels=["nowhere"]),
        lambda: RowsOf.find(db.settings, "parted", channels=["x"]),
    ):
        with pytest.raises(InvalidArgument, match="'parted' has no channel"):
            refused()


@pytest.mark.slow
def test_what_a_stream_cannot_give_stops_it_with_a_typed_error(
    spark: SparkSession, db: Deployment, tmp_path: Path
) -> None:
    deleted = db.create_collection("deleted", {"id": "int64"}, key="id")
    deleted.insert([{"id": 1}])
    deleted.delete([1])
    db.settle()
    with pytest.raises(StreamingQueryException) as raised:
        run(face.stream(spark, "deleted", kinds="inserts", settings=db.settings), tmp_path / "checkpoint")
    assert error_json(raised.value)["code"] == "CHANGES_REFUSED"
    assert "read all kinds of changes" in error_json(raised.value)["message"]
