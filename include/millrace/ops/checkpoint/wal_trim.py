"""Trimming of the ``wal`` table: whole files that lie before a verified base go, and every version says so of itself.

The removal is one commit, made from the very version it was planned from; it also moves ``<pchannel>/trimmed``. The committer,
which meets it as any other writer's commit, looks again and goes on. The files themselves go with VACUUM; the staged files that
messages in them name go behind the commit (:mod:`millrace.ops.checkpoint.staged_trim`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from millrace.errors import DeadlineExceeded
from millrace.failpoint import hit
from millrace.message.ids import LogId
from millrace.ops.checkpoint.staged_trim import named_files, note_staged
from millrace.settings import Settings
from millrace.tables.bases import Base
from millrace.tables.delta_log import commit_lease
from millrace.tables.parquet_file import read_file
from millrace.tables.wal_reader import TRIMMED_APP_SUFFIX
from millrace.tables.wal_table import TABLE_SCHEMA, Totals, WalTable, sync_log
from millrace.tables.wal_trims import Trim, record_trim, trimmed_totals
from millrace.wal.digest import digest
from millrace.wal.schema import KIND_MESSAGE, KIND_STATE, PARTITION_COLUMNS, ROW_SCHEMA

ATTEMPTS: Final = 50
_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What was, or could be, given up of one PChannel."""

    pchannel: str
    time_tick: int
    files: int
    rows: int
    bytes: int


def trim_wal(settings: Settings, base: Base, *, dry_run: bool = False, seam: Callable[[str], None] = hit) -> Trimmed:
    """Remove the files of the base's PChannel that lie before it. May be killed at any instant and repeated."""
    table = WalTable.open(settings.wal_path)
    for _ in range(ATTEMPTS):
        table.refresh()
        files = files_before(table, base)
        found = Trimmed(
            base.pchannel,
            base.time_tick,
            len(files),
            sum(file.rows for file in files),
            sum(file.size for file in files),
        )
        if dry_run or not files:
            return found
        gone, imported = trimmed_totals(table).get(base.pchannel, Totals()), list[str]()
        for file in files:
            totals, named = _read(table, file)
            gone, imported = gone + totals, [*imported, *named]
        note_staged(settings.staged_path, base.pchannel, base.time_tick, imported)
        record_trim(table.path, Trim(base.pchannel, base.time_tick, gone, found.files, found.bytes))
        seam("wal_trim.recorded")
        if _commit(table, base, files, seam):
            seam("wal_trim.done")
            return found
    raise DeadlineExceeded(f"{ATTEMPTS} commits to {settings.wal_path} met another writer's; the next run trims it")


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    size: int
    rows: int
    kind: str
    date: str


def files_before(table: WalTable, base: Base) -> list[_File]:
    """The live files that hold nothing but what lies before the base, from the Delta log alone."""
    actions = pa.table(table.delta.get_add_actions(flatten=True))
    if actions.num_rows == 0:
        return []
    mine = pc.and_(
        pc.equal(actions["partition.pchannel"], base.pchannel), pc.not_equal(actions["partition.kind"], KIND_STATE)
    )
    early = pc.less_equal(actions["max.time_tick"], base.time_tick)
    return [
        _File(row["path"], row["size_bytes"], row["num_records"], row["partition.kind"], str(row["partition.date"]))
        for row in actions.filter(pc.and_(mine, pc.fill_null(early, False))).to_pylist()
        if LogId(row["max.ledger"], row["max.entry"]) < base.confirmed.log_id
    ]


def _read(table: WalTable, file: _File) -> tuple[Totals, list[str]]:
    """What a file's rows add up to, and the staged files that its messages name."""
    rows = read_file(table.path / file.path).cast(ROW_SCHEMA)
    if file.kind != KIND_MESSAGE:
        return Totals(0, rows.num_rows, digest(rows)), []
    return Totals(rows.num_rows, 0, digest(rows)), named_files(rows)


def _commit(table: WalTable, base: Base, files: list[_File], seam: Callable[[str], None]) -> bool:
    """One commit from the version of `table`; False where another writer was first."""
    now, pchannel, app = int(time.time() * 1000), base.pchannel, base.pchannel + TRIMMED_APP_SUFFIX
    earliest = base.confirmed.log_id
    removes: list[AddAction | RemoveAction] = [
        RemoveAction(
            file.path, True, now, partition_values={"kind": file.kind, "pchannel": pchannel, "date": file.date}
        )
        for file in files
    ]
    seam("wal_trim.checked")
    with commit_lease(table.path):
        if not table.stands():
            return False
        try:
            table.delta.create_write_transaction(
                removes,
                mode="append",
                schema=TABLE_SCHEMA,
                partition_by=list(PARTITION_COLUMNS),
                commit_properties=CommitProperties(
                    max_commit_retries=0,
                    app_transactions=[
                        Transaction(app, base.time_tick),
                        Transaction(app + "/ledger", earliest.ledger),
                        Transaction(app + "/entry", earliest.entry),
                    ],
                    custom_metadata={"millrace": {"trimmed": len(files), "pchannel": pchannel, "tick": base.time_tick}},
                ),
                post_commithook_properties=_HOOKS,
            )
        except CommitFailedError:
            return False
        version = table.version + 1
        table.refresh()
        sync_log(table.path, version)
    return True
