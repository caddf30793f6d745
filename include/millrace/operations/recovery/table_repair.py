"""Rebuilds tables of the flusher from the WAL: a collection's rows and deletes, ``segments``, ``checkpoints``.

The flusher itself runs on a clone of the WAL, up to the ticks that the damaged table had reached. The new files are
then moved over and replace the old ones in one commit. Files that a running flusher added meanwhile stay, because they
hold later ticks. The old files remain on disk until VACUUM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

from millrace.base.errors import BackupBusy, CommitFenced, RepairImpossible
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.node.flush.definition import FlushLoop
from millrace.node.flush.flusher import FlushPlan, FlushReport
from millrace.node.range_loop.in_process import run_to_end
from millrace.node.retention.removal_lock import removal_permit
from millrace.operations.recovery.clone import clone_folder, clone_staged, clone_table
from millrace.runtime.progress import Progress
from millrace.storage.commit import AppTransaction, CommitPart, commit_fenced
from millrace.storage.delta_log import added_files
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.data_tables import FOLDED_APP, REWRITES_APP, deletes_uri, rows_uri
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.tables.wal.trims import trimmed_totals

_TRIES = 20
_REBUILDS = 3
"""Rebuilds of one collection, each of which the flusher may overtake by joining small files meanwhile."""


def rebuild_collection(settings: Settings, collection_id: int, *, progress: Progress) -> int:
    """Rebuild rows and deletes of a collection and return the number of new files."""
    deletes, rows = (partial(uri, collection_id=collection_id) for uri in (deletes_uri, rows_uri))
    with removal_permit(settings) as free:
        # A backup pins the deletes before the rows. It must not see rebuilt deletes without the fold, and rows that
        # still have it.
        if not free:
            raise BackupBusy(f"a backup is pinning the tables of collection {collection_id}: repair it in a minute")
        table = open_table(rows(settings))
        rewrites = {rows(settings): 0 if table is None else _unfold(table)}
        for _ in range(_REBUILDS - 1):
            with suppress(CommitFenced):
                return _rebuild(settings, [deletes, rows], rewrites=rewrites, progress=progress)
        return _rebuild(settings, [deletes, rows], rewrites=rewrites, progress=progress)


def _unfold(table: TableHandle) -> int:
    """Reset the folded tick before dead rows return to the table, and return the table's count of rewrites.

    From here on compaction removes no delete until it has folded again, and that commit to the rows is then fenced.
    """
    for _ in range(_TRIES):
        table.refresh()
        rewrites = table.app_version(REWRITES_APP)
        moves = {
            REWRITES_APP: AppTransaction(rewrites, rewrites + 1),
            FOLDED_APP: AppTransaction(table.app_version(FOLDED_APP), 0),
        }
        if not commit_fenced(table, [CommitPart(app_transactions=moves)], data_change=False).fenced:
            return rewrites + 1
    raise RepairImpossible(f"compaction rewrote {table.uri} {_TRIES} times meanwhile: run it again")


def rebuild_segments(settings: Settings, *, progress: Progress) -> int:
    """Rebuild ``segments``."""
    return _rebuild(settings, [attrgetter("segments_uri")], progress=progress)


def rebuild_checkpoints(settings: Settings, *, progress: Progress) -> int:
    """Rebuild ``checkpoints``, each PChannel's as of its tick."""
    return _rebuild(settings, [attrgetter("checkpoints_uri")], progress=progress)


def _rebuild(
    settings: Settings,
    uris: Sequence[Callable[[Settings], str]],
    *,
    rewrites: Mapping[str, int] | None = None,
    progress: Progress,
) -> int:
    # Read the checkpoints before the tables. A table may be ahead of its checkpoint, and then says so. In the other
    # order, rows flushed in between would be rebuilt here and also be in the table already.
    wal = WalSnapshot.open(settings.wal_uri)
    if wal is None:
        raise RepairImpossible("there is no wal table to rebuild the rows from: restore a backup")
    trimmed = trimmed_totals(WalTable.open(settings.wal_uri))
    if trimmed:
        raise RepairImpossible(
            f"retention has trimmed the WAL of {', '.join(sorted(trimmed))}: earlier rows are in the collections "
            "alone. Restore the table from a backup"
        )
    reached = _checkpoint_ticks(settings, wal)
    tables = [(uri, table) for uri in uris if (table := open_table(uri(settings))) is not None]
    files = 0
    for uri, table in tables:
        # Use each table's own ticks: a flusher that died between two commits left one table ahead of the other.
        ticks = {name: _own_tick(wal, table, name, tick) for name, tick in reached.items()}
        with clone_folder(settings) as home:
            scratch = settings.with_data_dir(home)
            # Keep the staged files: if the WAL is trimmed meanwhile, the repair fails anyway.
            clone_staged(settings, home)
            clone_table(settings.wal_uri, scratch.wal_uri)
            clone_staged(settings, home)
            _flush_up_to(scratch, ticks, progress)
            moves = {}
            count = (rewrites or {}).get(uri(settings))
            if count is not None:
                moves[REWRITES_APP] = AppTransaction(count, count + 1)
            files += _put_in_place(table, uri(scratch), moves)
    return files


def _checkpoint_ticks(settings: Settings, wal: WalSnapshot) -> dict[str, int]:
    """Return the tick of each PChannel's checkpoint.

    The app transaction has it even if the checkpoint's file is missing.
    """
    table = open_table(settings.checkpoints_uri)
    return {name: 0 if table is None else table.app_version(name) for name in wal.pchannels()}


def _own_tick(wal: WalSnapshot, table: TableHandle, pchannel: str, reached: int) -> int:
    """Return the tick up to which `table` is complete on a PChannel."""
    tick = max(reached, *(table.app_version(name) for name in (pchannel, *_vchannels(wal, pchannel))))
    if tick > wal.last_tick(pchannel):
        raise RepairImpossible(f"{table.uri} is ahead of the WAL of {pchannel}: restore the wal table")
    return tick


def _vchannels(wal: WalSnapshot, pchannel: str) -> set[str]:
    found: set[str] = set()
    for rows in wal.messages(pchannel, types=["CREATE_COLLECTION"], columns=["vchannel"]):
        found.update(rows["vchannel"].to_pylist())
    return found


def _flush_up_to(scratch: Settings, ticks: Mapping[str, int], progress: Progress) -> None:
    class ReportingFlushLoop(FlushLoop):
        def run(self, plan: FlushPlan) -> FlushReport:
            done = plan.checkpoint.time_tick / ticks[plan.channel]
            progress.update("replaying the WAL", pchannel=plan.channel, done=done)
            return super().run(plan)

    again = ReportingFlushLoop(scratch)
    run_to_end(again, again.committer(None), target=ticks, max_bytes=scratch.max_bytes_per_trigger)


def _put_in_place(table: TableHandle, made: object, moves: Mapping[str, AppTransaction]) -> int:
    """Move the files of the table at `made`, and commit them in place of those at the version of `table`."""
    old, new = list(table.live_files()), open_table(made)
    actions = []
    if new is not None:
        added = added_files(new.store)
        actions = [added[name] for name in new.live_files()]
        for action in actions:
            table.store.take(new.store, action.path, "move")
        table.store.sync(action.path for action in actions)
    hit("recovery.written")
    commit_fenced(table, [CommitPart(actions, old, moves)], data_change=False).raise_if_fenced()
    return len(actions)
