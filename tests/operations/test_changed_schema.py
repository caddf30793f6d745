"""Operations over a schema that changed.

Compaction, checkpoint, restore and verification find all rows in their fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from millrace.base.errors import TickTooOld
from millrace.observe.row_sample import sample_rows
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.restore.run import restore
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.wal.reader import MAX_TICK
from millrace.testing import Deployment, deployment
from tests.tables.test_schema_evolution import FIRST, by_id, older, row


@pytest.fixture(scope="module")
def db() -> Iterator[Deployment]:
    with deployment(pchannels=2) as made:
        yield made


@pytest.mark.slow
def test_operations_go_on_over_a_changed_schema(db: Deployment) -> None:
    """Compaction, a proved base, a trimmed WAL, a restore, a sample, and verification over all of it."""
    made = db.create_collection("kept_up", FIRST, key="id")
    first = made.insert([row(number) for number in range(8)]).last_tick
    before = older(made)
    db.settle()
    wide = {"cents": "int64", "weight": "float64", "day": "timestamp", "at": "struct<x: int16>"}
    made.alter(drop="note", rename={"id": "key", "price": "cents"}, widen=wide, add={"note": "int64?"})
    before.insert([row(10)])
    made.insert([{"key": 11, "cents": 1 << 40, "note": 7}])
    made.delete([3, 11])
    db.settle()
    wanted = by_id(made.read(), "key")
    assert [each["key"] for each in wanted] == [0, 1, 2, 4, 5, 6, 7, 10]

    def nulls(*names: str) -> int:
        """Of columns of the living rows, all of which a writer of the first schema wrote."""
        found = pa.table(DeltaTable(rows_uri(here, made.id)).to_pyarrow_table())
        living = found.filter(pc.is_in(found["id"], pa.array([each["key"] for each in wanted])))
        return sum(int(living[name].null_count) for name in names)

    here, progress = replace(db.settings, wal_retention=1e-6), Progress()
    restored = RestoreParams(collection="kept_up", into="again", at=str(first))
    assert restore(here, restored, progress).rows == 8
    assert by_id(db.collection("again").read()) == [row(number) for number in range(8)]
    shown = sample_rows(here, made.id, "kept_up", at=None, limit=20)
    assert shown.columns[3:] == [each.name for each in made.schema.fields]
    assert sorted(int(each[3]) for each in shown.rows) == [each["key"] for each in wanted]
    compact(here, CompactionParams(collections=("kept_up",), fold="never", min_files=2), history=MAX_TICK)
    assert nulls("price", "weight") == 0, "a read of the past knows these alone"
    compact(here, CompactionParams(fold="always", min_files=2), history=MAX_TICK)
    assert nulls("price", "weight") == 2 * len(wanted), "numbers went to the newest column"
    assert nulls("price__2", "weight__2") == 0
    assert nulls("day", "at") == 0, "dates and structs stay where they are"
    assert by_id(made.read(), "key") == wanted
    with pytest.raises(TickTooOld):
        made.read(at=first)
    assert all(each.ok for each in verify_collections(here).values())
    proved = checkpoint(here, db.log, CheckpointParams(), progress)
    assert proved.ok, proved
    assert proved.trimmed, "each PChannel has a base"
    assert all(each.ok for each in verify_collections(here).values())
    made.insert([{"key": 12, "cents": 12}])
    assert by_id(made.read(where="key < 12"), "key") == wanted


@pytest.mark.slow
def test_a_restore_in_place_brings_rows_in_the_fields_of_today(db: Deployment) -> None:
    made = db.create_collection("in_place", FIRST, key="id")
    first = made.insert([row(number) for number in range(8)]).last_tick
    db.settle()
    wide = {"cents": "int64", "weight": "float64", "day": "timestamp", "at": "struct<x: int16>"}
    made.alter(drop="note", rename={"id": "key", "price": "cents"}, widen=wide, add={"note": "int64?"})
    made.delete([3])
    last = made.insert([{"key": 11, "cents": 1 << 40, "note": 7}]).last_tick
    wanted = by_id(made.read(), "key")
    assert [each["key"] for each in wanted] == [0, 1, 2, 4, 5, 6, 7, 11]

    def back_to(tick: int) -> list[dict[str, Any]]:
        restore(db.settings, RestoreParams(collection="in_place", in_place=True, at=str(tick)), Progress())
        return by_id(made.read(), "key")

    then = [row(number) for number in range(8)]
    found = back_to(first)
    assert [(each["key"], each["cents"], each["note"]) for each in found] == [
        (each["id"], each["price"], None) for each in then
    ]
    assert [each["weight"] for each in found] == [each["weight"] for each in then]
    assert back_to(last) == wanted
    db.settle()
    assert by_id(made.read(), "key") == wanted
