"""Compaction as its job runs it.

Spark tasks beside the real flusher, Z-order, VACUUM, what is needed, which files are merged.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millrace.base.errors import CollectionNotFound, InvalidArgument, QualityBlocked
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField, apply_change
from millrace.node.flush.definition import FlushLoop, flush_to_end
from millrace.node.range_loop.query import start_query
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.need import need
from millrace.operations.compaction.run import compact, run
from millrace.operations.compaction.vacuum import vacuum_table
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.ranges import TickRange
from millrace.operations.quality.results import record_run
from millrace.runtime.progress import Progress
from millrace.storage.table import LiveFile, table_at
from millrace.tables.collections.data_tables import TICK, deletes_uri, rows_uri
from millrace.tables.read.arrow import read_arrow
from millrace.tables.rewrite.files import live_files, merge_groups
from tests.operations.test_compaction_beside_writers import Filled, filled, rows
from tests.operations.test_compaction_keeps_reads import accounted_for
from tests.tables.wal_maker import Collection, WalMaker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["filled"]

PARAMS = CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum=False)
NOW = Progress()


@pytest.mark.slow
@pytest.mark.spark
def test_spark_tasks_compact_between_and_beside_the_flushers_batches(
    spark: SparkSession, filled: Filled, tmp_path: Path
) -> None:
    settings = filled.copy(tmp_path)
    before = rows(settings)
    query = start_query(spark, FlushLoop(settings), metrics=Metrics(), available_now=True)
    report = run(settings, PARAMS, NOW, session_factory=lambda: nullcontext(spark), max_bytes_without_spark=0)
    query.awaitTermination(120)
    assert query.exception() is None
    assert report.collections[0].rows.rows_removed > 0
    assert rows(settings) == before
    run(settings, PARAMS, NOW, session_factory=lambda: nullcontext(spark), max_bytes_without_spark=0)
    assert rows(settings) == before
    accounted_for(settings)


@pytest.mark.slow
@pytest.mark.spark
def test_a_collection_is_z_ordered_by_a_column_and_reads_the_same(
    spark: SparkSession, filled: Filled, tmp_path: Path
) -> None:
    settings = filled.copy(tmp_path)
    before = rows(settings)
    params = PARAMS.model_copy(update={"collections": ("things",), "zorder_by": ("body",), "files": False})
    report = run(settings, params, NOW, session_factory=lambda: nullcontext(spark))
    assert report.collections[0].zordered
    flush_to_end(settings)
    compact(settings, PARAMS)
    assert rows(settings) == before
    accounted_for(settings)
    with pytest.raises(InvalidArgument, match="body"):
        run(
            settings,
            params.model_copy(update={"zorder_by": ("colour",)}),
            NOW,
            session_factory=lambda: nullcontext(spark),
        )


def test_little_is_compacted_without_a_session(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    before = rows(settings)

    def sessions() -> NoReturn:
        raise AssertionError("a session was made")

    report = run(settings, PARAMS, NOW, session_factory=sessions)
    assert report.collections[0].rows.rows_removed > 0
    assert rows(settings) == before
    with pytest.raises(AssertionError, match="a session was made"):
        run(filled.copy(tmp_path / "again"), PARAMS, NOW, session_factory=sessions, max_bytes_without_spark=0)


def test_rows_of_a_merged_file_lie_in_the_order_of_key_and_tick(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    compact(settings, PARAMS)
    [path] = DeltaTable(str(Path(rows_uri(settings, 1)))).file_uris()
    places = [(row["id"], row["_time_tick"]) for row in pq.read_table(path, partitioning=None).to_pylist()]
    assert places == sorted(places)


def test_a_file_that_cannot_be_read_costs_its_group_alone_and_keeps_the_deletes(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    before = rows(settings)
    path = Path(rows_uri(settings, 1))
    broken = path / live_files(table_at(path))[0].path
    whole = broken.read_bytes()
    broken.write_bytes(b"not Parquet")
    params = PARAMS.model_copy(update={"files": False})
    [work] = compact(settings, params).collections
    assert [broken.name in words for words in work.rows.given_up] == [True]
    assert work.rows.files_removed == work.rows.groups - 1 > 0
    assert work.folded_to == 0
    assert work.deletes.rows_removed == 0
    broken.write_bytes(whole)
    assert rows(settings) == before
    assert compact(settings, params).collections[0].folded_to
    assert rows(settings) == before
    accounted_for(settings)


def test_lists_and_added_fields_survive(settings: Settings) -> None:
    tags = FieldSpec("tags", "list<string>", True)
    schema = CollectionSchema((FieldSpec("id", "string", False), tags), "id")
    maker = WalMaker(settings, pchannels=("p0",))
    maker.open()
    collection = Collection(maker, vchannels=1, schema=schema)
    collection.create()
    [vchannel] = collection.vchannels
    values: list[object] = [["a", None], [], None]
    for number, value in enumerate(values):
        collection.append(vchannel, collection.insert({"id": [f"{number}"], "tags": [value]}, vchannel=vchannel))
        maker.commit()
        flush_to_end(settings)
    added = FieldSpec("extra", "timestamp", True)
    collection.append(
        vchannel,
        builders.schema_change([AddField(added)], vchannel=vchannel, collection_id=1, schema_version=2, term=1),
    )
    collection.schema, collection.schema_version = apply_change(schema, AddField(added)), 2
    late: dict[str, list[object]] = {"id": ["3"], "tags": [["b"]], "extra": [datetime(2025, 1, 1, tzinfo=UTC)]}
    collection.append(vchannel, collection.insert(late, vchannel=vchannel))
    maker.commit()
    assert not maker.rejected
    flush_to_end(settings)
    before = read_arrow(settings, 1).sort_by("id")
    assert compact(settings, PARAMS).collections[0].rows.files_removed == 4
    assert read_arrow(settings, 1).sort_by("id").equals(before)
    accounted_for(settings)


def test_vacuum_leaves_what_is_live_young_or_not_committed_yet(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    path = Path(rows_uri(settings, 1))
    before = rows(settings)
    old = time.time() - 3 * 86_400
    for file in path.glob("_date=*/*.parquet"):
        os.utime(file, (old, old))
    compact(settings, PARAMS)
    live = {Path(uri).name for uri in DeltaTable(str(path)).file_uris()}
    replaced = {file.name for file in path.glob("_date=*/*.parquet")} - live
    assert replaced
    pending, left = path / "part-of-a-task.parquet", path / "part-of-a-crash.parquet"
    for file in (pending, left):
        file.write_bytes(b"-")
    os.utime(left, (old, old))
    # Replaced a moment ago: readers may hold that version still, however old the files are.
    assert vacuum_table(path, hours=24, dry_run=True) == (1, 1)
    assert left.exists()
    assert vacuum_table(path, hours=24, dry_run=False) == (1, 1)
    assert not left.exists()
    assert pending.exists()
    assert {file.name for file in path.glob("_date=*/*.parquet")} == live | replaced
    assert rows(settings) == before
    with pytest.raises(InvalidArgument):
        vacuum_table(path, hours=23, dry_run=True)


def test_vacuum_waits_while_a_critical_expectation_stands_failed(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    check = Check("ticks", "expect_column_values_to_be_unique", {"column": "time_tick"}, "ticks are unique")
    wrong = TableCheckResult("wal", {"p0": TickRange(0, 9)}, (CheckResult(check, success=False, unexpected=1),))
    record_run(settings, "a run", [wrong])
    with pytest.raises(QualityBlocked, match="VACUUM"):
        compact(settings, PARAMS.model_copy(update={"vacuum": True}))
    compact(settings, PARAMS.model_copy(update={"vacuum": True, "dry_run": True}))


def test_what_is_needed_is_measured_and_gone_once_it_is_done(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    found = need(settings, PARAMS)
    assert found.needed
    [each] = found.collections
    assert each.small_files > 0
    assert each.deletes_foldable > 0
    assert found.small_segments == 4
    compact(settings, PARAMS)
    assert not need(settings, PARAMS).needed
    assert not need(settings, PARAMS.model_copy(update={"keep_history_hours": 876_000})).needed


def test_a_wall_clock_that_leaps_folds_nothing_that_is_to_be_read(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = filled.copy(tmp_path)
    hour = PARAMS.model_copy(update={"keep_history_hours": 1.0})
    year = time.time() + 365 * 86_400
    monkeypatch.setattr(time, "time", lambda: year)
    monkeypatch.setattr(time, "time_ns", lambda: int(year * 1e9))
    assert [each.deletes_foldable for each in need(settings, hour).collections] == [0]
    assert [each.folded_to for each in compact(settings, hour).collections] == [0]
    assert need(settings, PARAMS).collections[0].deletes_foldable > 0, "without history to keep they are"


def test_deletes_are_folded_in_by_themselves_only_where_there_are_enough(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    auto = PARAMS.model_copy(update={"fold": "auto", "fold_ratio": 0.9})
    assert not compact(settings, auto).collections[0].folded_to
    few = auto.model_copy(update={"fold_ratio": 0.01})
    assert compact(settings, few).collections[0].folded_to


def test_history_that_is_to_be_kept_is_not_folded_in(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    report = compact(settings, PARAMS.model_copy(update={"keep_history_hours": 876_000}))
    assert report.collections[0].base_tick == 0
    assert DeltaTable(str(Path(deletes_uri(settings, 1)))).file_uris()


def test_a_collection_that_is_not_there_is_an_error(filled: Filled, tmp_path: Path) -> None:
    with pytest.raises(CollectionNotFound, match="no such"):
        compact(filled.copy(tmp_path), PARAMS.model_copy(update={"collections": ("no such",)}))


def file(name: str, count: int, day: str = "2025-01-01") -> LiveFile:
    return LiveFile(name, count, count, {"_date": day}, {TICK: 1})


def grouped(files: list[LiveFile], *, min_files: int = 2) -> list[list[str]]:
    groups = merge_groups(files, bytes_per_row=1 << 20, target=100 << 20, min_files=min_files)
    return [list(group.paths) for group in groups]


def test_small_files_of_a_day_are_merged_and_large_ones_left_alone() -> None:
    assert grouped([file("a", 1), file("b", 2), file("c", 60)]) == [["a", "b"]]
    assert grouped([file("a", 1), file("b", 1, "2025-01-02")]) == []
    assert grouped([file(name, 1) for name in "abc"], min_files=4) == []


def test_a_file_is_rewritten_only_together_with_as_much_again() -> None:
    assert grouped([file("a", 1), file("b", 1), file("c", 40)]) == [["a", "b"]]
    assert grouped([file("a", 10), file("b", 10), file("c", 40)]) == [["a", "b", "c"]]


def test_a_group_stays_below_the_target() -> None:
    names = [f"{number:02}" for number in range(25)]
    groups = grouped([file(name, 10) for name in names])
    assert [len(group) for group in groups] == [10, 10, 5]
    assert sorted(name for group in groups for name in group) == names


def test_many_runs_rewrite_a_row_a_few_times_only() -> None:
    files: list[LiveFile] = []
    written = 0
    for number in range(400):
        files.append(LiveFile(f"{number}", 1, 10_000, {"_date": "d"}, {TICK: number}))
        for group in merge_groups(files, bytes_per_row=1_000, target=256 << 20, min_files=8):
            count = sum(each.rows for each in group.files)
            written += count
            files = [each for each in files if each.path not in group.paths]
            files.append(LiveFile(f"m{number}", 1, count, {"_date": "d"}, {TICK: number}))
    assert written <= 400 * 10_000 * 6
    assert len(files) < 40


def test_the_parameters_name_what_is_wrong() -> None:
    with pytest.raises(InvalidArgument, match="vacuum_hours"):
        CompactionParams.parse({"vacuum_hours": 23})
    with pytest.raises(InvalidArgument, match="zorder_by"):
        CompactionParams.parse({"zorder_by": ["a"]})


def test_a_merged_file_can_be_read_by_any_reader_of_delta(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    compact(settings, PARAMS)
    table: pa.Table = DeltaTable(str(Path(rows_uri(settings, 1)))).to_pyarrow_dataset().to_table()
    assert {"id", "body", "_time_tick", "_date"} <= set(table.column_names)
    assert not table["id"].null_count
