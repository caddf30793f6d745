"""The policy `vchannelfair`: PChannels and VChannels evenly over the nodes, and PChannels of the same collections together.

A node costs ``0.4 ((p - p̄) / p̄)² + 0.3 ((v - v̄) / v̄)² + 0.01 Σ (1 - affinity)`` over its p PChannels with v VChannels and all
pairs of them, as in Milvus (internal/streamingcoord/server/balancer/policy/vchannelfair). Affinity is from 0 to 1 here: the
share of their collections that two PChannels have in common. A move is made where all nodes together cost less by more than
0.01; single moves and exchanges of two are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import combinations
from typing import Final

from millrace.coord.balancer.view import ChannelView, Move, View

PCHANNEL_WEIGHT: Final = 0.4
VCHANNEL_WEIGHT: Final = 0.3
AFFINITY_WEIGHT: Final = 0.01
TOLERANCE: Final = 0.01
"""A change that gains less is not made."""
WIDE: Final = 64
"""With more nodes than this, exchanges are looked for between the dearest and the cheapest of them alone."""
_FEW: Final = 8


def affinity(one: ChannelView, other: ChannelView) -> float:
    if not one.collections or not other.collections:
        return 0.0
    return len(one.collections & other.collections) / len(one.collections | other.collections)


@dataclass(slots=True)
class _Node:
    channels: dict[str, ChannelView] = field(default_factory=dict)
    vchannels: int = 0
    apart: float = 0.0
    """The sum over its pairs of 1 - affinity."""


class Layout:
    """Who has what, and what that costs; changed in place by one channel at a time."""

    def __init__(self, view: View) -> None:
        self.nodes: dict[str, _Node] = {name: _Node() for name in sorted(view.nodes)}
        count = max(len(self.nodes), 1)
        self._mean_p = max(len(view.channels) / count, 1e-9)
        self._mean_v = max(sum(each.vchannels for each in view.channels) / count, 1e-9)

    def node_cost(self, p: int, v: int, apart: float) -> float:
        p_off, v_off = (p - self._mean_p) / self._mean_p, (v - self._mean_v) / self._mean_v
        if self._mean_v <= 1e-9:
            v_off = 0.0
        return PCHANNEL_WEIGHT * p_off * p_off + VCHANNEL_WEIGHT * v_off * v_off + AFFINITY_WEIGHT * apart

    def cost_of(self, name: str) -> float:
        node = self.nodes[name]
        return self.node_cost(len(node.channels), node.vchannels, node.apart)

    def cost(self) -> float:
        return sum(map(self.cost_of, self.nodes))

    def put(self, channel: ChannelView, name: str) -> None:
        node = self.nodes[name]
        node.apart += self._apart(channel, node)
        node.vchannels += channel.vchannels
        node.channels[channel.pchannel] = channel

    def take(self, channel: ChannelView, name: str) -> None:
        node = self.nodes[name]
        del node.channels[channel.pchannel]
        node.vchannels -= channel.vchannels
        node.apart -= self._apart(channel, node)

    @staticmethod
    def _apart(channel: ChannelView, node: _Node) -> float:
        if not channel.collections:
            return float(len(node.channels))
        return sum(1 - affinity(channel, each) for each in node.channels.values())

    def dearer(self, channel: ChannelView, name: str) -> float:
        """What `name` costs more with `channel`."""
        node = self.nodes[name]
        apart = node.apart + self._apart(channel, node)
        return self.node_cost(len(node.channels) + 1, node.vchannels + channel.vchannels, apart) - self.cost_of(name)


class Places:
    """Where channels without a home cost least, on top of a layout: it looks at one node for each load, not at all."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._alike: dict[tuple[int, int], list[str]] = {}
        """By PChannels and VChannels a heap of the nodes that have so many, and of some that had when they were counted."""
        self._homes: dict[int, set[str]] = {}
        """By collection the nodes with PChannels of it."""
        for name, node in layout.nodes.items():
            self._count(name)
            for channel in node.channels.values():
                self._at(channel, name)

    def cheapest(self, channel: ChannelView) -> str:
        """Of nodes with as many PChannels and VChannels those that share no collection with `channel` cost the same: the first by name
        stands for them. Beside these all that share one are looked at."""
        near = {name for collection in channel.collections for name in self._homes.get(collection, ())}
        for load, names in list(self._alike.items()):
            while names and self._load(names[0]) != load:
                heappop(names)
            if names:
                near.add(names[0])
            else:
                del self._alike[load]
        return min(near, key=lambda name: (round(self._layout.dearer(channel, name), 12), name))

    def put(self, channel: ChannelView, name: str) -> None:
        self._layout.put(channel, name)
        self._count(name)
        self._at(channel, name)

    def _load(self, name: str) -> tuple[int, int]:
        node = self._layout.nodes[name]
        return len(node.channels), node.vchannels

    def _count(self, name: str) -> None:
        heappush(self._alike.setdefault(self._load(name), []), name)

    def _at(self, channel: ChannelView, name: str) -> None:
        for collection in channel.collections:
            self._homes.setdefault(collection, set()).add(name)


