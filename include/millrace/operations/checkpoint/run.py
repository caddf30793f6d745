"""The operation `checkpoint`: write and verify a checkpoint of each PChannel, then remove what precedes it.

The order is: verify, write, sync the tables, ask the quality gate, truncate the log, trim the WAL. Each step depends
only on earlier ones. A kill in between therefore leaves more than is needed, never less, and the next run continues.
Needs no Spark.
"""

from __future__ import annotations

import time

from pydantic import Field

from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.log.clock import log_time_ms
from millrace.log.protocol import LogService
from millrace.message.ids import LogId
from millrace.node.retention.removal_lock import removal_permit
from millrace.node.retention.truncation import truncate_log, truncation_limit
from millrace.operations.checkpoint import recovery_checkpoints
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.recovery_checkpoints import RecoveryCheckpoint
from millrace.operations.checkpoint.replay_verification import choose_start, verify_checkpoint
from millrace.operations.checkpoint.retention import WalTrimReport, apply_retention
from millrace.operations.checkpoint.table_sync import SyncedTables, sync_tables
from millrace.operations.operation import OperationReport, counted, mebibytes
from millrace.operations.quality.gate import blocked
from millrace.runtime.progress import Progress
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import read_checkpoints
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalPosition, WalTable

MIB = 1 << 20


class ChannelCheckpoint(OperationReport):
    """The result for one PChannel."""

    pchannel: str
    time_tick: int
    position: str = Field(description="Next entry of the log after the checkpoint.")
    verified_by: str = Field(
        description="replayed: from the last checkpoint. sampled: only the newest part since then."
    )
    replayed_from: str
    replayed_rows: int
    by_log: bool = Field(
        description="Whether the log was run through the chain. Otherwise the WAL's rows were evolved."
    )
    problem: str = Field(description="Why the checkpoint was not written. Empty if it was written or already existed.")
    written: bool
    seconds: float


class LogTruncation(OperationReport):
    """Space that the log of a PChannel freed, or could free."""

    pchannel: str
    begin: str
    position: str
    freed_bytes: int


class CheckpointReport(OperationReport):
    """The result of a run.

    `ok` is True if the replays confirmed every checkpoint and every requested base was verified.
    """

    ok: bool
    dry_run: bool
    channels: tuple[ChannelCheckpoint, ...] = ()
    truncated: tuple[LogTruncation, ...] = ()
    trimmed: tuple[WalTrimReport, ...] = ()
    synced_files: int = 0
    tables: int = Field(default=0, description="Tables on a disk that the truncation of the log depends on.")
    unchanged_tables: int = Field(default=0, description="Those of them without a commit since the last run.")
    blocked: tuple[str, ...] = Field(default=(), description="Quality blocks that prevented truncation and trimming.")
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        wrong = [each.pchannel for each in self.channels if each.problem]
        if wrong:
            return f"The checkpoint of {', '.join(wrong)} could not be verified, and nothing was removed there."
        freed = sum(each.freed_bytes for each in self.truncated) + sum(each.freed_bytes for each in self.trimmed)
        words = f"{counted(len(self.channels), 'checkpoint')} verified"
        if self.tables:
            words += f", {self.unchanged_tables:,} of {counted(self.tables, 'table')} unchanged"
        if self.blocked:
            return f"{words}; nothing was removed, because a critical expectation failed."
        return f"{words}; {mebibytes(freed)} of log and WAL {'could be' if self.dry_run else 'were'} freed."


def run(settings: Settings, params: CheckpointParams, progress: Progress) -> CheckpointReport:
    """Run the operation as its job does, with the log's server, which is started if needed."""
    from millrace.client.append_client import AppendClient
    from millrace.rpc.launch import launch_of

    if not WalTable.exists(settings.wal_uri):
        return CheckpointReport(ok=True, dry_run=params.dry_run)
    with AppendClient.connect(
        settings.data_dir, deadline=settings.start_deadline, launch=launch_of(settings)
    ) as client:
        return checkpoint(settings, client.service, params, progress)


