"""Truncation of the ingress log: removes log entries that the tables hold durably.

The limit is the minimum of two checkpoints: the recovery checkpoint (the committed position of the WAL, from which any
host continues) and the flush checkpoint (LastConfirmed of what the flusher took; the log from there on rebuilds
unflushed rows). The files of both commits were synced before; :func:`read_synced_tables` syncs the commits again,
because their writer may have died before it did. The last entry of the committed range stays, so that a log that lost
or changed acknowledged entries is still detected (LogRegressed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.message.ids import LogId
from millrace.node.retention.removal_lock import removal_permit
from millrace.storage.delta_log import commit_file
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.table import WalPosition, WalTable


@dataclass(frozen=True, slots=True)
class Truncation:
    """A truncation of one PChannel's log, done or possible. Bytes as the log counts them."""

    pchannel: str
    begin: LogId
    """The earliest position before the truncation."""
    position: LogId
    """The earliest position that the checkpoints require."""
    freed_bytes: int

    @property
    def advances(self) -> bool:
        return self.position > self.begin


def truncation_limit(position: WalPosition, checkpoint: Checkpoint | None) -> LogId | None:
    """Return the first log entry of a PChannel that must stay; None before the first commit or flush: all must."""
    state = position.state
    if state is None or state.last_entry is None or checkpoint is None or not checkpoint.time_tick:
        return None
    return min(state.last_entry, checkpoint.confirmed.log_id)


def read_synced_tables(settings: Settings) -> tuple[WalTable, dict[str, Checkpoint]]:
    """Return the WAL and the flusher's checkpoints after syncing both. Raises TableNotFound if there is no WAL yet."""
    wal, flushed = WalTable.open(settings.wal_uri), open_table(settings.checkpoints_uri)
    for table in (wal.table, flushed):
        if table is not None:
            table.store.sync([commit_file(table.version)])
    return wal, read_checkpoints(flushed)


def truncate_log(
    settings: Settings, service: LogService, *, dry_run: bool = False, limits: Mapping[str, LogId] | None = None
) -> list[Truncation]:
    """Truncate each PChannel's log as far as its checkpoints allow. With `dry_run`, only report how far that is.

    `limits` gives, by PChannel, the first entry that must stay in any case; a PChannel without a limit is not
    truncated.
    May be killed at any time and repeated. Frees nothing while a backup blocks removals
    (millrace.node.retention.removal_lock).
    """
    with removal_permit(settings) as free:
        wal, checkpoints = read_synced_tables(settings)
        found = []
        for pchannel, position in wal.valid_positions(wal.pchannels()).items():
            target = truncation_limit(position, checkpoints.get(pchannel))
            if limits is not None and target is not None:
                target = min(target, limits[pchannel]) if pchannel in limits else None
            if target is not None:
                found.append(_truncate(service, pchannel, target, dry_run or not free))
        return found


def _truncate(service: LogService, pchannel: str, target: LogId, dry_run: bool) -> Truncation:
    log = service.open(pchannel)
    try:
        begin = log.describe().begin
        freed = 0
        if target > begin and not dry_run:
            hit("truncation.before")
            freed = log.truncate(target)
            hit("truncation.after")
        return Truncation(pchannel, begin, target, freed)
    finally:
        log.close()
