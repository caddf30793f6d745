"""How much of each PChannel a node takes from its log into the tables, and how far behind it is: what it tells the coordinator.

Rates are means over the last WINDOW seconds. How far a PChannel is behind is seen at a commit, by the age of its tick; while a range
of it is at work that age grows, and where nothing is left to do it is what it was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from millrace.message.ids import tick_physical_ms

RATE_WINDOW_SECONDS: Final = 10.0
"""Seconds."""
_MOST: Final = 1_000
"""Commits of one PChannel that are kept: more in a window than any loop makes."""


@dataclass(frozen=True, slots=True)
class ChannelRate:
    """Of one PChannel."""

    rows_per_second: float = 0.0
    bytes_per_second: float = 0.0
    lag_seconds: float = 0.0


@dataclass(slots=True)
class _Channel:
    commits: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_MOST))
    """Moment, rows, bytes."""
    tick: int = 0
    lag: float = 0.0


class RateMeter:
    """Of the PChannels that a node has; its owner sees to it that one thread calls at a time."""

    def __init__(
        self, *, monotonic: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._channels: dict[str, _Channel] = {}

    def record_commit(self, pchannel: str, *, rows: int, bytes: int, tick: int) -> None:
        channel = self._channels.setdefault(pchannel, _Channel())
        channel.commits.append((self._monotonic(), rows, bytes))
        channel.tick = tick
        channel.lag = self._age(tick)

    def forget(self, pchannel: str) -> None:
        """It is this node's no more."""
        self._channels.pop(pchannel, None)

    def of(self, pchannel: str, *, running: bool) -> ChannelRate:
        """Now; `running`: whether a range of it is at work."""
        channel = self._channels.get(pchannel)
        if channel is None:
            return ChannelRate()
        since = self._monotonic() - RATE_WINDOW_SECONDS
        while channel.commits and channel.commits[0][0] < since:
            channel.commits.popleft()
        rows, size = sum(each[1] for each in channel.commits), sum(each[2] for each in channel.commits)
        lag = max(channel.lag, self._age(channel.tick)) if running else channel.lag
        return ChannelRate(round(rows / RATE_WINDOW_SECONDS, 1), round(size / RATE_WINDOW_SECONDS, 1), round(lag, 3))

    def _age(self, tick: int) -> float:
        return max(0.0, self._wall() - tick_physical_ms(tick) / 1000)
