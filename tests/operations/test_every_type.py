"""Each operation once, over a table of every type whose key has several fields: no value is another behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from millrace.client.schemas import schema as schema_of
from millrace.observe.row_sample import sample_rows
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backfill.load import run as load_files
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.restore import restore_backup as restore_backup
from millrace.operations.backup.run import backup
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.restore.declaration import RestoreParams
from millrace.operations.restore.run import restore
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.tables.read.arrow import read_arrow
from millrace.tables.wal.reader import MAX_TICK
from millrace.testing import Deployment, deployment
from tests.tables.test_every_type import EVERY

KEY = {"symbol": "string", "on": "date", "lot": "decimal(38,6)", "order": "uuid", "stop": "timestamp_ntz"}
SCHEMA = schema_of(KEY | {name: f"{kind}?" for name, (kind, _) in EVERY.items()}, key=list(KEY))


ENDS = {
    "on": date.min,
    "stop": datetime.fromisoformat("0001-01-01"),
    "day": date.max,
    "at": datetime.max.replace(tzinfo=UTC),
    "wall": datetime.fromisoformat("0001-01-01"),
}
"""The first and last days and moments that a collection takes."""


def rows(*numbers: int, **other: Any) -> pa.Table:
    """A row of values for each even number, every second one with ENDS; one of nulls for each odd one."""
    full = {name: value for name, (_, value) in EVERY.items()} | other
    key = {"symbol": "MÜHLE\0", "on": date(1969, 12, 31), "stop": EVERY["wall"][1], "order": EVERY["key"][1]}
    made = [key | {"lot": Decimal(number - 3)} | (full if number % 2 == 0 else {}) for number in numbers]
    table = pa.Table.from_pylist(made, schema=SCHEMA.arrow())
    at_an_end = pa.array([number % 4 == 2 for number in numbers])
    for name, end in ENDS.items():
        field = SCHEMA.arrow().field(name)
        values = pc.if_else(at_an_end, pa.scalar(end, field.type), table[name])
        table = table.set_column(table.column_names.index(name), field, values)
    return table


def by_lot(table: pa.Table) -> pa.Table:
    return table.sort_by("lot").combine_chunks()


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("types") / "data", pchannels=2) as made:
        yield made


@pytest.mark.slow
def test_operations_keep_every_type_as_it_was_written(db: Deployment, tmp_path: Path) -> None:
    """A load of files, compaction, a restore elsewhere and in place, a proved base and a trimmed WAL, a
    backup, a sample, verification.
    """
    made = db.create_collection("every", SCHEMA, vchannels=2)
    made.insert(rows(*range(6)))
    parquet.write_table(rows(*range(6, 12)), tmp_path / "more.parquet")
    here = replace(db.settings, wal_retention=1e-6)
    files = LoadParams(collection="every", files=[str(tmp_path / "more.parquet")])
    assert load_files(here, files, Progress()).rows == 6
    db.settle()
    then = db.current_tick(made.definition.pchannels)
    assert by_lot(made.read(at=then)).equals(rows(*range(12)))

    made.delete(rows(4, 5, 6).select(list(KEY)))
    made.upsert(rows(0, 8, text="newer", price=Decimal("0.01")))
    db.settle()
    wanted = by_lot(made.read())
    assert wanted.equals(
        pa.concat_tables(
            [
                rows(0, text="newer", price=Decimal("0.01")),
                rows(1, 2, 3, 7),
                rows(8, text="newer", price=Decimal("0.01")),
                rows(9, 10, 11),
            ]
        ).combine_chunks()
    )
    assert restore(here, RestoreParams(collection="every", into="again", at=str(then)), Progress()).rows == 12
    assert by_lot(db.collection("again").read()).equals(rows(*range(12)))
    compact(here, CompactionParams(fold="always", min_files=2), history=MAX_TICK)
    assert by_lot(made.read()).equals(wanted)
    assert all(each.ok for each in verify_collections(here).values())
    taken = backup(here, db.log, BackupParams(to=str(tmp_path / "backups")), Progress())
    proved = checkpoint(here, db.log, CheckpointParams(), Progress())
    assert proved.ok, proved
    assert proved.trimmed, "each PChannel has a base"
    assert by_lot(made.read()).equals(wanted)
    assert len(sample_rows(here, made.id, "every", at=None, limit=20).rows) == 9

    restore(
        db.settings,
        RestoreParams(collection="again", in_place=True, at=str(db.current_tick(made.definition.pchannels))),
        Progress(),
    )
    db.settle()
    assert by_lot(db.collection("again").read()).equals(rows(*range(12)))
    elsewhere = replace(db.settings, data_dir=tmp_path / "elsewhere")
    restore_backup(elsewhere, Path(taken.folder))
    assert by_lot(read_arrow(elsewhere, made.id)).equals(wanted)
