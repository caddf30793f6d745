"""Consumer groups: members, the lanes that each has, positions, and how far they lag behind the ``wal`` table.

The log's server knows the members. While it does not run, the positions are read from where they are stored.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from millrace.base.errors import LogUnavailable, MillraceError
from millrace.base.lru_cache import LruCache
from millrace.base.settings import Settings
from millrace.client.consume.positions import lane_positions
from millrace.coord.consumer_positions import read_group_positions
from millrace.message.ids import split_channel, tick_physical_ms
from millrace.observe.log_probe import LogProbe
from millrace.observe.models import BaseView
from millrace.rpc import calls
from millrace.tables.wal.reader import WalSnapshot

MAX_FILES: Final = 20_000
"""Files of the ``wal`` table whose VChannels are remembered."""


class GroupLane(BaseView):
    """One lane of a group: a VChannel, or a PChannel for a consumer of PChannels."""

    lane: str
    position_tick: int | None
    """None if the group never moved there."""
    position_time: float | None = None
    holder: str
    """Member or other consumer that reads it, "" if none does."""
    lag_messages: int
    """Messages in the ``wal`` table after the position."""
    lag_seconds: float
    """Age of the oldest of them."""


class GroupMemberView(BaseView):
    """A consumer that divides the group's lanes with others."""

    member: str
    client: str
    """Host and process."""
    since: float
    lanes: list[str]
    wanted: int
    """Lanes that it reads together with the others."""
    reason: str
    """Reason that it has no lane; "" if it has one."""


class QueueConsumerView(BaseView):
    """A consumer of a work queue."""

    consumer: str
    client: str
    """Host and process."""
    since: float
    in_flight: int
    """Tasks that it has under a lease."""
    taken: int
    acknowledged: int


class QueueView(BaseView):
    """A work queue, as far as the log's server dispatches it now: tasks that it has read and that are not done."""

    collection: str
    order: str
    tasks: int
    ready: int
    """Number of them that no consumer has."""
    in_flight: int
    blocked: int
    """They wait for an earlier one of their key."""
    redelivered: int
    """Delivered more than once."""
    oldest_seconds: float
    """Age of the oldest."""
    full: int
    """VChannels that are not read further until tasks are done."""
    errors: list[str]
    """Reasons that VChannels are not read."""
    consumers: list[QueueConsumerView]


class GroupView(BaseView):
    """One consumer group."""

    group: str
    state: str
    """`active`: consumers run; `empty`: none does; `unknown`: the log's server does not run."""
    members: list[GroupMemberView]
    lanes: list[GroupLane]
    lag_messages: int
    lag_seconds: float
    mode: str = "stream"
    """`stream` or `queue`."""
    queue: QueueView | None = None
    """State of a work queue with consumers."""


class LaneLags:
    """Lags of lanes. Remembers what it read of each file of the ``wal`` table. Thread-safe."""

    def __init__(self) -> None:
        self._known: LruCache[str, Mapping[str, tuple[int, int]]] = LruCache(MAX_FILES)

    def of(self, wal: WalSnapshot | None, ticks: Mapping[str, int]) -> dict[str, tuple[int, float]]:
        """Return by lane the messages after its tick, and the age of the oldest in seconds."""
        if wal is None:
            return dict.fromkeys(ticks, (0, 0.0))
        by_pchannel: dict[str, dict[str, int]] = {}
        for lane, tick in ticks.items():
            by_pchannel.setdefault(split_channel(lane)[0], {})[lane] = tick
        found: dict[str, tuple[int, float]] = {}
        now = time.time()
        for pchannel, lanes in by_pchannel.items():
            for lane, (count, first) in wal.lags(pchannel, lanes, self._known).items():
                found[lane] = (count, max(0.0, now - tick_physical_ms(first) / 1000) if count else 0.0)
        return found


def group_views(settings: Settings, log: LogProbe, lags: LaneLags) -> list[GroupView]:
    """Return the groups, sorted. Raises what reading the positions raises if the log's server does not run."""
    running = True
    try:
        with log.client() as client:
            groups: list[dict[str, Any]] = client.call(calls.CONSUMER_GROUPS, {})["groups"]
    except LogUnavailable:
        running = False
        groups = [
            {"group": group, "positions": lane_positions(ticks), "claims": {}, "members": []}
            for group, ticks in read_group_positions(settings).items()
        ]
    wal = WalSnapshot.open(settings.wal_uri) if groups else None
    return [_view(each, lags.of(wal, each["positions"]), running=running) for each in groups]


def group_lags(settings: Settings, lags: LaneLags) -> dict[tuple[str, str], tuple[int, float]]:
    """Return messages and seconds of lag by (group, PChannel), for the metrics. Empty if positions are unavailable."""
    try:
        positions = read_group_positions(settings)
    except MillraceError:
        return {}
    wal = WalSnapshot.open(settings.wal_uri) if positions else None
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for group, ticks in positions.items():
        for lane, (count, seconds) in lags.of(wal, lane_positions(ticks)).items():
            key = (group, split_channel(lane)[0])
            before, oldest = found.get(key, (0, 0.0))
            found[key] = (before + count, max(oldest, seconds))
    return found


def _view(group: Mapping[str, Any], lags: Mapping[str, tuple[int, float]], *, running: bool) -> GroupView:
    positions, claims = group["positions"], group["claims"]
    lanes = [
        GroupLane(
            lane=lane,
            position_tick=positions.get(lane),
            holder=claims.get(lane, ""),
            lag_messages=lags.get(lane, (0, 0.0))[0],
            lag_seconds=round(lags.get(lane, (0, 0.0))[1], 3),
        )
        for lane in sorted({*positions, *claims})
    ]
    active = "active" if group["members"] or claims else "empty"
    return GroupView(
        group=group["group"],
        state=active if running else "unknown",
        members=[GroupMemberView(**each) for each in group["members"]],
        lanes=lanes,
        lag_messages=sum(each.lag_messages for each in lanes),
        lag_seconds=max((each.lag_seconds for each in lanes), default=0.0),
        mode=group.get("mode", "stream"),
        queue=None if group.get("queue") is None else _queue(group["queue"]),
    )


def _queue(group: Mapping[str, Any]) -> QueueView:
    lanes = group["lanes"].values()
    ready, in_flight, blocked, again = (
        sum(lane[what] for lane in lanes) for what in ("ready", "in_flight", "blocked", "redelivered")
    )
    oldest = min((lane["oldest_tick"] for lane in lanes if lane["oldest_tick"] is not None), default=None)
    age = 0.0 if oldest is None else max(0.0, time.time() - tick_physical_ms(oldest) / 1000)
    return QueueView(
        collection=group["collection"],
        order=group["order"],
        tasks=ready + in_flight + blocked,
        ready=ready,
        in_flight=in_flight,
        blocked=blocked,
        redelivered=again,
        oldest_seconds=round(age, 3),
        full=sum(lane["full"] for lane in lanes),
        errors=sorted({lane["error"] for lane in lanes if lane["error"]}),
        consumers=[QueueConsumerView(**each) for each in group["consumers"]],
    )
