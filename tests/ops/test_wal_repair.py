"""What a repair of the WAL puts in place has the rows that were committed, all of them, or nothing is put in place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.errors import RepairImpossible
from millrace.node.wal_compaction import live_files
from millrace.ops.recovery.wal_repair import _rebuild
from millrace.tables.wal_table import WalTable
from tests.ops.log_maker import Things


@pytest.mark.parametrize("more", [-1, 1])
def test_a_log_that_gives_another_number_of_rows_than_were_committed_repairs_nothing(things: Things, more: int) -> None:
    things.fill(2)
    table = WalTable.open(things.settings.wal_path)
    file = next(each for each in live_files(table.delta) if each.kind == "message" and each.pchannel == "p0")
    before = set(table.path.rglob("*.parquet"))
    with pytest.raises(RepairImpossible, match="rows for"):
        _rebuild(things.settings, table, things.log, replace(file, rows=file.rows + more))
    assert set(table.path.rglob("*.parquet")) == before
    assert _rebuild(things.settings, table, things.log, file) == file.rows
