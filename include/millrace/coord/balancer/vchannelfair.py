"""The policy `vchannelfair`: spreads PChannels and VChannels evenly, and keeps PChannels of the same collections on one
node.

A node costs ``0.4 ((p - p̄) / p̄)² + 0.3 ((v - v̄) / v̄)² + 0.01 Σ (1 - affinity)`` over its p PChannels with v
VChannels and all pairs of them, as in Milvus (internal/streamingcoord/server/balancer/policy/vchannelfair). Affinity
is between 0 and 1 here: the share of collections that two PChannels have in common. A move is made if it lowers the
total cost by more than 0.01. Candidates are single moves and exchanges of two PChannels. All candidates between two
nodes are evaluated as one array: the change of the pair term is a sum over the pairs that share a collection, which
are few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np

from millrace.coord.balancer.policy import AssignmentView, ChannelView, PlannedMove

PCHANNEL_WEIGHT: Final = 0.4
VCHANNEL_WEIGHT: Final = 0.3
AFFINITY_WEIGHT: Final = 0.01
MIN_GAIN: Final = 0.01
"""Changes that gain less are not made."""
MAX_NODES_ALL_PAIRS: Final = 32
"""With more nodes than this, exchanges are searched only between the most and the least loaded nodes."""
_FEW: Final = 8
_EQUAL: Final = 1e-12
"""Costs that differ by less are equal."""


class _Found(NamedTuple):
    """A change that gains: channels, each with its old and its new node. It displaces `away` more channels than
    before.
    """

    gain: float
    away: int
    change: tuple[tuple[ChannelView, str, str], ...]


def affinity(one: ChannelView, other: ChannelView) -> float:
    return _share(one.collections, other.collections)


def _share(one: frozenset[int], other: frozenset[int]) -> float:
    both = len(one & other)
    return both / (len(one) + len(other) - both) if both else 0.0


@dataclass(slots=True)
class _Node:
    channels: dict[str, ChannelView] = field(default_factory=dict)
    vchannels: int = 0
    apart: float = 0.0
    """Sum of 1 - affinity over its pairs."""
    _kinds: Counter[frozenset[int]] = field(default_factory=Counter)
    """Number of its channels by exact set of collections."""
    _with: dict[int, set[frozenset[int]]] = field(default_factory=dict)
    """The sets that contain each collection."""

    def near(self, collections: frozenset[int]) -> float:
        """Return the sum of affinities of its channels to one with `collections`."""
        if len(collections) == 1:
            (only,) = collections
            sharing: Iterable[frozenset[int]] = self._with.get(only, ())
        else:
            sharing = {kind for each in collections for kind in self._with.get(each, ())}
        return sum(self._kinds[kind] * _share(kind, collections) for kind in sharing)

    def put(self, channel: ChannelView) -> None:
        self.apart += len(self.channels) - self.near(channel.collections)
        self.vchannels += channel.vchannels
        self.channels[channel.pchannel] = channel
        self._kinds[channel.collections] += 1
        for each in channel.collections:
            self._with.setdefault(each, set()).add(channel.collections)

    def take(self, channel: ChannelView) -> None:
        del self.channels[channel.pchannel]
        self.vchannels -= channel.vchannels
        self._kinds[channel.collections] -= 1
        if not self._kinds[channel.collections]:
            del self._kinds[channel.collections]
            for each in channel.collections:
                self._with[each].discard(channel.collections)
        self.apart -= len(self.channels) - self.near(channel.collections)


class Layout:
    """A tentative assignment and its cost; changed in place, one channel at a time."""

    def __init__(self, view: AssignmentView) -> None:
        self.nodes: dict[str, _Node] = {name: _Node() for name in sorted(view.nodes)}
        count = max(len(self.nodes), 1)
        # Not zero: the cost divides by it.
        self._mean_p = max(len(view.channels) / count, 1e-9)
        self._mean_v = max(sum(each.vchannels for each in view.channels) / count, 1e-9)

    def node_cost(self, p: int, v: Any, apart: Any) -> Any:
        """Return the cost of one node, or of several at once (arrays)."""
        p_off, v_off = (p - self._mean_p) / self._mean_p, (v - self._mean_v) / self._mean_v
        if self._mean_v <= 1e-9:
            v_off = 0.0
        return PCHANNEL_WEIGHT * p_off * p_off + VCHANNEL_WEIGHT * v_off * v_off + AFFINITY_WEIGHT * apart

    def cost_of(self, name: str) -> float:
        node = self.nodes[name]
        return float(self.node_cost(len(node.channels), node.vchannels, node.apart))

    def cost(self) -> float:
        return sum(map(self.cost_of, self.nodes))

    def put(self, channel: ChannelView, name: str) -> None:
        self.nodes[name].put(channel)

    def take(self, channel: ChannelView, name: str) -> None:
        self.nodes[name].take(channel)

    def added_cost(self, channel: ChannelView, name: str) -> float:
        """Return the additional cost of `channel` on node `name`."""
        node = self.nodes[name]
        apart = node.apart + len(node.channels) - node.near(channel.collections)
        cost = self.node_cost(len(node.channels) + 1, node.vchannels + channel.vchannels, apart)
        return float(cost) - self.cost_of(name)


class PlacementIndex:
    """Finds the cheapest node for channels without an owner. It evaluates one node for each load, not all nodes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._alike: dict[tuple[int, int], list[str]] = {}
        """Nodes by their numbers of PChannels and VChannels: a heap of the nodes with that load, and of some that had
        it before."""
        self._homes: dict[int, set[str]] = {}
        """The nodes with PChannels of each collection."""
        for name, node in layout.nodes.items():
            self._count(name)
            for channel in node.channels.values():
                self._at(channel, name)

    def cheapest_node(self, channel: ChannelView) -> str:
        """Return the cheapest node for `channel`.

        Nodes with equal load that share no collection with it cost the same; the first by name represents them. Nodes
        that share one are evaluated as well.
        """
        near = {name for collection in channel.collections for name in self._homes.get(collection, ())}
        for load, names in list(self._alike.items()):
            # Entries of a former load stay in the heap until they come up.
            while names and self._load(names[0]) != load:
                heappop(names)
            if names:
                near.add(names[0])
            else:
                del self._alike[load]
        # Rounded, then by name: the choice must not depend on the order of additions.
        return min(near, key=lambda name: (round(self._layout.added_cost(channel, name), 12), name))

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


