"""The flusher as Spark runs it: the same tables as without Spark, whatever becomes of Spark's checkpoint."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
from deltalake import DeltaTable, write_deltalake

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush.definition import FlushLoop, flush_to_end
from millrace.node.flush.flusher import run_flush
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.flush_tables import read_checkpoints
from millrace.tables.read.arrow import read_arrow
from tests.node.flush.plans import plans_of
from tests.tables.wal_maker import Collection, WalMaker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def grown(settings: Settings, commits: int) -> tuple[WalMaker, Collection]:
    """A collection with an insert and a delete on each VChannel in each of `commits` WAL commits."""
    maker = WalMaker(settings)
    maker.open()
    collection = Collection(maker)
    collection.create()
    for number in range(commits):
        more(collection, number)
    return maker, collection


def more(collection: Collection, number: int) -> None:
    for vchannel in collection.vchannels:
        keys = collection.keys_of(vchannel, 3)
        rows: dict[str, list[object]] = {"id": list(keys), "body": [f"{number}" for _ in keys]}
        collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
        collection.append(vchannel, collection.delete(keys[:1], vchannel=vchannel))
    collection.maker.commit()


def table_rows(settings: Settings) -> Counter[Any]:
    rows = DeltaTable(str(Path(rows_uri(settings, 1)))).to_pyarrow_dataset().to_table().to_pylist()
    return Counter(tuple(sorted(row.items())) for row in rows)


def test_a_plan_and_its_report_cross_into_the_jvm_and_back_unchanged(settings: Settings) -> None:
    grown(settings, 1)
    for plan in plans_of(settings):
        assert pickle.loads(pickle.dumps(plan)) == plan
        report = run_flush(settings, plan)
        assert pickle.loads(pickle.dumps(report)) == report


def test_a_flush_without_news_commits_nothing(settings: Settings) -> None:
    grown(settings, 1)
    assert flush_to_end(settings)
    versions = [
        DeltaTable(str(path)).version() for path in (Path(rows_uri(settings, 1)), Path(settings.checkpoints_uri))
    ]
    assert flush_to_end(settings) == {}
    assert versions == [
        DeltaTable(str(path)).version() for path in (Path(rows_uri(settings, 1)), Path(settings.checkpoints_uri))
    ]


def test_the_checkpoints_table_keeps_one_live_row_a_pchannel(settings: Settings) -> None:
    _, collection = grown(settings, 1)
    for number in range(3):
        flush_to_end(settings)
        more(collection, number + 1)
    flush_to_end(settings)
    table = open_table(Path(settings.checkpoints_uri))
    assert table is not None
    assert len(table.file_uris()) == 2
    assert sorted(read_checkpoints(table)) == ["p0", "p1"]


def test_duckdb_reads_the_tables_as_they_lie(settings: Settings) -> None:
    grown(settings, 2)
    flush_to_end(settings)
    uris = DeltaTable(str(Path(rows_uri(settings, 1)))).file_uris()
    count, keys = duckdb.sql(f"select count(*), count(distinct id) from read_parquet({uris})").fetchall()[0]
    assert (count, keys) == (12, 6)


@pytest.mark.slow
@pytest.mark.spark
def test_the_query_fills_the_tables_and_needs_no_checkpoint_of_its_own(
    spark: SparkSession, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from millrace.node.range_loop.query import start_query

    _, collection = grown(settings, 3)
    other = Settings(data_dir=tmp_path_factory.mktemp("plain") / "data")
    metrics = Metrics()
    for again in range(2):
        query = start_query(spark, FlushLoop(settings), metrics=metrics, available_now=True)
        query.awaitTermination()
        assert query.exception() is None
        shutil.rmtree(other.data_dir, ignore_errors=True)
        shutil.copytree(Path(settings.wal_uri), Path(other.wal_uri))
        flush_to_end(other)
        assert table_rows(settings) == table_rows(other)
        assert read_arrow(settings, 1).num_rows == read_arrow(other, 1).num_rows > 0
        shutil.rmtree(settings.spark_checkpoint_path(FlushLoop.name))
        more(collection, 10 + again)
    assert json.loads(settings.progress_path(FlushLoop.name).read_text())["rows"] > 0
    assert metrics.render().count(b"millrace_flusher_rows_total{") == 2


@pytest.mark.slow
@pytest.mark.spark
def test_delta_spark_and_delta_rs_both_append_to_a_collection(spark: SparkSession, settings: Settings) -> None:
    _, collection = grown(settings, 1)
    flush_to_end(settings)
    path = str(Path(rows_uri(settings, 1)))
    spark.read.format("delta").load(path).write.format("delta").mode("append").save(path)
    write_deltalake(path, DeltaTable(path).to_pyarrow_dataset().to_table(), mode="append")
    more(collection, 1)
    flush_to_end(settings)
    assert spark.read.format("delta").load(path).count() == 4 * 6 + 6
