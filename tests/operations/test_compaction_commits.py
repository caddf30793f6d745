"""Of two compactions of one table the second stops, and a table's base tick never goes back, whoever comes in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from millrace.operations.compaction import commits
from millrace.operations.compaction.commits import Replacer, raise_base, replace_groups
from millrace.operations.compaction.files import Group, live_files
from millrace.operations.compaction.report import TableWork
from millrace.operations.compaction.rewrite import Job, Rewritten, rewrite_here
from millrace.storage.commit import Part, commit_fenced
from millrace.storage.files import FileSink
from millrace.storage.table import Table, create_table, table_at
from millrace.tables.collections.table import base_tick

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
        commit_fenced(table, [Part(sink.finish())])
    return path


def groups(table: Table, path: Path) -> list[Group]:
    files = live_files(table)
    return [Group((files[place], files[place + 1])) for place in (0, 2, 4)]


def ids(path: Path) -> list[int]:
    return sorted(DeltaTable(str(path)).to_pyarrow_dataset().to_table()["id"].to_pylist())


def test_a_compaction_that_another_one_overtook_stops_there_and_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "COMMIT_GROUPS", 1)
    job = Job(path, COLUMNS, sort=JOB_ORDER, stats=())
    ours = table_at(path)
    first, second, third = groups(ours, path)
    worked: list[Group] = []

    def mapper(job: Job, chosen: Sequence[Group]) -> Iterable[Rewritten]:
        worked.extend(chosen)
        if chosen[0] == second:  # meanwhile another compaction takes the third group
            assert Replacer.of(table_at(path)).replace(list(rewrite_here(job, [third])))
        return rewrite_here(job, chosen)

    replacer = Replacer.of(ours)
    work = replace_groups(replacer, job, [first, second, third], mapper, TableWork())
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
    assert raise_base(table, 10) == 10
    version = table.version
    assert raise_base(table, 9) == raise_base(table, 10) == 10
    assert (base_tick(table_at(path)), table.version) == (10, version)


@pytest.mark.parametrize(("other", "left"), [(20, 20), (8, 10), (10, 10)])
def test_a_base_tick_does_not_go_back_behind_another_that_comes_in_between(path: Path, other: int, left: int) -> None:
    raise_base(table_at(path), 5)
    between = [other]

    def seam(name: str) -> None:
        if name == "commit.checked" and between:
            raise_base(table_at(path), between.pop())

    assert raise_base(table_at(path), 10, seam=seam) == left
    assert base_tick(table_at(path)) == left
