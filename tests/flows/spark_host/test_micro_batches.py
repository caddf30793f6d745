"""Streaming DataFrames into sinks under Spark.

A mirror of a collection, a Delta table, a function; and the page's example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException

import millrace.spark as face
from millrace.base.errors import InvalidArgument
from millrace.client.produce.lane import Lane
from millrace.flows.batch import Batch
from millrace.flows.sinks.delta.sink import DeltaSink
from millrace.flows.sinks.function.sink import FunctionSink
from millrace.flows.spark_host import incarnations, micro_batches
from millrace.testing import Deployment, deployment
from tests.docs.pages import python_blocks
from tests.docs.test_examples import run as run_block

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

FIELDS = {"id": "int64", "name": "string"}


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    """One for the module: a test takes collections of its own."""
    with deployment(append_attempts=1) as made:
        yield made


def rows_of(db: Deployment, name: str) -> Counter[tuple[Any, ...]]:
    db.settle()
    return Counter(tuple(row.values()) for row in db.collection(name).read().to_pylist())


@pytest.mark.slow
def test_a_stream_of_all_changes_keeps_a_mirror_across_crashes_of_its_sink(
    spark: SparkSession, db: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = db.create_collection("people", FIELDS, key="id", vchannels=2)
    db.create_collection("mirror", FIELDS, key="id", vchannels=2)
    people.insert([{"id": number, "name": f"n{number}"} for number in range(50)])
    people.upsert([{"id": 1, "name": "one"}])
    people.delete([2, 3])
    db.settle()

    def run() -> None:
        rows = face.stream(spark, "people", settings=db.settings, max_bytes=1)
        into = face.write_stream(
            rows, "mirror", mode="changes", checkpoint=tmp_path / "m", available_now=True, settings=db.settings
        )
        into.awaitTermination()

    delivered, calls = Lane.deliver, []

    def dies(self: Lane, *args: Any, **options: Any) -> None:
        delivered(self, *args, **options)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("behind the second delivery")

    with patch.object(Lane, "deliver", dies), pytest.raises(StreamingQueryException, match="behind the second"):
        run()
    people.upsert([{"id": 1, "name": "again"}, {"id": 70, "name": "new"}])
    people.delete([1])
    db.settle()
    run()
    assert rows_of(db, "mirror") == rows_of(db, "people")
    rows = face.stream(spark, "people", settings=db.settings, columns=["id"]).selectExpr("id", "id as other")
    with pytest.raises(InvalidArgument, match="no column 'other'"):
        face.write_stream(rows, "mirror", checkpoint=tmp_path / "o", settings=db.settings)
    monkeypatch.setenv("MILLRACE_DATA", str(db.settings.data_dir))
    names: dict[str, Any] = {}
    run_block(python_blocks("docs/sinks.md")[0].text, names)
    names["query"].awaitTermination()
    assert sum(rows_of(db, "names_seen").values()) == 51


@pytest.mark.slow
def test_a_delta_table_has_each_batch_once_and_a_new_checkpoint_is_not_left_out(
    spark: SparkSession, tmp_path: Path
) -> None:
    frame, table = spark.range(3), str(tmp_path / "table")
    for folder, batches in (("one", [0, 0]), ("one", [0, 1]), ("anew", [0])):
        sink = DeltaSink(table, memory=tmp_path / folder)
        for batch_id in batches:
            sink.write(Batch.of_rows("query", batch_id, frame.toArrow().to_batches()))
    assert DeltaTable(table).to_pyarrow_table().num_rows == (2 + 1) * 3
    least = DeltaSink(table, memory=tmp_path / "least", guarantee="at least once")
    for _ in range(2):
        least.write(Batch.of_rows("query", 0, frame.toArrow().to_batches()))
    assert DeltaTable(table).to_pyarrow_table().num_rows == (2 + 1 + 2) * 3
    with pytest.raises(InvalidArgument, match="one of 'exactly once', 'at least once'"):
        DeltaSink("nowhere", memory=tmp_path / "most", guarantee="at most once")


@pytest.mark.slow
def test_a_function_gets_frames_and_their_numbers(spark: SparkSession, db: Deployment, tmp_path: Path) -> None:
    persons = db.create_collection("persons", FIELDS, key="id")
    persons.insert([{"id": number, "name": "n"} for number in range(5)])
    db.settle()
    found: list[tuple[int, int]] = []

    def take(frame: DataFrame, batch_id: int) -> None:
        found.append((batch_id, frame.count()))
        if len(found) == 1:
            raise RuntimeError("once")

    for _ in range(2):
        sink = FunctionSink(incarnations.sink_folder(tmp_path / "function"), take)
        rows = face.stream(spark, "persons", settings=db.settings)
        query = micro_batches.start(rows, sink, tmp_path / "function", available_now=True)
        with suppress(StreamingQueryException):
            query.awaitTermination()
    assert [each for each in found if each[1]] == [(0, 5), (0, 5)]  # time goes on without rows, too
