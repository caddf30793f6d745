"""Recomputes damaged parts of the ``wal`` table from the log: files of messages and rejections, and the state row.

The WAL is a pure function of the log, so recomputed rows equal the lost ones. What a commit counted is compared before
anything is replaced. A repair is one commit that removes the damaged file and adds the new one. It is fenced like
compaction, so the committer may keep working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.base.errors import RepairImpossible
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.message.ids import LogId
from millrace.node.ingest.wal_writer import WalFileWriter, WalRangeWriter, rows_by_date
from millrace.node.retention.wal_compaction import first_entry, last_entry, live_files
from millrace.operations.recovery.replay import nearest_start, replay_range, replay_starts, state_at
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.delta_log import read_commit_infos
from millrace.storage.table import LiveFile
from millrace.tables.wal.table import COMMIT_APP_SUFFIX, WalPosition, WalTable, WalTotals
from millrace.wal.chain import ChainOutcome
from millrace.wal.digest import WalDigest, digest_rows
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION, KIND_STATE, ROW_SCHEMA, complete_rows

_DICTIONARIES = [field.name for field in ROW_SCHEMA if pa.types.is_dictionary(field.type)]


def rebuild_files(settings: Settings, service: LogService, pchannel: str, names: Sequence[str]) -> int:
    """Replace each live file among `names` (relative to the table) and return the number of rows written.

    Raises RepairImpossible if the log no longer has the rows, or gives a different number of them.
    """
    table = WalTable.open(settings.wal_uri)
    files = [
        file for file in live_files(table.table) if file.partition["pchannel"] == pchannel and file.path in set(names)
    ]
    return sum(_rebuild(settings, table, service, file) for file in files)


def differing_files(settings: Settings, service: LogService, pchannel: str) -> list[str]:
    """Return the live files of `pchannel` whose rows differ from what the log gives.

    Reads the log once and the files once.

    Raises RepairImpossible if the log reaches back to none of them.
    """
    table = WalTable.open(settings.wal_uri)
    files = [file for file in live_files(table.table) if file.partition["pchannel"] == pchannel]
    if not files:
        return []
    start = next(iter(replay_starts(settings, service, pchannel)), None)
    files = [file for file in files if start is not None and LogId(*first_entry(file)) >= start.state.position]
    if start is None or not files:
        raise RepairImpossible(
            f"the log of {pchannel} was truncated beyond all files of the wal table: restore the table from a backup"
        )
    expected = {file.path: WalDigest() for file in files}
    for outcome in replay_range(service, pchannel, start, until=_position_after(files)):
        for file in files:
            part = _rows_of(outcome, file)
            if part is not None:
                expected[file.path] += digest_rows(part)
    return [file.path for file in files if _stored(table, file.path) != expected[file.path]]


def rebuild_state(settings: Settings, service: LogService, pchannel: str) -> None:
    """Write the PChannel's state whole, as its last commit left it, in a commit of its own. Raises RepairImpossible."""
    table = WalTable.open(settings.wal_uri)
    commits, last_tick = table.commits(pchannel), table.last_tick(pchannel)
    described = _last_commit(table, pchannel, commits)
    position = LogId.parse(described["position"])
    found = state_at(service, pchannel, nearest_start(settings, service, pchannel, before=position), until=position)
    if found.state.last_tick != last_tick:
        raise RepairImpossible(
            f"the log of {pchannel} does not lead to tick {last_tick} of its commit {commits}: restore the log"
        )
    writer = WalRangeWriter(settings.wal_uri, pchannel)
    (made,) = writer.finish(found.state, WalPosition(table.version, pchannel, commits, last_tick, found.totals))
    hit("recovery.written")
    damaged = [name for name in state_files(table, pchannel) if name != made.path]
    # The commit counts, although the PChannel does not advance: a process that still knows the former rows reads the
    # new one, and an increment to the former ones is fenced.
    moves = {
        pchannel: AppTransaction(last_tick, last_tick),
        pchannel + COMMIT_APP_SUFFIX: AppTransaction(commits, commits + 1),
    }
    unmoved = {
        "commit": commits + 1,
        "previous_tick": last_tick,
        "tick": last_tick,
        "position": described["position"],
        **WalTotals().to_json(),
    }
    part = CommitPart([made], damaged, moves, info={"replaced": len(damaged), pchannel: unmoved})
    if commit_fenced(table.table, [part], data_change=False).fenced:
        raise RepairImpossible(f"{pchannel} received a commit meanwhile: diagnose again")


