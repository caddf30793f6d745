"""Tables of the flusher made anew from the WAL: a collection's rows and deletes, ``segments``, ``checkpoints``.

The flusher itself does it, into a clone of the WAL alone, up to the ticks that the damaged table had reached; then the new
files move over and one commit puts them in the place of the old ones. Files that a running flusher has added meanwhile stay: they
hold later ticks. The old files remain on disk until VACUUM.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from millrace.errors import BackupBusy, RepairImpossible
from millrace.failpoint import hit
from millrace.node.flusher import plan_flush, run_flush
from millrace.node.flusher_commit import FlushCommitter
from millrace.node.removal import removing
from millrace.ops.operation import Progress
from millrace.ops.recovery.clone import clone_staged, clone_table
from millrace.settings import Settings
from millrace.tables.collection_table import FOLDED, REWRITES
from millrace.tables.delta_files import AppMove, Fenced, FileAction, commit, live_files, open_table
from millrace.tables.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.fsync import sync
from millrace.tables.wal_reader import WalSnapshot
from millrace.tables.wal_table import WalTable
from millrace.tables.wal_trims import trimmed_totals

_TRIES = 20


def rebuild_collection(settings: Settings, collection_id: int, *, progress: Progress) -> int:
    """Make rows and deletes of a collection anew; the files that were put in place."""
    deletes, rows = settings.deletes_path(collection_id), settings.collections_path(collection_id)
    with removing(settings) as free:
        # A backup pins the deletes before the rows: it may not see these without the fold, and those still with it.
        if not free:
            raise BackupBusy(f"a backup pins the tables of collection {collection_id} right now: repair it in a minute")
        table = open_table(rows)
        rewrites = 0 if table is None else _unfold(table)
        return _rebuild(settings, [deletes, rows], rewrites={rows: rewrites}, progress=progress)


def _unfold(table: DeltaTable) -> int:
    """Take back that no dead row is in the table, before there are some again; its count of rewrites.

    From here on compaction lets no delete go, until it has folded anew: and then the rows' commit is fenced.
    """
    for _ in range(_TRIES):
        table.update_incremental()
        rewrites = table.transaction_version(REWRITES)
        moves = {
            REWRITES: AppMove(rewrites, (rewrites or 0) + 1),
            FOLDED: AppMove(table.transaction_version(FOLDED), 0),
        }
        try:
            commit(table, [], moves=moves, data_change=False)
        except Fenced:
            continue
        return (rewrites or 0) + 1
    raise RepairImpossible(f"compaction rewrote {table.table_uri} {_TRIES} times in between: run it again")


def rebuild_segments(settings: Settings, *, progress: Progress) -> int:
    """Make ``segments`` anew."""
    return _rebuild(settings, [settings.segments_path], progress=progress)


def rebuild_checkpoints(settings: Settings, *, progress: Progress) -> int:
    """Make ``checkpoints`` anew: each PChannel's as of the tick it had."""
    return _rebuild(settings, [settings.checkpoints_path], progress=progress)


def _rebuild(
    settings: Settings, paths: Sequence[Path], *, rewrites: Mapping[Path, int] | None = None, progress: Progress
) -> int:
    # The checkpoints before the tables: a table may be ahead of what the checkpoint says, and then says so itself. The
    # other way round, rows that came in between would be made here and stand in the table already.
    wal = WalSnapshot.open(settings.wal_path)
    if wal is None:
        raise RepairImpossible("there is no wal table to make anything from: restore it from a backup")
    trimmed = trimmed_totals(WalTable.open(settings.wal_path))
    if trimmed:
        raise RepairImpossible(
            f"retention has trimmed the WAL of {', '.join(sorted(trimmed))}: what lay before it is in the collections alone; "
            "restore the table from a backup"
        )
    reached = _checkpoint_ticks(settings, wal)
    tables = {path: table for path in paths if (table := open_table(path)) is not None}
    files = 0
    for path, table in tables.items():
        # Each by its own ticks: a flusher that died between two commits left one table ahead of the other.
        ticks = {name: _own_tick(wal, table, name, tick) for name, tick in reached.items()}
        home = settings.run_path / "clones" / uuid.uuid4().hex
        scratch = replace(settings, data_dir=home)
        try:
            clone_staged(settings, home)  # what is trimmed has no repair: nothing of it goes meanwhile
            clone_table(settings.wal_path, scratch.wal_path)
            clone_staged(settings, home)
            _flush_up_to(scratch, ticks, progress)
            moves = {}
            if rewrites is not None and path in rewrites:
                moves[REWRITES] = AppMove(rewrites[path], rewrites[path] + 1)
            files += _put_in_place(path, table, home / path.relative_to(settings.data_dir), moves)
        finally:
            shutil.rmtree(home, ignore_errors=True)
    return files


