"""Small files are joined row for row: few are live at any time, each byte is rewritten a few times, others go on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import TableHandle, create_table, table_at
from millrace.tables.collections.data_tables import DATE
from millrace.tables.rewrite import fold
from millrace.tables.rewrite.commits import RewriteCommitter, rewrite_and_commit
from millrace.tables.rewrite.files import FileGroup, live_files
from millrace.tables.rewrite.fold import FAN_IN, TIER_BYTES, fold_files, plan_folds
from millrace.tables.rewrite.rewrite import RewriteJob, RewriteResult, rewrite_in_process

COLUMNS = pa.schema([pa.field("id", pa.int64()), pa.field("body", pa.binary()), pa.field("_time_tick", pa.int64())])
TICK = ("_time_tick",)


class Table:
    """A table that gets one file per commit, folded after FAN_IN of them as the flusher does it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        schema = pa.schema([*COLUMNS, pa.field(DATE, pa.date32())])
        self.handle = create_table(path, schema, partition_by=[DATE])
        self.job = RewriteJob(str(path), COLUMNS, sort=("id",), stats=TICK)
        self.ids: list[int] = []
        self.appended = self.rewritten = 0
        self._random = random.Random(1)

    def append(self, rows: int, *, body: int = 100, day: str = "2026-01-01") -> None:
        first = len(self.ids)
        ids = list(range(first, first + rows))
        self.ids += ids
        sink = FileSink.at(self.path, COLUMNS, TICK)
        bodies = [self._random.randbytes(body) for _ in ids]
        sink.write(pa.table({"id": ids, "body": bodies, "_time_tick": ids}, schema=COLUMNS), {DATE: day})
        actions = sink.finish()
        self.appended += sum(action.size for action in actions)
        commit_fenced(self.handle, [CommitPart(actions)])

    def fold(self) -> int:
        """Fold what is due, and return the number of files that went."""
        done, given_up = fold_files(table_at(self.path), self.job)
        assert not given_up
        self.rewritten += sum(action.size for each in done for action in each.actions)
        return sum(len(each.group.files) for each in done)

    def files(self) -> dict[str, list[int]]:
        """Sizes of the live files by day."""
        found: dict[str, list[int]] = {}
        for file in live_files(table_at(self.path)):
            found.setdefault(file.partition[DATE], []).append(file.size)
        return found

    def holds(self) -> list[int]:
        return sorted(table_at(self.path).dataset().to_table()["id"].to_pylist())


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path / "table")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("rows", "commits"), [(3000, 40), (1, 80), (20, 80)])
def test_a_trickle_leaves_few_files_and_rewrites_each_byte_a_few_times(table: Table, rows: int, commits: int) -> None:
    most = 0
    for number in range(commits):
        table.append(rows)
        most = max(most, len(table_at(table.path).live_files()))
        if number % FAN_IN == FAN_IN - 1:
            table.fold()
    assert most <= 32, "so that rows and deletes together have at most 64"
    assert table.rewritten <= len(TIER_BYTES) * table.appended
    assert table.holds() == table.ids


def test_what_is_left_of_a_day_that_is_over_becomes_one_file(table: Table) -> None:
    for _ in range(FAN_IN - 2):
        table.append(10)
    assert table.fold() == 0
    table.append(10, day="2026-01-02")
    assert table.fold() == FAN_IN - 2
    assert {day: len(sizes) for day, sizes in table.files().items()} == {"2026-01-01": 1, "2026-01-02": 1}
    assert table.fold() == 0, "it is not rewritten again"
    assert table.holds() == table.ids


def test_large_files_are_left_to_compaction(table: Table) -> None:
    for _ in range(FAN_IN):
        table.append(25, body=100_000)
    assert min(size for sizes in table.files().values() for size in sizes) >= TIER_BYTES[-1]
    assert plan_folds(table_at(table.path)) == []


def test_files_whose_rows_are_large_in_memory_are_not_joined(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(FAN_IN):
        table.append(100)
    monkeypatch.setattr(fold, "FOLD_BYTES", 15_000)
    assert plan_folds(table_at(table.path)) == []
    monkeypatch.setattr(fold, "FOLD_BYTES", 60_000)
    assert [len(group.files) for group in plan_folds(table_at(table.path))] == [4, 4]


def test_a_fold_that_another_writer_overtakes_changes_nothing(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(FAN_IN):
        table.append(10)
    ours = table_at(table.path)

    def overtaken(job: RewriteJob, groups: Sequence[FileGroup]) -> Iterable[RewriteResult]:
        done = list(rewrite_in_process(job, groups))
        assert table.fold() == FAN_IN
        return done

    monkeypatch.setattr(fold, "rewrite_in_process", overtaken)
    monkeypatch.setattr(table, "fold", lambda: _fold_plainly(table))
    done, given_up = fold_files(ours, table.job)
    assert (done, len(given_up)) == ([], 1)
    assert table.holds() == table.ids
    on_disk = {str(path.relative_to(table.path)) for path in table.path.rglob("part-*.parquet")}
    assert len(on_disk) == FAN_IN + 1, "the fenced fold left no file"


def _fold_plainly(table: Table) -> int:
    handle = table_at(table.path)
    done = rewrite_and_commit(RewriteCommitter(handle, None), table.job, plan_folds(handle), rewrite_in_process)
    return sum(len(each.group.files) for each in done)


def test_a_compaction_goes_on_beside_folds_of_other_files(table: Table) -> None:
    for _ in range(2):
        table.append(10, day="2026-01-01")
    for _ in range(FAN_IN):
        table.append(10, day="2026-01-02")
    compacted = table_at(table.path)
    replacer = RewriteCommitter.of(compacted)
    older = [file for file in live_files(compacted) if file.partition[DATE] == "2026-01-01"]
    rewritten = list(rewrite_in_process(table.job, [FileGroup(tuple(older))]))
    newer = plan_folds(table_at(table.path))[:1]
    assert {file.partition[DATE] for group in newer for file in group.files} == {"2026-01-02"}
    _commit(table_at(table.path), table.job, newer)
    assert len(replacer.commit(rewritten)) == 1
    assert not replacer.superseded
    assert replacer.mark_folded(7)
    assert {day: len(sizes) for day, sizes in table.files().items()} == {"2026-01-01": 1, "2026-01-02": 1}
    assert table.holds() == table.ids


def _commit(handle: TableHandle, job: RewriteJob, groups: Sequence[FileGroup]) -> None:
    assert rewrite_and_commit(RewriteCommitter(handle, None), job, groups, rewrite_in_process)
