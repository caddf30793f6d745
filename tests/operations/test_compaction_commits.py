"""The second of two compactions of one table stops, and a table's base tick never decreases, whoever interferes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millrace.operations.compaction.report import TableCompaction
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.file_sink import FileSink
from millrace.storage.table import TableHandle, create_table, table_at
from millrace.tables.collections.data_tables import earliest_readable_tick
from millrace.tables.rewrite import commits
from millrace.tables.rewrite.commits import RewriteCommitter, raise_base_tick, rewrite_and_commit
from millrace.tables.rewrite.files import FileGroup, live_files
from millrace.tables.rewrite.rewrite import RewriteJob, RewriteResult, rewrite_in_process
from tests.failpoints import at_failpoints

COLUMNS = pa.schema([pa.field("id", pa.int64())])
JOB_ORDER = ("id",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table of six files in three partitions."""
    path = tmp_path / "table"
    table = create_table(path, pa.schema([*COLUMNS, pa.field("part", pa.utf8())]), partition_by=["part"])
    for number in range(6):
        sink = FileSink.at(path, COLUMNS, ())
        sink.write(pa.table({"id": [number]}, schema=COLUMNS), {"part": str(number % 3)})
        commit_fenced(table, [CommitPart(sink.finish())])
    return path


def groups(table: TableHandle, path: Path) -> list[FileGroup]:
    files = live_files(table)
    return [FileGroup((files[place], files[place + 1])) for place in (0, 2, 4)]


def ids(path: Path) -> list[int]:
    return sorted(DeltaTable(str(path)).to_pyarrow_dataset().to_table()["id"].to_pylist())


def test_a_compaction_that_another_one_overtook_stops_there_and_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "COMMIT_GROUPS", 1)
    job = RewriteJob(path, COLUMNS, sort=JOB_ORDER, stats=())
    ours = table_at(path)
    first, second, third = groups(ours, path)
    worked: list[FileGroup] = []

    def mapper(job: RewriteJob, chosen: Sequence[FileGroup]) -> Iterable[RewriteResult]:
        worked.extend(chosen)
        if chosen[0] == second:  # meanwhile another compaction takes the third group
            assert RewriteCommitter.of(table_at(path)).commit(list(rewrite_in_process(job, [third])))
        return rewrite_in_process(job, chosen)

    replacer = RewriteCommitter.of(ours)
    done = rewrite_and_commit(replacer, job, [first, second, third], mapper)
    work = TableCompaction().with_rewrites(done, replacer.given_up)
    assert replacer.superseded
    assert worked == [first, second], "nothing is rewritten that cannot go through any more"
    assert (work.files_removed, work.files_added, len(work.given_up)) == (2, 1, 2)
    assert not replacer.mark_folded(7)
    assert ids(path) == list(range(6))
    named = {name for version in range(DeltaTable(str(path)).version() + 1) for name in _files(path, version)}
    assert named == {file.name for file in path.glob("part=*/*.parquet")}


def _files(path: Path, version: int) -> list[str]:
    return [Path(uri).name for uri in DeltaTable(str(path), version=version).file_uris()]


def test_a_base_tick_never_goes_back(path: Path) -> None:
    table = table_at(path)
    assert raise_base_tick(table, 10) == 10
    version = table.version
    assert raise_base_tick(table, 9) == raise_base_tick(table, 10) == 10
    assert (earliest_readable_tick(table_at(path)), table.version) == (10, version)


@pytest.mark.parametrize(("other", "left"), [(20, 20), (8, 10), (10, 10)])
def test_a_base_tick_does_not_go_back_behind_another_that_comes_in_between(path: Path, other: int, left: int) -> None:
    raise_base_tick(table_at(path), 5)
    between = [other]

    def act(name: str) -> None:
        if name == "commit.checked" and between:
            raise_base_tick(table_at(path), between.pop())

    with at_failpoints(act):
        assert raise_base_tick(table_at(path), 10) == left
    assert earliest_readable_tick(table_at(path)) == left
