"""A model of the log with the chain's laws that ownership relies on.

Terms (law 5), repeats (law 8), rising ticks (law 2).

An entry is judged where it lands; of a broadcast's, a repeat is answered as the first one was, and what a later one of
the VChannel has passed is refused. One that is under way lands whoever dies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.sim.world import Answer, Broken, Network, Process, World

ROW, OPENING, BROADCAST = "row", "opening", "broadcast"


@dataclass
class Channel:
    """One PChannel's log: its entries, and what the chain knows behind the last of them."""

    entries: list[tuple[str, int, Any, bool]] = field(default_factory=list)
    """(kind, term, what, accepted)."""
    term: int = 0
    tick: int = 0
    ticks: dict[Any, int] = field(default_factory=dict)
    """By what is accepted once."""
    passed: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """By VChannel its newest broadcast, and what that came to."""


class Log:
    def __init__(self, world: World, network: Network, pchannels: list[str]) -> None:
        self._world = world
        self._network = network
        self.wall_offset = 0.0
        self.channels: dict[str, Channel] = {}
        self.committed: dict[str, int] = {}
        """How far the `wal` table is: what ingest commits is fenced by it."""
        self.table: dict[str, list[Any]] = {}
        for name in pchannels:
            self.add(name)

    def add(self, name: str) -> None:
        """Create the log of a PChannel."""
        self.channels[name], self.committed[name], self.table[name] = Channel(), 0, []

    def append(self, process: Process, pchannel: str, kind: str, term: int, what: Any) -> int | None:
        """The tick of an accepted entry (a repeat's: the first one's), None where it was rejected."""
        answer = Answer(self._world, process)
        slow = self._world.random.choice((1, 1, 1, 1, 40))
        self._world.later(self._network.latency() * slow, lambda: answer.give(self._land(pchannel, kind, term, what)))
        return answer.wait(30.0, lambda: Broken("the log never answered"))

    def _land(self, pchannel: str, kind: str, term: int, what: Any) -> int | None:
        channel = self.channels[pchannel]
        if kind == BROADCAST and (known := channel.passed.get(what[3], (0, None)))[0] >= what[1]:
            return known[1] if known[0] == what[1] else None
        if kind == OPENING:
            accepted = term > channel.term
            if accepted:
                channel.term = term
        else:
            accepted = not what[4] if kind == BROADCAST else term == channel.term
        if accepted and what in channel.ticks:
            return channel.ticks[what]
        channel.entries.append((kind, term, what, accepted))
        if kind == BROADCAST and not accepted:
            channel.passed[what[3]] = what[1], None
        if not accepted:
            return None
        tick = max(channel.tick + 1, int((self._world.now + self.wall_offset) * 1000) << 18)
        if tick <= channel.tick:
            raise Broken(f"the ticks of {pchannel} do not rise")
        channel.tick = channel.ticks[what] = tick
        if kind == BROADCAST:
            channel.passed[what[3]] = what[1], tick
        return tick

    def commit(self, pchannel: str, base: int, end: int) -> bool:
        """Take [base, end) into the table, if nobody was quicker."""
        if self.committed[pchannel] != base:
            return False
        self.committed[pchannel] = end
        entries = self.channels[pchannel].entries[base:end]
        self.table[pchannel] += [what for kind, _, what, accepted in entries if accepted and kind == ROW]
        return True