def checkpoint(
    settings: Settings,
    service: LogService,
    params: CheckpointParams,
    progress: Progress,
) -> CheckpointReport:
    """Run the operation on an open log."""
    started = time.perf_counter()
    wal = WalTable.open(settings.wal_uri)
    snapshot = WalSnapshot(wal.table)  # one handle, hence one version
    # Pin these before anything is synced: the log is truncated no further than they reach.
    flushed = read_checkpoints(open_table(settings.checkpoints_uri))
    known = recovery_checkpoints.newest(settings)
    names = wal.pchannels()
    channels = []
    for number, pchannel in enumerate(names):
        progress.step(f"verifying {pchannel}", number, len(names))
        done, found = _channel(settings, service, params, wal, snapshot, wal.position(pchannel), known)
        channels.append(done)
        if found is not None:
            known[pchannel] = found
    broken = {each.pchannel for each in channels if each.problem}
    limits: dict[str, LogId] = {}
    for pchannel, found in known.items():
        allowed = truncation_limit(wal.position(pchannel), flushed.get(pchannel))
        last = found.state.last_entry
        if pchannel not in broken and allowed is not None and last is not None:
            limits[pchannel] = min(allowed, last)
    synced = SyncedTables(0, 0, 0) if params.dry_run else sync_tables(settings, progress, full=params.full)
    hit("checkpoint.synced")
    blocks = blocked(settings)
    truncated: tuple[LogTruncation, ...] = ()
    if params.truncate and (params.dry_run or not blocks):
        progress.update("truncating the log")
        truncated = tuple(
            LogTruncation(
                pchannel=t.pchannel,
                begin=str(t.begin),
                position=str(max(t.position, t.begin)),
                freed_bytes=t.freed_bytes,
            )
            for t in truncate_log(settings, service, dry_run=params.dry_run, limits=limits)
        )
    trimmed: tuple[WalTrimReport, ...] = ()
    if params.trim and settings.wal_retention and (params.dry_run or not blocks):
        progress.update("trimming the WAL")
        reached = {name: each.time_tick for name, each in known.items() if name not in broken}
        stamp = log_time_ms(service)
        now_ms = snapshot.log_time_ms() if stamp is None else stamp
        with removal_permit(settings) as free:  # a backup prevents removal while it pins the tables
            dry_run = params.dry_run or not free
            trimmed = tuple(apply_retention(settings, snapshot, flushed, reached, now_ms=now_ms, dry_run=dry_run))
    return CheckpointReport(
        ok=not broken and not any(each.problem for each in trimmed),
        dry_run=params.dry_run,
        channels=tuple(channels),
        truncated=truncated,
        trimmed=trimmed,
        synced_files=synced.files,
        tables=synced.tables,
        unchanged_tables=synced.unchanged,
        blocked=tuple(each.id for each in blocks),
        seconds=round(time.perf_counter() - started, 3),
    )


def _channel(
    settings: Settings,
    service: LogService,
    params: CheckpointParams,
    wal: WalTable,
    snapshot: WalSnapshot,
    position: WalPosition,
    known: dict[str, RecoveryCheckpoint],
) -> tuple[ChannelCheckpoint, RecoveryCheckpoint | None]:
    """Verify and write the checkpoint of one PChannel.

    Returns the report, and the newest checkpoint in the table if it differs from the previous one.
    """
    started = time.perf_counter()
    before = known.get(position.pchannel)
    if before is not None and before.commits >= position.commits:
        return _channel_report(before, by_log=True, problem="", written=False, started=started), None
    earlier = None if before is None else (before.state, before.totals)
    start = choose_start(wal, position, earlier, max_bytes=params.sample_mib * MIB)
    log = service.open(position.pchannel)
    try:
        result = verify_checkpoint(wal, snapshot, position, start, log)
    finally:
        log.close()
    found = RecoveryCheckpoint.of(
        position,
        verified_by="replayed" if start.contiguous else "sampled",
        replayed_from=result.start,
        replayed_rows=result.rows,
    )
    if result.problem:
        return _channel_report(
            found, by_log=result.by_log, problem=result.problem, written=False, started=started
        ), None
    written = not params.dry_run and recovery_checkpoints.write(settings, found)
    report = _channel_report(found, by_log=result.by_log, problem="", written=written, started=started)
    return report, found if written or params.dry_run else None


def _channel_report(
    found: RecoveryCheckpoint, *, by_log: bool, problem: str, written: bool, started: float
) -> ChannelCheckpoint:
    return ChannelCheckpoint(
        pchannel=found.pchannel,
        time_tick=found.time_tick,
        position=str(found.position),
        verified_by=found.verified_by,
        replayed_from=str(found.replayed_from),
        replayed_rows=found.replayed_rows,
        by_log=by_log,
        problem=problem,
        written=written,
        seconds=round(time.perf_counter() - started, 3),
    )
