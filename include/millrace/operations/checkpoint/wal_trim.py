"""Trimming of the ``wal`` table: removes whole files that precede a verified base.

The removal is one commit, made from the very version it was planned from. It also moves ``<pchannel>/trimmed``, so that
every version states how far it is trimmed. The committer sees it like any other writer's commit, refreshes and
continues. VACUUM deletes the files themselves. The staged files that their messages name are removed after the commit
(:mod:`millrace.operations.checkpoint.staged_trim`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow.compute as pc

from millrace.base.errors import DeadlineExceeded
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.message.ids import LogId
from millrace.operations.checkpoint.staged_trim import imported_files, note_trimmed_files
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.tables.collections.bases import VerifiedBase
from millrace.tables.wal.reader import TRIMMED_APP_SUFFIX
from millrace.tables.wal.table import WalTable, WalTotals
from millrace.tables.wal.trims import WalTrim, record_trim, trimmed_totals
from millrace.wal.digest import digest_rows
from millrace.wal.schema import KIND_MESSAGE, KIND_STATE, complete_rows

ATTEMPTS: Final = 50


@dataclass(frozen=True, slots=True)
class TrimResult:
    """Rows that were, or could be, removed of one PChannel."""

    pchannel: str
    time_tick: int
    files: int
    rows: int
    bytes: int


def trim_wal(settings: Settings, base: VerifiedBase, *, dry_run: bool = False) -> TrimResult:
    """Remove the files of the base's PChannel that precede it. May be killed at any time and repeated."""
    table = WalTable.open(settings.wal_uri)
    for _ in range(ATTEMPTS):
        table.refresh()
        files = files_before(table, base)
        found = TrimResult(
            base.pchannel,
            base.time_tick,
            len(files),
            sum(file.rows for file in files),
            sum(file.size for file in files),
        )
        if dry_run or not files:
            return found
        gone, imported = trimmed_totals(table).get(base.pchannel, WalTotals()), list[str]()
        for file in files:
            totals, named = _read(table, file)
            gone, imported = gone + totals, [*imported, *named]
        note_trimmed_files(settings.staged_uri, base.pchannel, base.time_tick, imported)
        record_trim(table.table.uri, WalTrim(base.pchannel, base.time_tick, gone, found.files, found.bytes))
        hit("wal_trim.recorded")
        hit("wal_trim.checked")
        if _commit(table, base, files):
            hit("wal_trim.done")
            return found
    raise DeadlineExceeded(
        f"{ATTEMPTS} commits to {settings.wal_uri} conflicted with other writers; the next run trims it"
    )


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    size: int
    rows: int
    kind: str
    date: str


def files_before(table: WalTable, base: VerifiedBase) -> list[_File]:
    """Return the live files that hold only rows before the base, from the Delta log alone."""
    actions = table.table.actions()
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


def _read(table: WalTable, file: _File) -> tuple[WalTotals, list[str]]:
    """Return the totals of a file's rows, and the staged files that its messages name."""
    rows = complete_rows(table.table.read(file.path))
    if file.kind != KIND_MESSAGE:
        return WalTotals(0, rows.num_rows, digest_rows(rows)), []
    return WalTotals(rows.num_rows, 0, digest_rows(rows)), imported_files(rows)


def _commit(table: WalTable, base: VerifiedBase, files: list[_File]) -> bool:
    """Remove `files`. Return False if one of them was replaced or another trim committed first."""
    app, earliest = base.pchannel + TRIMMED_APP_SUFFIX, base.confirmed.log_id

    def move(app_id: str, version: int) -> tuple[str, AppTransaction]:
        return app_id, AppTransaction(table.table.app_version(app_id), version)

    part = CommitPart(
        removes=[file.path for file in files],
        app_transactions=dict(
            [move(app, base.time_tick), move(app + "/ledger", earliest.ledger), move(app + "/entry", earliest.entry)]
        ),
        info={"trimmed": len(files), "pchannel": base.pchannel, "tick": base.time_tick},
    )
    return not commit_fenced(table.table, [part]).fenced