def _checkpoint_ticks(settings: Settings, wal: WalSnapshot) -> dict[str, int]:
    """By PChannel the tick of its checkpoint. The app transaction says it even where the checkpoint's file is gone."""
    table = open_table(settings.checkpoints_path)
    return {name: 0 if table is None else int(table.transaction_version(name) or 0) for name in wal.pchannels()}


def _own_tick(wal: WalSnapshot, table: DeltaTable, pchannel: str, reached: int) -> int:
    """The tick up to which `table` is whole on a PChannel."""
    tick = max(reached, *(table.transaction_version(name) or 0 for name in (pchannel, *_vchannels(wal, pchannel))))
    if tick > wal.last_tick(pchannel):
        raise RepairImpossible(f"{table.table_uri} is ahead of the WAL of {pchannel}: restore the wal table")
    return tick


def _vchannels(wal: WalSnapshot, pchannel: str) -> set[str]:
    found: set[str] = set()
    for rows in wal.messages(pchannel, types=["CREATE_COLLECTION"], columns=["vchannel"]):
        found.update(rows["vchannel"].to_pylist())
    return found


def _flush_up_to(scratch: Settings, ticks: Mapping[str, int], progress: Progress) -> None:
    wal = WalSnapshot.open(scratch.wal_path)
    assert wal is not None
    committer = FlushCommitter(scratch)
    for pchannel, tick in ticks.items():
        while True:
            path = scratch.checkpoints_path
            checkpoint = read_checkpoints(open_table(path), path).get(pchannel, Checkpoint(pchannel))
            if checkpoint.time_tick >= tick:
                break
            progress.say("reading the WAL again", pchannel=pchannel, done=checkpoint.time_tick / tick)
            plan = plan_flush(wal, checkpoint, up_to_tick=tick, max_bytes=scratch.max_bytes_per_trigger)
            assert plan is not None
            committer.commit([run_flush(scratch, plan)])


def _put_in_place(path: Path, table: DeltaTable, made: Path, moves: Mapping[str, AppMove]) -> int:
    """Move the files of the table at `made` under `path` and commit them for those of the version `table` stands at."""
    old = live_files(table)
    actions = _adds(made)
    folders: set[Path] = set()
    for action in actions:
        target = path / action.path
        target.parent.mkdir(parents=True, exist_ok=True)
        (made / action.path).replace(target)
        folders.update((target.parent, target.parent.parent))
    for folder in folders:
        sync(folder)
    hit("recovery.written")
    now = int(time.time() * 1000)
    removes = [RemoveAction(name, False, now, partition_values=_values(name)) for name in old]
    commit(table, actions, moves=moves, removes=removes, data_change=False)
    return len(actions)


def _adds(path: Path) -> list[FileAction]:
    """The live files of a table that this process made, as the actions that added them."""
    table = open_table(path)
    if table is None:
        return []
    live = live_files(table)
    found = {}
    for entry in sorted((path / "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            add = json.loads(line).get("add")
            if add is not None and add["path"] in live:
                rows = json.loads(add["stats"])["numRecords"]
                values = {name: str(value) for name, value in add["partitionValues"].items()}
                found[add["path"]] = FileAction(
                    add["path"], add["size"], rows, values, add["stats"], add["modificationTime"]
                )
    return list(found.values())


def _values(name: str) -> dict[str, str | None]:
    """Partition values by a file's path."""
    parts = [part.partition("=") for part in name.split("/")[:-1]]
    return {column: value for column, _, value in parts}
