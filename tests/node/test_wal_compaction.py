"""Compaction of the WAL changes files, never rows: none lost, none doubled, none out of order, at any crash point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from millrace.node.committer import Committer
from millrace.node.wal_compaction import LiveFile, compact_once, live_files, plan
from millrace.tables.wal_reader import WalSnapshot
from millrace.tables.wal_table import WalTable
from millrace.wal.digest import Digest, digest
from tests.node.wal_samples import inserts


@pytest.fixture
def table(tmp_path: Path) -> WalTable:
    return WalTable.create(tmp_path / "wal")


def commit(table: WalTable, entries: range, *, pchannels: tuple[str, ...] = ("p0",)) -> None:
    committer = Committer(WalTable.open(table.path), compact_commits=1 << 30)
    for entry in entries:
        committer.commit([inserts(table.path, committer.table.position(name), entry) for name in pchannels])
    table.refresh()


def contents(table: WalTable) -> tuple[Digest, list[int]]:
    """Digest and entries of p0's messages, through the reader that the flusher uses."""
    snapshot = WalSnapshot.open(table.path)
    assert snapshot is not None
    rows = pa.concat_tables(list(snapshot.messages("p0")))
    return digest(rows), rows["entry"].to_pylist()


def small(entry: int, *, size: int = 1000, pchannel: str = "p0", kind: str = "message") -> LiveFile:
    return LiveFile(f"{entry}.parquet", size, 1, kind, pchannel, "2026-01-01", (0, entry), (0, entry))


def test_merging_keeps_every_row_and_their_order(table: WalTable) -> None:
    commit(table, range(1, 20))
    before = contents(table)
    assert compact_once(table.delta, table.path) == 16
    assert contents(table) == before
    assert len(live_files(table.delta)) == 4
    assert compact_once(table.delta, table.path) == 0


def test_what_a_reader_has_planned_with_stays_on_disk(table: WalTable) -> None:
    commit(table, range(1, 17))
    pinned = WalSnapshot.open(table.path)
    assert pinned is not None
    compact_once(table.delta, table.path)
    assert sum(rows.num_rows for rows in pinned.messages("p0")) == 16


def test_the_committer_keeps_the_number_of_live_files_small(table: WalTable) -> None:
    committer = Committer(WalTable.open(table.path), compact_commits=4)
    for entry in range(1, 120):
        committer.commit([inserts(table.path, committer.table.position("p0"), entry)])
    table.refresh()
    assert len(live_files(table.delta)) <= 2 * 16 + 4
    assert contents(table)[1] == list(range(1, 120))


def test_a_committer_of_an_older_version_goes_on_over_a_compaction(table: WalTable) -> None:
    commit(table, range(1, 17))
    behind = Committer(WalTable.open(table.path), compact_commits=1 << 30)
    compact_once(table.delta, table.path)
    result = behind.commit([inserts(table.path, behind.table.position("p0"), 17)])
    assert len(result.committed) == 1
    assert contents(table)[1] == list(range(1, 18))


def test_a_compaction_that_a_commit_overtakes_gives_way(table: WalTable) -> None:
    commit(table, range(1, 17))
    stale = WalTable.open(table.path)
    commit(table, range(17, 18))
    parquet = set(table.path.rglob("kind=message/**/*.parquet"))
    assert compact_once(stale.delta, stale.path) == 0
    assert set(table.path.rglob("kind=message/**/*.parquet")) == parquet
    assert contents(table)[1] == list(range(1, 18))


class Killed(BaseException):
    pass


def dies_at(place: str) -> Callable[[str], None]:
    def seam(name: str) -> None:
        if name == place:
            raise Killed

    return seam


def test_a_committer_that_dies_behind_its_compaction_leaves_every_row_once_and_the_next_goes_on(
    table: WalTable,
) -> None:
    commit(table, range(1, 17))
    dying = Committer(WalTable.open(table.path), compact_commits=1, seam=dies_at("compaction.done"))
    with pytest.raises(Killed):
        dying.commit([inserts(table.path, dying.table.position("p0"), 17)])
    reopened = WalTable.open(table.path)
    assert len(live_files(reopened.delta)) < 17, "the compaction stands"
    assert contents(reopened)[1] == list(range(1, 18))
    commit(reopened, range(18, 40))
    assert contents(reopened)[1] == list(range(1, 40))


def test_a_death_between_merging_and_committing_leaves_the_table_as_it_was(
    table: WalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(table, range(1, 17))
    before = contents(table)

    monkeypatch.setattr("millrace.node.wal_compaction.hit", dies_at("compaction.merged"))
    with pytest.raises(Killed):
        compact_once(table.delta, table.path)
    monkeypatch.undo()
    assert contents(WalTable.open(table.path)) == before
    assert compact_once(WalTable.open(table.path).delta, table.path) == 16
    assert contents(table) == before


def test_only_neighbours_of_one_tier_and_partition_are_merged() -> None:
    mixed = [small(entry, size=1000 if entry != 8 else 40 << 20) for entry in range(16)]
    assert plan(mixed) == []
    behind = [small(entry) for entry in range(16, 25)]
    assert [file.low[1] for file in plan([*mixed, *behind])] == list(range(9, 25))
    two = [small(entry, pchannel="p0") for entry in range(8)] + [small(entry, pchannel="p1") for entry in range(8)]
    assert plan(two) == []


def test_the_lowest_tier_goes_first() -> None:
    large = [small(entry, size=4 << 20, pchannel="p0") for entry in range(16)]
    tiny = [small(entry, pchannel="p1") for entry in range(16)]
    assert plan([*large, *tiny]) == tiny
    assert plan(large) == large
    assert plan([small(entry, size=64 << 20) for entry in range(32)]) == []


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
    compact_once(table.delta, table.path)
    table.refresh()
    assert contents(table)[1] == list(range(1, 18 if behind else 17))
    assert behind or contents(table) == before
    assert len(live_files(table.delta)) == (1 if lands else 16) + behind
    # What another writer's commit proves to be in no commit is gone; what may be in one stays.
    there = {path for path in table.path.rglob("*.parquet") if "kind=message" in str(path)}
    assert len(there) == 16 + behind + (lands or not behind)