def vchannel_fair(view: View) -> list[Move]:
    """See millrace.coord.balancer.view.Policy."""
    if not view.nodes:
        return []
    layout = Layout(view)
    homeless: list[ChannelView] = []
    leaving: list[ChannelView] = []
    for channel in view.channels:
        if channel.owner in layout.nodes:
            layout.put(channel, channel.owner)
        else:
            (homeless if channel.owner is None else leaving).append(channel)
    moves: list[Move] = []
    largest_first = sorted(homeless, key=_size), sorted(leaving, key=_size)[: view.max_moves]
    places = Places(layout) if homeless or leaving else None
    for cause, channels in zip(("place", "drain"), largest_first, strict=True):
        for channel in channels:
            assert places is not None
            to = places.cheapest(channel)
            places.put(channel, to)
            moves.append(Move(channel.pchannel, to, cause))
    if view.allow_rebalance and not moves:
        moves = _rebalance(view, layout)
    return moves


def _size(channel: ChannelView) -> tuple[int, str]:
    return -channel.vchannels, channel.pchannel


def _rebalance(view: View, layout: Layout) -> list[Move]:
    home = {channel.pchannel: channel.owner for channel in view.channels}
    at = dict(home)
    away: set[str] = set()
    """Who is not at home any more."""
    while True:
        best: tuple[float, tuple[tuple[ChannelView, str, str], ...]] | None = None
        for change in _changes(layout):
            moved = {channel.pchannel: to for channel, _, to in change}
            if len(away - moved.keys()) + sum(to != home[name] for name, to in moved.items()) > view.max_moves:
                continue
            gain = _gain(layout, change)
            if gain > TOLERANCE and (best is None or gain > best[0] + 1e-12):
                best = gain, change
        if best is None:
            return [Move(name, to, "balance") for name, to in at.items() if name in away and to is not None]
        for channel, source, to in best[1]:
            layout.take(channel, source)
            layout.put(channel, to)
            at[channel.pchannel] = to
            (away.discard if to == home[channel.pchannel] else away.add)(channel.pchannel)


def _gain(layout: Layout, change: tuple[tuple[ChannelView, str, str], ...]) -> float:
    touched = {name for _, source, to in change for name in (source, to)}
    before = sum(map(layout.cost_of, touched))
    for channel, source, to in change:
        layout.take(channel, source)
        layout.put(channel, to)
    gain = before - sum(map(layout.cost_of, touched))
    for channel, source, to in reversed(change):
        layout.take(channel, to)
        layout.put(channel, source)
    return gain


def _changes(layout: Layout) -> Iterator[tuple[tuple[ChannelView, str, str], ...]]:
    """Single moves and exchanges: between all nodes, or where there are many between the dearest and the cheapest."""
    names = sorted(
        layout.nodes, key=lambda name: (len(layout.nodes[name].channels), layout.nodes[name].vchannels, name)
    )
    if len(names) > WIDE:
        names = names[:_FEW] + names[-_FEW:]
    for one, other in combinations(names, 2):
        here, there = _movable(layout, one), _movable(layout, other)
        yield from (((channel, one, other),) for channel in here)
        yield from (((channel, other, one),) for channel in there)
        yield from (((a, one, other), (b, other, one)) for a in here for b in there if _differ(a, b))


def _movable(layout: Layout, name: str) -> list[ChannelView]:
    """One of each kind: what is alike in all that costs is alike to move."""
    kinds: dict[tuple[int, frozenset[int]], ChannelView] = {}
    for channel in layout.nodes[name].channels.values():
        if channel.movable:
            kinds.setdefault((channel.vchannels, channel.collections), channel)
    return list(kinds.values())


def _differ(one: ChannelView, other: ChannelView) -> bool:
    return one.vchannels != other.vchannels or one.collections != other.collections