def vchannel_fair(view: AssignmentView) -> list[PlannedMove]:
    """Return moves (millrace.coord.balancer.policy.Policy)."""
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
    moves: list[PlannedMove] = []
    # Large ones first: small ones then even out the remaining differences.
    largest_first = sorted(homeless, key=_size), sorted(leaving, key=_size)[: view.max_moves]
    places = PlacementIndex(layout) if homeless or leaving else None
    for cause, channels in zip(("place", "drain"), largest_first, strict=True):
        for channel in channels:
            assert places is not None
            to = places.cheapest_node(channel)
            places.put(channel, to)
            moves.append(PlannedMove(channel.pchannel, to, cause))
    if view.allow_rebalance and not moves:
        moves = _rebalance(view, layout)
    return moves


def _size(channel: ChannelView) -> tuple[int, str]:
    return -channel.vchannels, channel.pchannel


def _rebalance(view: AssignmentView, layout: Layout) -> list[PlannedMove]:
    home = {channel.pchannel: channel.owner for channel in view.channels}
    at = dict(home)
    away: set[str] = set()
    """Channels that are planned to leave their current owner."""
    known: dict[tuple[str, str], _Found | None] = {}
    """Best change by pair of nodes; valid until one of the two changes."""
    room = view.max_moves
    while True:
        best: _Found | None = None
        for pair in _pairs(layout):
            found = known.get(pair)
            if pair not in known or (found is not None and found.away > room):
                found = known[pair] = best_exchange(layout, *pair, home, away, room)
            if (
                found is not None
                and found.gain > MIN_GAIN + _EQUAL
                and (best is None or found.gain > best.gain + _EQUAL)
            ):
                best = found
        if best is None:
            return [PlannedMove(name, to, "balance") for name, to in at.items() if name in away and to is not None]
        touched: set[str] = set()
        for channel, source, to in best.change:
            layout.take(channel, source)
            layout.put(channel, to)
            at[channel.pchannel] = to
            (away.discard if to == home[channel.pchannel] else away.add)(channel.pchannel)
            touched |= {source, to}
        # A change that brings a channel back home frees a move, so pairs that were refused for lack of room are
        # evaluated again.
        before, room = room, view.max_moves - len(away)
        known = {} if room > before else {pair: each for pair, each in known.items() if not touched & set(pair)}


def _pairs(layout: Layout) -> Iterable[tuple[str, str]]:
    """Yield all pairs of nodes; with many nodes only pairs of the most and the least loaded ones."""
    names = sorted(
        layout.nodes, key=lambda name: (len(layout.nodes[name].channels), layout.nodes[name].vchannels, name)
    )
    return combinations(names if len(names) <= MAX_NODES_ALL_PAIRS else names[:_FEW] + names[-_FEW:], 2)


