"""Damaged parts of the ``wal`` table computed again from the log: files of messages and rejections, and the state row.

The WAL is a pure function of the log, so the rows that come out are the ones that were there; what a commit counted of them
is compared before anything is put in place. A repair is one commit that removes the damaged file and adds the new one,
fenced as compaction is: the committer may work on meanwhile.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.errors import RepairImpossible
from millrace.failpoint import hit
from millrace.log.protocol import LogService
from millrace.message.ids import LogId
from millrace.node.committer import METADATA_KEY
from millrace.node.wal_compaction import LiveFile, live_files, replace_files
from millrace.node.wal_writer import RangeWriter, RowFile, rows_by_date
from millrace.ops.recovery.replay import nearest_start, replay_starts, run_again, state_at
from millrace.settings import Settings
from millrace.tables.parquet_file import opened
from millrace.tables.wal_table import WalPosition, WalTable, partition_path
from millrace.wal.chain import Outcome
from millrace.wal.digest import Digest, digest
from millrace.wal.schema import KIND_MESSAGE, KIND_REJECTION, KIND_STATE, ROW_SCHEMA

_TRIES = 20
_DICTIONARIES = [field.name for field in ROW_SCHEMA if pa.types.is_dictionary(field.type)]


def rebuild_files(settings: Settings, service: LogService, pchannel: str, names: Sequence[str]) -> int:
    """Put a new file in the place of each of `names` (relative to the table) that is still live; the rows written.

    Raises RepairImpossible where the log no longer has them, or gives another number of rows.
    """
    table = WalTable.open(settings.wal_path)
    files = [file for file in live_files(table.delta) if file.pchannel == pchannel and file.path in set(names)]
    return sum(_rebuild(settings, table, service, file) for file in files)


def differing_files(settings: Settings, service: LogService, pchannel: str) -> list[str]:
    """Live files of `pchannel` whose rows are not those that the log gives. One pass over the log and one over the files.

    Raises RepairImpossible where the log reaches back to none of them.
    """
    table = WalTable.open(settings.wal_path)
    files = [file for file in live_files(table.delta) if file.pchannel == pchannel]
    if not files:
        return []
    start = next(iter(replay_starts(settings, service, pchannel)), None)
    files = [file for file in files if start is not None and LogId(*file.low) >= start.state.position]
    if start is None or not files:
        raise RepairImpossible(
            f"the log of {pchannel} was truncated behind all files of the wal table: restore the table from a backup"
        )
    expected = {file.path: Digest() for file in files}
    for outcome in run_again(service, pchannel, start, until=_behind(files)):
        for file in files:
            part = _rows_of(outcome, file)
            if part is not None:
                expected[file.path] += digest(part)
    return [file.path for file in files if _stored(settings.wal_path / file.path) != expected[file.path]]


def rebuild_state(settings: Settings, service: LogService, pchannel: str) -> None:
    """Write the PChannel's state row anew, as its last commit left it. Raises RepairImpossible."""
    table = WalTable.open(settings.wal_path)
    commits, last_tick = table.commits(pchannel), table.last_tick(pchannel)
    described = _last_commit(settings.wal_path, pchannel, commits)
    position = LogId.parse(described["position"])
    found = state_at(service, pchannel, nearest_start(settings, service, pchannel, before=position), until=position)
    if found.state.last_tick != last_tick:
        raise RepairImpossible(
            f"the log of {pchannel} does not lead to tick {last_tick} of its commit {commits}: restore the log"
        )
    writer = RangeWriter(settings.wal_path, pchannel)
    base = WalPosition(table.version, pchannel, commits - 1, described["previous_tick"], found.totals)
    (made,) = writer.finish(found.state, base)
    hit("recovery.written")
    damaged = [name for name in state_files(table, pchannel) if name != made.path]
    for _ in range(_TRIES):
        if table.commits(pchannel) != commits:
            raise RepairImpossible(f"{pchannel} was committed to meanwhile: diagnose again")
        if replace_files(table.delta, settings.wal_path, pchannel, KIND_STATE, made, damaged):
            return
        table.refresh()
    raise RepairImpossible(f"other writers committed {_TRIES} times in between: run it again")


