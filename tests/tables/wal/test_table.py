"""The wal table: made once, positions from one version, readable and writable by both engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pytest
from deltalake import DeltaTable

import millrace
from millrace.base.errors import InvalidArgument, StateDamaged
from millrace.message.ids import LogId
from millrace.node.ingest.committer import WalCommitter
from millrace.storage.table import table_at
from millrace.tables.wal.table import TABLE_SCHEMA, WalTable, WalTotals, partition_path
from tests.node.wal_samples import inserts, message, outcome, rejection, write_range

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def table(tmp_path: Path) -> WalTable:
    return WalTable.create(tmp_path / "wal")


def test_before_the_first_commit_a_pchannel_stands_nowhere(table: WalTable) -> None:
    position = table.position("p0")
    assert (position.commits, position.last_tick, position.state, position.position) == (0, 0, None, None)
    assert table.pchannels() == []


def test_a_position_is_that_of_the_last_commit(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri))
    committer.commit(
        [inserts(Path(table.uri), table.position("p0"), 1, 2), inserts(Path(table.uri), table.position("p1"), 5)]
    )
    assert table.position("p0").commits == 0, "a handle stays at its version until it is refreshed"
    table.refresh()
    committer.commit([inserts(Path(table.uri), table.position("p0"), 3)])
    table.refresh()
    found = table.positions(["p0", "p1", "p2"])
    assert {name: item.commits for name, item in found.items()} == {"p0": 2, "p1": 1, "p2": 0}
    assert {item.version for item in found.values()} == {table.version}
    assert found["p0"].position == LogId(0, 4)
    assert found["p0"].last_tick == message(3)["time_tick"]
    assert found["p0"].totals.messages == 3
    assert table.pchannels() == ["p0", "p1"]


def test_one_state_row_is_live_for_each_pchannel(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri))
    for entry in range(4):
        for name in ("p0", "p1"):
            committer.commit([inserts(Path(table.uri), committer.table.position(name), entry)])
    rows = DeltaTable(str(Path(table.uri))).to_pyarrow_table(filters=[("kind", "=", "state")]).to_pylist()
    assert sorted(row["pchannel"] for row in rows) == ["p0", "p1"]


def test_earlier_versions_keep_their_positions(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri))
    for entry in range(3):
        committer.commit([inserts(Path(table.uri), committer.table.position("p0"), entry)])
    for version in range(4):
        earlier = WalTable(table_at(Path(table.uri), version=version))
        assert earlier.position("p0").commits == version
        assert earlier.position("p0").totals.messages == version


def test_totals_add_up_over_commits_and_survive_checkpoints_and_log_cleanup(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri), checkpoint_commits=2)
    expected = WalTotals()
    for entry in range(5):
        base = committer.table.position("p0")
        report = write_range(
            Path(table.uri), base, outcome(base, messages=[message(entry)], rejections=[rejection(entry)])
        )
        expected += report.totals
        committer.commit([report])
    assert list((Path(table.uri) / "_delta_log").glob("*.checkpoint.parquet"))
    assert WalTable.open(table.uri).position("p0").totals == expected
    assert (expected.messages, expected.rejections, expected.digest.rows) == (5, 5, 10)


def test_a_table_whose_state_row_was_taken_away_is_an_error_and_not_a_new_start(table: WalTable) -> None:
    WalCommitter(WalTable.open(table.uri)).commit([inserts(Path(table.uri), table.position("p0"), 1)])
    DeltaTable(str(Path(table.uri))).delete("kind = 'state'")
    with pytest.raises(StateDamaged, match=r"no valid state row of p0 .*none at all"):
        WalTable.open(table.uri).position("p0")


@pytest.mark.parametrize("name", ["", "..", "a/b", "a=b", "a b", "ä"])
def test_a_pchannel_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        partition_path("message", name, "2025-06-15")


_CREATE = """
import sys
from millrace.storage.table import table_at
from millrace.tables.wal.table import WalTable
for path in map(str.strip, sys.stdin):
    table = WalTable.create(path) if path else None
    print(table and f"{table.version} {table.table.delta.metadata().id}", flush=True)
"""


def test_processes_that_create_it_at_once_get_one_table(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CREATE]
    environment = {**os.environ, "PYTHONPATH": str(Path(millrace.__file__).parent.parent)}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]

    def ask(line: str) -> set[str]:
        for process in processes:
            assert process.stdin
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return {process.stdout.readline().strip() for process in processes if process.stdout}

    try:
        assert ask("") == {"None"}, "both are up"
        for attempt in range(10):
            (found,) = ask(str(tmp_path / f"wal{attempt}"))
            assert found.startswith("0 ")
    finally:
        for process in processes:
            process.communicate(timeout=30)


def test_it_stays_with_the_features_that_both_engines_append_with(table: WalTable) -> None:
    protocol = table.table.delta.protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)
    assert not protocol.reader_features
    assert not protocol.writer_features


def test_files_are_pruned_by_tick(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri))
    for entry in range(0, 6, 2):
        committer.commit([inserts(Path(table.uri), committer.table.position("p0"), entry, entry + 1)])
    table.refresh()
    ticks = [message(entry)["time_tick"] for entry in range(6)]
    assert len(table.files("message", "p0")) == 3
    assert len(table.files("message", "p0", after=ticks[1])) == 2
    assert len(table.files("message", "p0", after=ticks[1], until=ticks[3])) == 1
    assert len(table.files("message", "p0", after=ticks[5])) == 0
    assert len(table.files("rejection", "p0")) == 0
    assert all((Path(table.uri) / name).is_file() for name in table.files("message", "p0"))


def test_duckdb_reads_what_was_committed(table: WalTable) -> None:
    WalCommitter(WalTable.open(table.uri)).commit([inserts(Path(table.uri), table.position("p0"), 1, 2)])
    arrow = DeltaTable(str(Path(table.uri))).to_pyarrow_dataset()
    found = duckdb.sql("SELECT entry, payload FROM arrow WHERE kind = 'message' ORDER BY entry").fetchall()
    assert arrow is not None
    assert found == [(1, b"payload 1"), (2, b"payload 2")]


@pytest.mark.slow
@pytest.mark.spark
def test_spark_reads_it_and_appends_to_it_and_delta_rs_goes_on(spark: SparkSession, table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri))
    committer.commit([inserts(Path(table.uri), table.position("p0"), 1, 2)])
    frame = spark.read.format("delta").load(str(Path(table.uri)))
    assert [item.name for item in frame.schema] == TABLE_SCHEMA.names
    pruned = frame.where("kind = 'message'").where(f"time_tick > {message(1)['time_tick']}")
    assert [bytes(row.payload) for row in pruned.collect()] == [b"payload 2"]
    other = frame.where("kind = 'message'").selectExpr("* EXCEPT (pchannel)", "'p9' AS pchannel")
    other.select(TABLE_SCHEMA.names).write.format("delta").mode("append").save(str(Path(table.uri)))
    protocol = DeltaTable(str(Path(table.uri))).protocol()
    assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2)
    base = WalTable.open(table.uri).position("p0")
    assert base.commits == 1
    result = committer.commit([inserts(Path(table.uri), base, 3)])
    assert len(result.committed) == 1
    assert result.conflicts == 1, "Spark's commit came between"
    assert frame.sparkSession.read.format("delta").load(str(Path(table.uri))).where("kind = 'message'").count() == 5
