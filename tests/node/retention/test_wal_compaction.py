"""Compaction of the WAL changes files, never rows: none lost, none doubled, none out of order, at any crash point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.node.ingest.committer import WalCommitter
from millrace.node.retention.wal_compaction import MERGED_BYTES, MOST_SMALL, compact_once, live_files, plan_merges
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
    committer = WalCommitter(WalTable.open(table.uri), fan_in=0)
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
    assert compact_once(table.table) == {"p0": 16}
    assert contents(table) == before
    assert len(live_files(table.table)) == 4
    assert compact_once(table.table) == {}


def test_what_a_reader_has_planned_with_stays_on_disk(table: WalTable) -> None:
    commit(table, range(1, 17))
    pinned = WalSnapshot.open(Path(table.uri))
    assert pinned is not None
    compact_once(table.table)
    assert sum(rows.num_rows for rows in pinned.messages("p0")) == 16


@pytest.mark.slow
def test_the_committer_keeps_the_number_of_live_files_small(table: WalTable) -> None:
    committer = WalCommitter(WalTable.open(table.uri))
    for entry in range(1, 120):
        committer.commit([inserts(Path(table.uri), committer.table.position("p0"), entry)])
    table.refresh()
    assert len(live_files(table.table)) <= 2 * 16 + 4
    assert contents(table)[1] == list(range(1, 120))


def test_a_committer_of_an_older_version_goes_on_over_a_compaction(table: WalTable) -> None:
    commit(table, range(1, 17))
    behind = WalCommitter(WalTable.open(table.uri), fan_in=0)
    compact_once(table.table)
    result = behind.commit([inserts(Path(table.uri), behind.table.position("p0"), 17)])
    assert len(result.committed) == 1
    assert contents(table)[1] == list(range(1, 18))


def test_a_compaction_that_a_commit_overtakes_goes_in_behind_it(table: WalTable) -> None:
    commit(table, range(1, 17))
    stale = WalTable.open(table.uri)
    commit(table, range(17, 18))
    assert compact_once(stale.table) == {"p0": 16}
    assert len(live_files(WalTable.open(table.uri).table)) == 2
    assert contents(table)[1] == list(range(1, 18))


def test_of_two_compactions_the_second_gives_way_and_leaves_no_file(table: WalTable) -> None:
    commit(table, range(1, 17))
    stale = WalTable.open(table.uri)
    assert compact_once(table.table) == {"p0": 16}
    parquet = set(Path(table.uri).rglob("kind=message/**/*.parquet"))
    assert compact_once(stale.table) == {}
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
    dying = WalCommitter(WalTable.open(table.uri))
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
    assert compact_once(WalTable.open(table.uri).table) == {"p0": 16}
    assert contents(table) == before


def entries_of(groups: list[list[LiveFile]]) -> list[list[int]]:
    return [[file.low["entry"] for file in group] for group in groups]


def test_only_neighbours_of_one_partition_are_merged_and_no_file_beside_many_that_are_smaller() -> None:
    mixed = [small(entry, size=1000 if entry != 8 else 40 << 20) for entry in range(16)]
    assert plan_merges(mixed) == []
    behind = [small(entry) for entry in range(16, 25)]
    assert entries_of(plan_merges([*mixed, *behind])) == [list(range(9, 25))]
    two = [small(entry, pchannel="p0") for entry in range(8)] + [small(entry, pchannel="p1") for entry in range(8)]
    assert plan_merges(two) == []
    largest = [small(0, size=15_000), *(small(entry) for entry in range(1, 16))]
    assert entries_of(plan_merges(largest)) == [list(range(16))]
    assert plan_merges([small(0, size=15_001), *largest[1:]]) == [], "a row's file doubles, or is left alone"


def test_each_partition_has_a_group_and_the_cheapest_goes_first() -> None:
    large = [small(entry, size=4 << 20, pchannel="p0") for entry in range(16)]
    tiny = [small(entry, pchannel="p1") for entry in range(16)]
    assert plan_merges([*large, *tiny]) == [tiny, large]
    assert plan_merges([small(entry, size=64 << 20) for entry in range(32)]) == []


def test_a_day_that_has_ended_is_merged_to_the_last_file_and_only_once() -> None:
    old = [small(entry) for entry in range(3)] + [small(3, size=31 << 20), small(4, size=2 << 20), small(5)]
    new = [replace(small(6), partition={**small(6).partition, "date": "2026-01-02"})]
    assert entries_of(plan_merges([*old, *new])) == [[0, 1, 2, 3, 4]], "and the rest is one file"
    assert plan_merges([small(0, size=33 << 20), small(5), *new]) == []
    assert plan_merges(old) == [], "it has not ended"


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(st.integers(4_000, 8_000), st.integers(4_000, 4 << 20), st.integers(1 << 20, 60 << 20)),
        min_size=1,
        max_size=20,
    ),
    rounds=st.integers(1, 40),
)
def test_whatever_commits_add_few_files_are_live_and_a_byte_is_rewritten_a_few_times(
    sizes: list[int], rounds: int
) -> None:
    live: list[LiveFile] = []
    written = rewritten = 0
    for entry, size in enumerate(sizes * rounds):
        live.append(small(entry, size=size))
        written += size
        while groups := plan_merges(live):
            [group] = groups
            first, last = live.index(group[0]), live.index(group[-1])
            merged = sum(file.size for file in group)
            rewritten += merged
            live[first : last + 1] = [replace(group[0], size=merged, high=group[-1].high)]
        assert sum(file.size < MERGED_BYTES for file in live) <= MOST_SMALL * (
            1 + sum(file.size >= MERGED_BYTES for file in live)
        )
    assert rewritten <= 4 * written


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
    assert compact_once(table.table) == {}
    assert len(live_files(table.table)) == 16
    assert len([path for path in Path(table.uri).rglob("*.parquet") if "kind=message" in str(path)]) == 17
