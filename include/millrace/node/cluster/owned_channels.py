"""What this node owns of the role ingest: opened and closed on order, asked before each commit.

A PChannel that is let go is planned no more; a range of it that is at work gets a moment to be committed, and is left out behind
that: the next owner makes it again. What is being committed is waited for. So nothing of a PChannel is at work here when
:meth:`OwnedChannels.close` returns. Where the node's session has ended nothing may be committed any more, whoever knows of it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from millrace.node.cluster.rates import ChannelRate, RateMeter
from millrace.node.range_loop.ownership import write_assigned

_POLL = 0.05


class OwnedChannels:
    """The protocols Opener (millrace.coord.role_manager) and Owning (millrace.node.range_loop.ownership)."""

    def __init__(
        self,
        plan: Path | Callable[[Iterable[str]], None],
        *,
        held: Callable[[str], bool],
        drain_seconds: float,
        changed: threading.Condition | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`plan`: the file of what may be planned, or who is told; `held`: whether a session may be relied on; `drain_seconds`: how long
        a range that is at work is waited for. A simulation gives what its processes wait by (`changed`), and their clock."""
        self._plan = partial(write_assigned, plan) if isinstance(plan, Path) else plan
        self._held = held
        self._drain_seconds = drain_seconds
        self._changed = changed or threading.Condition()
        self._monotonic = monotonic
        self._open: dict[str, str] = {}
        """By PChannel the session that it is held in."""
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
        """How what is open goes, now."""
        with self._changed:
            return {name: self._rates.of(name, running=self._running[name] > 0) for name in sorted(self._open)}

    def _may(self, pchannel: str) -> bool:
        session = self._open.get(pchannel)
        return session is not None and self._held(session)

    def _write(self) -> None:
        self._plan(self._planned)
