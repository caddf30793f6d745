"""Views of PChannels, combined from the WAL, the checkpoints, the log and the jobs."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.message.ids import tick_physical_ms
from millrace.observe.log_probe import ChannelLogView, LogView
from millrace.observe.models import JobView, PChannelView
from millrace.tables.collections.flush_tables import Checkpoint
from millrace.tables.wal.table import WalPosition
from millrace.wal.definitions import OpenFigures


def tick_unix_seconds(tick: int) -> float | None:
    """Return a tick's time in Unix seconds, or None for 0."""
    return tick_physical_ms(tick) / 1000 if tick else None


def owner(node: JobView) -> str | None:
    """Describe the streaming node that owns the PChannels, or return None if none runs."""
    return f"streaming-node (process {node.pid})" if node.state == "running" else None


def pchannel_views(
    positions: Mapping[str, WalPosition],
    checkpoints: Mapping[str, Checkpoint],
    log: LogView,
    parked: Mapping[str, str],
    node: JobView,
    owners: Mapping[str, str],
) -> list[PChannelView]:
    """Return a view of every PChannel that any of the sources knows, by name.

    `owners` maps PChannels to the nodes of a cluster. Without a cluster, `node` owns all.
    """
    names = sorted({*positions, *checkpoints, *log.channels, *parked})
    return [
        _view(
            name,
            positions.get(name),
            checkpoints.get(name),
            log,
            parked.get(name),
            owners.get(name) if owners else owner(node),
        )
        for name in names
    ]


def _view(
    name: str,
    position: WalPosition | None,
    checkpoint: Checkpoint | None,
    log: LogView,
    parked: str | None,
    owner: str | None,
) -> PChannelView:
    channel = log.channels.get(name)
    term, figures = _open_work(position, channel)
    at = position.position if position is not None else None
    described = channel.description if channel is not None else None
    tick = position.last_tick if position is not None else 0
    flushed = checkpoint.time_tick if checkpoint is not None else 0
    return PChannelView(
        name=name,
        owner=owner,
        term=term,
        time_tick=str(tick),
        time=tick_unix_seconds(tick),
        log_end=str(described.end) if described is not None else None,
        log_bytes=described.bytes if described is not None else None,
        wal_position=None if at is None else str(at),
        lag_seconds=channel.lag_seconds if channel is not None else None,
        messages=position.totals.messages if position is not None else 0,
        rejections=position.totals.rejections if position is not None else 0,
        flushed_tick=str(flushed),
        flushed_time=tick_unix_seconds(flushed),
        flush_lag_seconds=flush_lag(tick, flushed),
        open_transactions=figures.transactions,
        vchannels=figures.vchannels,
        growing_rows=figures.growing_rows,
        growing_bytes=figures.growing_bytes,
        parked=parked or (channel.parked if channel is not None else None),
    )


def _open_work(position: WalPosition | None, channel: ChannelLogView | None) -> tuple[int, OpenFigures]:
    """Return the term and how much is open: by the append host, if one runs, otherwise by the state in the WAL."""
    if channel is not None and channel.open is not None:
        return channel.term, channel.open
    state = position.state if position is not None else None  # decodes the state of all VChannels
    if state is None:
        return 0 if channel is None else channel.term, OpenFigures(0, 0, 0, 0)
    return max(state.term, 0 if channel is None else channel.term), OpenFigures.of(state)


def flush_lag(tick: int, flushed: int) -> float:
    """Return the seconds between the WAL's last tick and the flusher's. 0 for a PChannel that was never flushed."""
    if tick <= flushed or not flushed:
        return 0.0
    return round((tick_physical_ms(tick) - tick_physical_ms(flushed)) / 1000, 3)
