"""Views of checkpoints, and of the log that they allow to truncate.

Shows the plan of millrace.node.retention.truncation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from millrace.base.log_backends import is_in_data_folder
from millrace.base.settings import Settings
from millrace.log.rocksmq.manifest import encode_file_name
from millrace.message.ids import LogId
from millrace.node.retention.truncation import truncation_limit
from millrace.observe.channels import tick_unix_seconds
from millrace.observe.log_probe import LogView
from millrace.observe.models import CheckpointsView, CheckpointView, CommitView
from millrace.observe.table_cache import TableSnapshot
from millrace.tables.collections.flush_tables import PCHANNEL, Checkpoint
from millrace.tables.wal.table import WalPosition

MAX_COMMITS: Final = 10


def checkpoints_view(
    settings: Settings,
    positions: Mapping[str, WalPosition],
    checkpoints: Mapping[str, Checkpoint],
    log: LogView,
    pinned: TableSnapshot | None,
) -> CheckpointsView:
    """Return both checkpoints of each PChannel, and what truncation could free."""
    written = written_at(pinned)
    found = [
        _view(settings, name, positions.get(name), checkpoints.get(name), written.get(name), log)
        for name in sorted({*positions, *checkpoints, *log.channels})
    ]
    sizes = [each.log_bytes for each in found if each.log_bytes is not None]
    frees = [each.free_bytes for each in found if each.free_bytes is not None]
    return CheckpointsView(
        checkpoints=found,
        log_server=log.running,
        log_bytes=sum(sizes) if log.running else None,
        free_bytes=sum(frees) if log.running else None,
        history=commit_views(pinned, MAX_COMMITS),
    )


def _view(
    settings: Settings,
    name: str,
    position: WalPosition | None,
    checkpoint: Checkpoint | None,
    written: float | None,
    log: LogView,
) -> CheckpointView:
    state = position.state if position is not None else None
    target = truncation_limit(position, checkpoint) if position is not None else None
    channel = log.channels.get(name)
    described = channel.description if channel is not None else None
    embedded = is_in_data_folder(settings.log)
    truncate_time = tick_unix_seconds(target.entry) if embedded and target is not None else None
    files = _log_files(settings, name) if embedded else []
    return CheckpointView(
        pchannel=name,
        term=checkpoint.term if checkpoint is not None else 0,
        wal_position=str(state.position) if state is not None else None,
        wal_tick=str(position.last_tick if position is not None else 0),
        wal_time=tick_unix_seconds(position.last_tick) if position is not None else None,
        flush_tick=str(checkpoint.time_tick if checkpoint is not None else 0),
        flush_time=tick_unix_seconds(checkpoint.time_tick) if checkpoint is not None else None,
        confirmed=str(checkpoint.confirmed) if checkpoint is not None else "",
        written=written,
        log_begin=str(described.begin) if described is not None else None,
        log_end=str(described.end) if described is not None else None,
        log_bytes=described.bytes if described is not None else None,
        truncate_to=str(target) if target is not None else None,
        truncate_time=truncate_time,
        files=len(files) if embedded else None,
        free_bytes=_freed(files, truncate_time) if embedded else None,
        holds=_holds(position, checkpoint, target),
    )


def _log_files(settings: Settings, name: str) -> list[tuple[float, int]]:
    """Return (last write, bytes) of each file of a channel of the embedded log, oldest first."""
    found = []
    try:
        for path in (settings.log_path / "channels" / encode_file_name(name)).glob("*.log"):
            status = path.stat()
            found.append((status.st_mtime, status.st_size))
    except OSError:
        return []
    return sorted(found)


def _freed(files: Sequence[tuple[float, int]], before: float | None) -> int:
    """Return the bytes of the files last written before a time. The newest file always stays."""
    return sum(size for written, size in files[:-1] if before is not None and written < before)


def _holds(position: WalPosition | None, checkpoint: Checkpoint | None, target: LogId | None) -> str:
    state = position.state if position is not None else None
    if state is None:
        return "nothing is committed to the WAL yet"
    if checkpoint is None or target is None:
        return "nothing is flushed yet"
    if state.last_entry == target:
        return "the last committed entry stays, so that data loss in the log is detected"
    if state.first_open_begin() is not None and target == checkpoint.confirmed.log_id:
        return "the oldest open transaction, or rows that are not flushed yet"
    return "rows that are not flushed yet"


def written_at(pinned: TableSnapshot | None) -> dict[str, float]:
    """Return by PChannel when its last checkpoint was written, according to the Delta log."""
    if pinned is None:
        return {}
    found: dict[str, float] = {}
    for name, at in zip(pinned.column(f"partition.{PCHANNEL}"), pinned.column("modification_time"), strict=True):
        found[name] = max(found.get(name, 0.0), at.timestamp() if isinstance(at, datetime) else float(at or 0) / 1000)
    return found


def commit_views(pinned: TableSnapshot | None, count: int) -> list[CommitView]:
    """Return the last commits of a table, newest first."""
    if pinned is None:
        return []
    found = []
    for each in pinned.table.history(count):
        metrics = each.get("operationMetrics") or {}
        found.append(
            CommitView(
                version=int(each.get("version", 0)),
                at=float(each.get("timestamp", 0)) / 1000,
                operation=str(each.get("operation", "")),
                added=_number(metrics, "num_added_files", "numFiles", "numAddedFiles"),
                removed=_number(metrics, "num_removed_files", "numRemovedFiles"),
            )
        )
    return found


def _number(metrics: Mapping[str, object], *names: str) -> int | None:
    for name in names:
        value = metrics.get(name)
        if isinstance(value, int | str) and str(value).isdigit():
            return int(value)
    return None
