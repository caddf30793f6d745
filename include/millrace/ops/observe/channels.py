"""PChannels and the state of the whole: what the WAL, the checkpoints, the log and the jobs together say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from millrace.message.ids import tick_physical_ms
from millrace.ops.observe.log_view import LogView
from millrace.ops.observe.models import JobView, PChannelView, State
from millrace.tables.flush_tables import Checkpoint
from millrace.tables.wal_table import WalPosition

LAGGING_SECONDS: Final = 15.0
"""A WAL that is so far behind its log is called lagging."""
FLUSH_LAGGING_SECONDS: Final = 120.0
"""Collections' tables that are so far behind the WAL are called lagging (reads see the WAL's tail meanwhile)."""


def moment(tick: int) -> float | None:
    """A tick's moment in Unix seconds; None for 0."""
    return tick_physical_ms(tick) / 1000 if tick else None


def owner(node: JobView) -> str | None:
    """Who has the PChannels: the streaming node, where one runs."""
    return f"streaming-node (process {node.pid})" if node.state == "running" else None


def pchannels(
    positions: Mapping[str, WalPosition],
    checkpoints: Mapping[str, Checkpoint],
    log: LogView,
    parked: Mapping[str, str],
    node: JobView,
) -> list[PChannelView]:
    """Every PChannel that any of these knows, by name."""
    names = sorted({*positions, *checkpoints, *log.channels, *parked})
    return [_view(name, positions.get(name), checkpoints.get(name), log, parked.get(name), node) for name in names]


def _view(
    name: str,
    position: WalPosition | None,
    checkpoint: Checkpoint | None,
    log: LogView,
    parked: str | None,
    node: JobView,
) -> PChannelView:
    state = position.state if position is not None else None
    channel = log.channels.get(name)
    tick = position.last_tick if position is not None else 0
    flushed = checkpoint.time_tick if checkpoint is not None else 0
    growing = (
        [segment for each in state.vchannels.values() for segment in each.growing.values()] if state is not None else []
    )
    return PChannelView(
        name=name,
        owner=owner(node),
        term=max(state.term if state is not None else 0, channel.term if channel is not None else 0),
        time_tick=str(tick),
        time=moment(tick),
        log_end=str(channel.description.end) if channel is not None else None,
        log_bytes=channel.description.bytes if channel is not None else None,
        wal_position=str(state.position) if state is not None else None,
        lag_seconds=channel.lag_seconds if channel is not None else None,
        messages=position.totals.messages if position is not None else 0,
        rejections=position.totals.rejections if position is not None else 0,
        flushed_tick=str(flushed),
        flushed_time=moment(flushed),
        flush_lag_seconds=flush_lag(tick, flushed),
        open_transactions=sum(1 for _ in state.open_txns()) if state is not None else 0,
        vchannels=len(state.vchannels) if state is not None else 0,
        growing_rows=sum(each.rows for each in growing),
        growing_bytes=sum(each.bytes for each in growing),
        parked=parked or (channel.parked if channel is not None else None),
    )


def flush_lag(tick: int, flushed: int) -> float:
    """Seconds between the WAL's last tick and the flusher's; a PChannel that was never flushed counts from its first look."""
    if tick <= flushed or not flushed:
        return 0.0
    return round((tick_physical_ms(tick) - tick_physical_ms(flushed)) / 1000, 3)


def judge(
    jobs: Sequence[JobView], channels: Sequence[PChannelView], *, log_server: bool
) -> tuple[State, str, list[str]]:
    """The state of the whole, why in a sentence, and every problem in a line of its own. The worst state wins."""
    problems = [_parked(each.name, each.parked) for each in channels if each.parked]
    problems += [f"{job.name}, {name}: {words}" for job in jobs for name, words in job.failures.items()]
    if not channels:
        return "empty", "Nothing was written yet: no PChannel is there.", problems
    parked = [each.name for each in channels if each.parked]
    if parked:
        return "parked", f"{_listed(parked)} cannot go on; a person has to look.", problems
    stopped = [job.name for job in jobs if job.state != "running"]
    behind = [each for each in channels if (each.lag_seconds or 0) > LAGGING_SECONDS]
    slow = [each for each in channels if each.flush_lag_seconds > FLUSH_LAGGING_SECONDS]
    problems += [f"{each.name}: the WAL is {each.lag_seconds:.0f} s behind the log" for each in behind]
    problems += [f"{each.name}: the tables are {each.flush_lag_seconds:.0f} s behind the WAL" for each in slow]
    if stopped:
        return "stopped", f"{_listed(stopped)} {'does' if len(stopped) == 1 else 'do'} not run.", problems
    if behind or slow:
        return "lagging", f"{_listed(sorted({each.name for each in (*behind, *slow)}))} is behind.", problems
    if not log_server:
        return "stopped", "The log's server does not run; the next producer starts it.", problems
    return "healthy", "Streaming node and flusher run, and nothing is behind.", problems


def _parked(name: str, words: str) -> str:
    """Why a PChannel is parked, with its name, which the node's own words begin with."""
    return words if words.startswith(name) else f"{name} is parked: {words}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