def state_files(table: WalTable, pchannel: str) -> list[str]:
    """Live state files of a PChannel, relative to the table: one, unless something is wrong."""
    return [str(path.relative_to(table.path)) for path in table.files(KIND_STATE, pchannel)]


def _rebuild(settings: Settings, table: WalTable, service: LogService, file: LiveFile) -> int:
    start = nearest_start(settings, service, file.pchannel, before=LogId(*file.low))
    folder = partition_path(file.kind, file.pchannel, file.date)
    made = RowFile(table.path, f"{folder}/{uuid.uuid4().hex}.parquet", file.kind, file.date)
    rows = 0
    try:
        for outcome in run_again(service, file.pchannel, start, until=_behind([file])):
            part = _rows_of(outcome, file)
            if part is not None:
                made.write(part)
                rows += part.num_rows
        if rows != file.rows:
            raise RepairImpossible(f"the log gives {rows} rows for {file.path}, its commit counted {file.rows}")
        action = made.close()
    except BaseException:
        made.discard()
        raise
    hit("recovery.written")
    for _ in range(_TRIES):
        if file.path not in {each.path for each in live_files(table.delta)}:
            break  # compaction cannot have read it; another repair was first
        if replace_files(table.delta, table.path, file.pchannel, file.kind, action, [file.path]):
            return rows
        table.refresh()
    (table.path / action.path).unlink(missing_ok=True)
    raise RepairImpossible(f"{file.path} was replaced meanwhile: diagnose again")


def _behind(files: Sequence[LiveFile]) -> LogId:
    return LogId(*max(file.high for file in files)).following()


def _rows_of(outcome: Outcome, file: LiveFile) -> pa.RecordBatch | None:
    """The rows of one outcome that lie in `file`: files of one kind hold ranges of entries that do not overlap."""
    rows = {KIND_MESSAGE: outcome.messages, KIND_REJECTION: outcome.rejections}[file.kind]
    if rows.num_rows == 0:
        return None
    for day, part in rows_by_date(file.kind, rows):
        if day == file.date:
            ledger, entry = part.column("ledger").to_numpy(), part.column("entry").to_numpy()
            low = (ledger > file.low[0]) | ((ledger == file.low[0]) & (entry >= file.low[1]))
            high = (ledger < file.high[0]) | ((ledger == file.high[0]) & (entry <= file.high[1]))
            chosen = np.flatnonzero(low & high)
            return part.slice(int(chosen[0]), len(chosen)) if len(chosen) else None
    return None


def _stored(path: Path) -> Digest:
    """The digest of a file's rows; that of none where it cannot be read."""
    total = Digest()
    try:
        with opened(path, read_dictionary=_DICTIONARIES) as parquet:
            for group in range(parquet.num_row_groups):
                total += digest(parquet.read_row_group(group).cast(ROW_SCHEMA))
    except (OSError, pa.ArrowException):
        return Digest()
    return total


def _last_commit(path: Path, pchannel: str, commits: int) -> dict[str, Any]:
    """What the PChannel's commit number `commits` said of its range, from the Delta log."""
    for entry in sorted((path / "_delta_log").glob("*.json"), reverse=True):
        for line in entry.read_text().splitlines():
            said = json.loads(line).get("commitInfo", {}).get(METADATA_KEY, {})
            said = json.loads(said) if isinstance(said, str) else said
            found = said.get(pchannel)
            if isinstance(found, dict) and found.get("commit") == commits:
                return found
    raise RepairImpossible(
        f"the log of the wal table no longer has commit {commits} of {pchannel}: restore the table from a backup"
    )