def state_files(table: WalTable, pchannel: str) -> list[str]:
    """Return the files of a PChannel's live state rows, relative to the table."""
    return table.files(KIND_STATE, pchannel)


def _rebuild(settings: Settings, table: WalTable, service: LogService, file: LiveFile) -> int:
    kind, pchannel, date = (file.partition[name] for name in ("kind", "pchannel", "date"))
    start = nearest_start(settings, service, pchannel, before=LogId(*first_entry(file)))
    made = WalFileWriter(table.table.store, kind, pchannel, date)
    rows = 0
    try:
        for outcome in replay_range(service, pchannel, start, until=_position_after([file])):
            part = _rows_of(outcome, file)
            if part is not None:
                made.write(part)
                rows += part.num_rows
        if rows != file.rows:
            raise RepairImpossible(f"the log gives {rows} rows for {file.path}, but its commit counted {file.rows}")
        action = made.close()
    except BaseException:
        made.discard()
        raise
    hit("recovery.written")
    part = CommitPart([action], [file.path], info={"replaced": 1})
    if commit_fenced(table.table, [part], data_change=False).fenced:
        raise RepairImpossible(f"{file.path} was replaced meanwhile: diagnose again")
    return rows


def _position_after(files: Sequence[LiveFile]) -> LogId:
    return LogId(*max(map(last_entry, files))).following()


def _rows_of(outcome: ChainOutcome, file: LiveFile) -> pa.RecordBatch | None:
    """Return the rows of one outcome that belong in `file`. Files of one kind hold disjoint ranges of entries."""
    rows = {KIND_MESSAGE: outcome.messages, KIND_REJECTION: outcome.rejections}[file.partition["kind"]]
    if rows.num_rows == 0:
        return None
    for day, part in rows_by_date(file.partition["kind"], rows):
        if day == file.partition["date"]:
            ledger, entry = part.column("ledger").to_numpy(), part.column("entry").to_numpy()
            (low_ledger, low_entry), (high_ledger, high_entry) = first_entry(file), last_entry(file)
            low = (ledger > low_ledger) | ((ledger == low_ledger) & (entry >= low_entry))
            high = (ledger < high_ledger) | ((ledger == high_ledger) & (entry <= high_entry))
            chosen = np.flatnonzero(low & high)
            return part.slice(int(chosen[0]), len(chosen)) if len(chosen) else None
    return None


def _stored(table: WalTable, name: str) -> WalDigest:
    """Return the digest of a file's rows, or the empty digest if it cannot be read."""
    total = WalDigest()
    try:
        with table.table.open_file(name, read_dictionary=_DICTIONARIES) as parquet:
            for group in range(parquet.num_row_groups):
                total += digest_rows(complete_rows(parquet.read_row_group(group)))
    except (OSError, pa.ArrowException):
        return WalDigest()
    return total


def _last_commit(table: WalTable, pchannel: str, commits: int) -> dict[str, Any]:
    """Return what the PChannel's commit number `commits` recorded about its range in the Delta log."""
    for said in read_commit_infos(table.table.store):
        found = said.get(pchannel)
        if isinstance(found, dict) and found.get("commit") == commits:
            return found
    raise RepairImpossible(
        f"the log of the wal table no longer has commit {commits} of {pchannel}: restore the table from a backup"
    )
