"""An operator behind Spark's shuffle: the same answers as in the calling process, each once, whatever is repeated."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from millrace.base.errors import InvalidArgument
from millrace.spark import operate
from millrace.streams.operators.patterns import Patterns
from tests.flows.spark_host.stream_process import BATCHES, QUERY
from tests.flows.spark_host.stream_process import stream as in_process
from tests.streams.operators.cuts import alike

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]
COLUMNS = "k string, t long, v long"
PATTERN = Patterns(QUERY, "t")


def run(spark: SparkSession, folder: Path, *, checkpoint: str = "checkpoint", shards: int = 2) -> None:
    """Everything there is, a file a micro-batch."""
    frame = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(folder / "input"))
    query = operate(
        frame,
        PATTERN,
        table=str(folder / "answers"),
        checkpoint=folder / checkpoint,
        delay=3,
        shards=shards,
        available_now=True,
    )
    assert query.awaitTermination(120)


def answers(spark: SparkSession, folder: Path) -> list[tuple[str, ...]]:
    table = spark.read.format("delta").load(str(folder / "answers")).where("kind = 'output'")
    return alike([row.asDict() for row in table.select("k", "a", "b", "m").collect()])


@pytest.mark.slow
def test_spark_answers_as_the_calling_process_does_and_a_repeated_batch_changes_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "input").mkdir()
    reference = in_process(tmp_path / "reference")
    for number, rows in enumerate(BATCHES):
        if number == 3:
            rows = rows.filter([key.as_py() != "k1" for key in rows["k"]])  # a shard may get no row
        path = tmp_path / "input" / f"{number}.parquet"
        pq.write_table(rows, path)
        stamp = time.time() - 100 + number
        os.utime(path, (stamp, stamp))
        reference.batch(number, rows)
    run(spark, tmp_path)
    whole = alike(reference.table.answers().to_pylist())
    assert whole
    assert answers(spark, tmp_path) == whole

    # Spark died before it noted that the last micro-batch was taken: it comes again.
    for name in ("3", ".3.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    run(spark, tmp_path)
    assert answers(spark, tmp_path) == whole

    # Another checkpoint counts from 0: its batches would be passed over in silence.
    with pytest.raises(InvalidArgument, match="another checkpoint"):
        run(spark, tmp_path, checkpoint="another")
    with pytest.raises(InvalidArgument, match="as many shards"):
        run(spark, tmp_path, shards=3)
    shutil.rmtree(tmp_path / "answers")
    with pytest.raises(InvalidArgument, match="at least one"):
        run(spark, tmp_path, shards=0)
