"""The channels that this node owns for ingest, with their rates: opened and closed on order, checked before each
commit.

A released PChannel is no longer planned. A range in progress gets a moment to be committed; after that it is dropped,
and the next owner runs it again. A commit in progress is waited for. So when :meth:`OwnedChannels.close` returns,
nothing of the PChannel is in progress here. After the node's session has ended nothing may be committed.

Rates are means over the last RATE_WINDOW_SECONDS. The lag of a PChannel is the age of its tick at a commit; while a
range is in progress the lag grows with that age, and without work it keeps its value.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from millrace.message.ids import tick_physical_ms
from millrace.node.range_loop.ownership import write_assigned

_POLL = 0.05


class OwnedChannels:
    """Implements Opener (millrace.coord) and ChannelOwnership (millrace.node.range_loop.ownership)."""

    def __init__(
        self,
        plan: Path | Callable[[Iterable[str]], None],
        *,
        held: Callable[[str], bool],
        drain_seconds: float,
        changed: threading.Condition | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own no channel yet.

        `plan`: the file for the plannable channels, or a function that receives them. `held` returns whether a session
        is valid.
        `drain_seconds`: how long a close waits for a range in progress. A simulation passes its own `changed` and
        clock.
        """
        self._plan = partial(write_assigned, plan) if isinstance(plan, Path) else plan
        self._held = held
        self._drain_seconds = drain_seconds
        self._changed = changed or threading.Condition()
        self._monotonic = monotonic
        self._open: dict[str, str] = {}
        """Session under which each PChannel is held."""
        self._planned: set[str] = set()
        self._running = Counter[str]()
        self._rates = RateMeter()
        self._committing = Counter[str]()
        self._write()

    def open(self, pchannel: str, role: str, term: int, session: str) -> None:
        with self._changed:
            self._open[pchannel] = session
            self._planned.add(pchannel)
            self._write()

    def close(self, pchannel: str, role: str, term: int) -> None:
        with self._changed:
            self._planned.discard(pchannel)
            self._write()
            end = self._monotonic() + self._drain_seconds
            while self._running[pchannel] and self._may(pchannel) and self._monotonic() < end:
                self._changed.wait(_POLL)
            self._open.pop(pchannel, None)
            self._rates.forget(pchannel)
            while self._committing[pchannel]:
                self._changed.wait(_POLL)

    @contextmanager
    def running(self, channels: AbstractSet[str], /) -> Iterator[None]:
        ours = frozenset(channels)
        with self._changed:
            self._running.update(ours)
        try:
            yield
        finally:
            with self._changed:
                self._running.subtract(ours)
                self._changed.notify_all()

    @contextmanager
    def committing(self, channels: AbstractSet[str], /) -> Iterator[AbstractSet[str]]:
        with self._changed:
            mine = frozenset(filter(self._may, channels))
            self._committing.update(mine)
        try:
            yield mine
        finally:
            with self._changed:
                self._committing.subtract(mine)
                self._changed.notify_all()

    def holds(self, channel: str, /) -> bool:
        with self._changed:
            return self._may(channel)

    def record_commit(self, channel: str, /, *, rows: int, bytes: int, tick: int) -> None:
        with self._changed:
            if channel in self._open:
                self._rates.record_commit(channel, rows=rows, bytes=bytes, tick=tick)

    def rates(self) -> dict[str, ChannelRate]:
        """Return the current rates of the open channels."""
        with self._changed:
            return {name: self._rates.of(name, running=self._running[name] > 0) for name in sorted(self._open)}

    def _may(self, pchannel: str) -> bool:
        session = self._open.get(pchannel)
        return session is not None and self._held(session)

    def _write(self) -> None:
        self._plan(self._planned)


RATE_WINDOW_SECONDS: Final = 10.0
"""Window of the means."""
_MOST: Final = 1_000
"""Maximum commits of one PChannel in the window: more than any loop makes."""


@dataclass(frozen=True, slots=True)
class ChannelRate:
    """Rates of one PChannel. The fields are part of the wire format."""

    rows_per_second: float = 0.0
    bytes_per_second: float = 0.0
    lag_seconds: float = 0.0


@dataclass(slots=True)
class _Channel:
    commits: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=_MOST))
    """Time, rows and bytes of each commit."""
    tick: int = 0
    lag: float = 0.0


class RateMeter:
    """Rates of a node's PChannels. The owner makes sure that one thread calls at a time."""

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
        """Forget a PChannel that this node no longer owns."""
        self._channels.pop(pchannel, None)

    def of(self, pchannel: str, *, running: bool) -> ChannelRate:
        """Return the current rate; `running`: whether a range of the PChannel is in progress."""
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