def best_exchange(
    layout: Layout, one: str, other: str, home: Mapping[str, str | None], away: set[str], room: int
) -> _Found | None:
    """Return the best change between two nodes: a single move or an exchange. It displaces at most `room` more
    channels.
    """
    here, there = layout.nodes[one], layout.nodes[other]
    # None comes first on each side: an exchange with None is a single move.
    leaving, coming = [None, *_movable(here)], [None, *_movable(there)]
    v_out, v_in = _vchannels(leaving)[:, None], _vchannels(coming)[None, :]
    out, into = _nearer(leaving, here, there)[:, None], _nearer(coming, there, here)[None, :]
    single_out, single_in = _is_one(leaving)[:, None], _is_one(coming)[None, :]
    p, q = len(here.channels), len(there.channels)
    moved = single_in - single_out
    pairs = p * (p - 1) / 2 + q * (q - 1) / 2
    # Number of pairs of both nodes, and their affinity. A leaving channel gains pairs with those on its new node, but
    # the two channels of an exchange are on different nodes before and after it.
    p_after, q_after = p + moved, q - moved
    pairs_after = p_after * (p_after - 1) / 2 + q_after * (q_after - 1) / 2
    nearer = out + into - 2 * _shares(leaving, coming)
    apart_less = pairs - pairs_after + nearer
    before = layout.cost_of(one) + layout.cost_of(other)
    apart = here.apart + there.apart - apart_less
    after = layout.node_cost(p_after, here.vchannels + v_in - v_out, apart) + layout.node_cost(
        q_after, there.vchannels + v_out - v_in, 0.0
    )
    gain = before - after
    steps = _steps(leaving, other, home, away)[:, None] + _steps(coming, one, home, away)[None, :]
    gain[steps > room] = -np.inf
    # None for None is no change.
    gain[0, 0] = -np.inf
    best = gain.max()
    if not np.isfinite(best):
        return None
    # The first of equal gains, independent of rounding.
    row, column = divmod(int(np.argmax(gain >= best - _EQUAL)), gain.shape[1])
    a, b = leaving[row], coming[column]
    change = [] if a is None else [(a, one, other)]
    return _Found(float(best), int(steps[row, column]), tuple(change if b is None else [*change, (b, other, one)]))


def _movable(node: _Node) -> list[ChannelView]:
    """Return one channel of each kind: channels with equal costs are interchangeable."""
    kinds: dict[tuple[int, frozenset[int]], ChannelView] = {}
    for channel in node.channels.values():
        if channel.movable:
            kinds.setdefault((channel.vchannels, channel.collections), channel)
    return list(kinds.values())


def _vchannels(channels: Sequence[ChannelView | None]) -> Any:
    return np.array([0 if each is None else each.vchannels for each in channels], np.float64)


def _is_one(channels: Sequence[ChannelView | None]) -> Any:
    return np.array([each is not None for each in channels], np.float64)


def _nearer(channels: Sequence[ChannelView | None], source: _Node, to: _Node) -> Any:
    """Return how much closer each channel is to those on its new node than to those on its old one."""
    return np.array(
        [
            0.0 if each is None else to.near(each.collections) - (source.near(each.collections) - _self(each))
            for each in channels
        ]
    )


def _self(channel: ChannelView) -> float:
    return 1.0 if channel.collections else 0.0


def _shares(ones: Sequence[ChannelView | None], others: Sequence[ChannelView | None]) -> Any:
    """Return the affinity of each pair."""
    found = np.zeros((len(ones), len(others)))
    having: dict[int, list[int]] = {}
    for column, other in enumerate(others):
        for collection in other.collections if other is not None else ():
            having.setdefault(collection, []).append(column)
    for row, one in enumerate(ones):
        if one is not None:
            for column in {each for collection in one.collections for each in having.get(collection, ())}:
                other = others[column]
                assert other is not None
                found[row, column] = affinity(one, other)
    return found


def _steps(channels: Sequence[ChannelView | None], to: str, home: Mapping[str, str | None], away: set[str]) -> Any:
    """Return how many more channels are displaced if each moves to node `to`."""

    def step(channel: ChannelView | None) -> int:
        if channel is None:
            return 0
        return (home[channel.pchannel] != to) - (channel.pchannel in away)

    return np.array([step(each) for each in channels])
