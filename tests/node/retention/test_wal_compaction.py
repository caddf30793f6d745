"""Compaction of the WAL changes files, never rows: none lost, none doubled, none out of order, at any crash point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from millrace.node.ingest.committer import WalCommitter
from millrace.node.retention.wal_compaction import compact_once, live_files, plan_merge
from millrace.storage.table import LiveFile
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.wal.digest import WalDigest, digest_rows
from tests.failpoints import at_failpoints
from tests.node.wal_samples import inserts


@pytest.fixture
def table(tmp_path: Path) -> WalTable:
    return WalTable.create(tmp_path / "wal")


def commit(table: WalTable, entries: range, *, pchannels: tuple[str, ...] = ("p0",)) -> None:
    committer = WalCommitter(WalTable.open(table.uri), compact_commits=1 << 30)
    for entry in entries:
        committer.commit([inserts(Path(table.uri), committer.table.position(name), entry) for name in pchannels])
    table.refresh()


def contents(table: WalTable) -> tuple[WalDigest, list[int]]:
    """Digest and entries of p0's messages, through the reader that the flusher uses."""
    snapshot = WalSnapshot.open(Path(table.uri))
    assert snapshot is not None
    rows = pa.concat_tables(list(snapshot.messages("p0")))
    return digest_rows(rows), rows["entry"].to_pylist()


def small(entry: int, *, size: int = 1000, pchannel: str = "p0", kind: str = "message") -> LiveFile:
    partition = {"kind": kind, "pchannel": pchannel, "date": "2026-01-01"}
    bounds = {"ledger": 0, "entry": entry}
    return LiveFile(f"{entry}.parquet", size, 1, partition, bounds, bounds)


def test_merging_keeps_every_row_and_their_order(table: WalTable) -> None:
    commit(table, range(1, 20))
    before = contents(table)
    assert compact_once(table.table) == 16
    assert contents(table) == before
    assert len(live_files(table.table)) == 4
    assert compact_once(table.table) == 0


def test_what_a_reader_has_planned_with_stays_on_disk(table: WalTable) -> None:
    commit(table, range(1, 17))
    pinned = WalSnapshot.open(Path(table.uri))
    assert pinned is not None
    compact_once(table.table)
    assert sum(rows.num_rows for rows in pinned.messages("p0")) == 16


@pytest.mark.slow
def test_the_committer_keeps_the_number_of_live_files_small(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri), compact_commits=4)
    for entry in range(1, 120):
        committer.commit([inserts(Path(table.uri), committer.table.position("p0"), entry)])
    table.refresh()
    assert len(live_files(table.table)) <= 2 * 16 + 4
    assert contents(table)[1] == list(range(1, 120))


def test_a_committer_of_an_older_version_goes_on_over_a_compaction(table: WalTable) -> None:
    commit(table, range(1, 17))
    behind = WalCommitter(WalTable.open(table.uri), compact_commits=1 << 30)
    compact_once(table.table)
    result = behind.commit([inserts(Path(table.uri), behind.table.position("p0"), 17)])
    assert len(result.committed) == 1
    assert contents(table)[1] == list(range(1, 18))


def test_a_compaction_that_a_commit_overtakes_goes_in_behind_it(table: WalTable) -> None:
    commit(table, range(1, 17))
    stale = WalTable.open(table.uri)
    commit(table, range(17, 18))
    assert compact_once(stale.table) == 16
    assert len(live_files(WalTable.open(table.uri).table)) == 2
    assert contents(table)[1] == list(range(1, 18))


def test_of_two_compactions_the_second_gives_way_and_leaves_no_file(table: WalTable) -> None:
    commit(table, range(1, 17))
    stale = WalTable.open(table.uri)
    assert compact_once(table.table) == 16
    parquet = set(Path(table.uri).rglob("kind=message/**/*.parquet"))
    assert compact_once(stale.table) == 0
    assert set(Path(table.uri).rglob("kind=message/**/*.parquet")) == parquet
    assert contents(table)[1] == list(range(1, 17))


