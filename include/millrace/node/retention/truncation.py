"""Truncation of the ingress log: what the tables hold durably is given up in the log, and nothing else.

Up to where: the minimum of the recovery checkpoint (the committed position of the WAL, from which any host goes on) and
the flush checkpoint (LastConfirmed of what the flusher took: with the log from there the unflushed rows could be made anew).
Both stand in Delta commits whose files were fsynced before; the commit itself is once more (:func:`read_synced_tables`), for who made it may
not have come to that yet. The last entry of
the committed range stays, so that a log that lost or changed acknowledged entries is still recognised (LogRegressed).
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
    """What was, or could be, given up of one PChannel's log; bytes as the log counts them."""

    pchannel: str
    begin: LogId
    """The earliest position before."""
    position: LogId
    """The earliest position that the checkpoints ask for."""
    freed_bytes: int

    @property
    def advances(self) -> bool:
        return self.position > self.begin


def truncation_limit(position: WalPosition, checkpoint: Checkpoint | None) -> LogId | None:
    """The first entry of a PChannel's log that must stay; None where everything must (nothing committed or flushed yet)."""
    state = position.state
    if state is None or state.last_entry is None or checkpoint is None or not checkpoint.time_tick:
        return None
    return min(state.last_entry, checkpoint.confirmed.log_id)


def read_synced_tables(settings: Settings) -> tuple[WalTable, dict[str, Checkpoint]]:
    """The WAL and the flusher's checkpoints, as a power loss would leave them. Raises TableNotFound where there is no WAL yet."""
    wal, flushed = WalTable.open(settings.wal_uri), open_table(settings.checkpoints_uri)
    for table in (wal.table, flushed):
        if table is not None:
            table.store.sync([commit_file(table.version)])
    return wal, read_checkpoints(flushed)


def truncate_log(
    settings: Settings, service: LogService, *, dry_run: bool = False, limits: Mapping[str, LogId] | None = None
) -> list[Truncation]:
    """Truncate each PChannel's log as far as its checkpoints allow; with `dry_run` only say how far that is.

    `limits`: by PChannel the first entry that must stay at any rate; a PChannel without one is left as it is. May be
    killed at any instant and repeated: it only ever removes what both checkpoints have passed. While a backup holds it
    back (millrace.node.retention.removal_lock) nothing is freed.
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
