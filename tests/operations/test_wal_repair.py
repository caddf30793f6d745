"""What a repair of the WAL puts in place has the rows that were committed, all of them, or nothing is put in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from millrace.base.errors import RepairImpossible, TableUnavailable
from millrace.node.retention.wal_compaction import live_files
from millrace.operations.recovery.wal_repair import _rebuild, rebuild_state
from millrace.tables.wal.table import WalTable
from tests.operations.log_maker import Things


@pytest.mark.parametrize("more", [-1, 1])
def test_a_log_that_gives_another_number_of_rows_than_were_committed_repairs_nothing(things: Things, more: int) -> None:
    things.fill(2)
    table = WalTable.open(things.settings.wal_uri)
    file = next(
        each
        for each in live_files(table.table)
        if each.partition["kind"] == "message" and each.partition["pchannel"] == "p0"
    )
    before = set(Path(table.uri).rglob("*.parquet"))
    with pytest.raises(RepairImpossible, match="rows for"):
        _rebuild(things.settings, table, things.log, replace(file, rows=file.rows + more))
    assert set(Path(table.uri).rglob("*.parquet")) == before
    assert _rebuild(things.settings, table, things.log, file) == file.rows


class Unlucky:
    """Commits that fail, of which nobody knows whether they stand."""

    def __init__(self, patch: pytest.MonkeyPatch, *, times: int, stands: bool = False) -> None:
        real = DeltaTable.create_write_transaction
        self.left = times

        def commit(table: DeltaTable, *args: Any, **options: Any) -> None:
            if self.left <= 0 or stands:
                real(table, *args, **options)
            if self.left > 0:
                self.left -= 1
                raise CommitFailedError("the answer got lost")

        patch.setattr(DeltaTable, "create_write_transaction", commit)
        patch.setattr("millrace.storage.commit._PAUSE", (0.001, 0.001))


def rows_of(table: WalTable) -> int:
    table.refresh()
    return sum(file.rows for file in live_files(table.table))


@pytest.mark.parametrize("stands", [False, True])
def test_a_repair_goes_on_behind_a_commit_that_fails_and_is_done_once(
    things: Things, monkeypatch: pytest.MonkeyPatch, stands: bool
) -> None:
    things.fill(2)
    table = WalTable.open(things.settings.wal_uri)
    file = next(
        each
        for each in live_files(table.table)
        if each.partition["kind"] == "message" and each.partition["pchannel"] == "p0"
    )
    before, state = rows_of(table), table.position("p0").state
    Unlucky(monkeypatch, times=1 if stands else 3, stands=stands)
    assert _rebuild(things.settings, table, things.log, file) == file.rows
    assert rows_of(table) == before
    Unlucky(monkeypatch, times=1 if stands else 3, stands=stands)
    rebuild_state(things.settings, things.log, "p0")
    table.refresh()
    assert table.position("p0").state == state


def test_a_repair_whose_commit_the_storage_never_takes_says_so_and_loses_no_file(
    things: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    things.fill(2)
    table = WalTable.open(things.settings.wal_uri)
    file = next(
        each
        for each in live_files(table.table)
        if each.partition["kind"] == "message" and each.partition["pchannel"] == "p0"
    )
    before = set(Path(table.uri).rglob("*.parquet"))
    Unlucky(monkeypatch, times=100)
    for repair in (
        lambda: _rebuild(things.settings, table, things.log, file),
        lambda: rebuild_state(things.settings, things.log, "p0"),
    ):
        with pytest.raises(TableUnavailable, match="may have been committed"):
            repair()
    assert len(set(Path(table.uri).rglob("*.parquet")) - before) == 2, "either may stand in a commit: they stay"