class Killed(BaseException):
    pass


def dies_at(place: str) -> Callable[[str], None]:
    def act(name: str) -> None:
        if name == place:
            raise Killed

    return act


@pytest.mark.slow
def test_a_committer_that_dies_behind_its_compaction_leaves_every_row_once_and_the_next_goes_on(
    table: WalTable,
) -> None:
    commit(table, range(1, 17))
    dying = WalCommitter(WalTable.open(table.uri), compact_commits=1)
    with pytest.raises(Killed), at_failpoints(dies_at("compaction.done")):
        dying.commit([inserts(Path(table.uri), dying.table.position("p0"), 17)])
    reopened = WalTable.open(table.uri)
    assert len(live_files(reopened.table)) < 17, "the compaction stands"
    assert contents(reopened)[1] == list(range(1, 18))
    commit(reopened, range(18, 40))
    assert contents(reopened)[1] == list(range(1, 40))


def test_a_death_between_merging_and_committing_leaves_the_table_as_it_was(
    table: WalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(table, range(1, 17))
    before = contents(table)

    monkeypatch.setattr("millrace.node.retention.wal_compaction.hit", dies_at("compaction.merged"))
    with pytest.raises(Killed):
        compact_once(table.table)
    monkeypatch.undo()
    assert contents(WalTable.open(table.uri)) == before
    assert compact_once(WalTable.open(table.uri).table) == 16
    assert contents(table) == before


def test_only_neighbours_of_one_tier_and_partition_are_merged() -> None:
    mixed = [small(entry, size=1000 if entry != 8 else 40 << 20) for entry in range(16)]
    assert plan_merge(mixed) == []
    behind = [small(entry) for entry in range(16, 25)]
    assert [file.low["entry"] for file in plan_merge([*mixed, *behind])] == list(range(9, 25))
    two = [small(entry, pchannel="p0") for entry in range(8)] + [small(entry, pchannel="p1") for entry in range(8)]
    assert plan_merge(two) == []


def test_the_lowest_tier_goes_first() -> None:
    large = [small(entry, size=4 << 20, pchannel="p0") for entry in range(16)]
    tiny = [small(entry, pchannel="p1") for entry in range(16)]
    assert plan_merge([*large, *tiny]) == tiny
    assert plan_merge(large) == large
    assert plan_merge([small(entry, size=64 << 20) for entry in range(32)]) == []


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_a_commit_of_which_nobody_knows_whether_it_stands_loses_no_row(
    table: WalTable, monkeypatch: pytest.MonkeyPatch, lands: bool, behind: bool
) -> None:
    commit(table, range(1, 17))
    before = contents(table)
    real = DeltaTable.create_write_transaction

    def unlucky(delta: DeltaTable, *args: Any, **options: Any) -> None:
        monkeypatch.undo()
        if lands:
            real(delta, *args, **options)
        if behind:  # another writer comes in between
            commit(table, range(17, 18))
        raise CommitFailedError("the answer got lost")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", unlucky)
    compact_once(table.table)
    table.refresh()
    assert contents(table)[1] == list(range(1, 18 if behind else 17))
    assert behind or contents(table) == before
    assert len(live_files(table.table)) == 1 + behind
    there = {path for path in Path(table.uri).rglob("*.parquet") if "kind=message" in str(path)}
    assert len(there) == 16 + behind + 1


def test_a_commit_that_the_storage_refuses_to_the_end_may_stand_and_its_file_stays(
    table: WalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(table, range(1, 17))

    def refused(delta: DeltaTable, *args: Any, **options: Any) -> None:
        raise CommitFailedError("the storage is out of reach")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", refused)
    assert compact_once(table.table) == 0
    assert len(live_files(table.table)) == 16
    assert len([path for path in Path(table.uri).rglob("*.parquet") if "kind=message" in str(path)]) == 17
