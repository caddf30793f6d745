"""The policy `vchannelfair`: laws over views that Hypothesis draws, and the optimum that brute force finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.coord.balancer.policy import AssignmentView, ChannelView
from millrace.coord.balancer.vchannelfair import (
    MIN_GAIN,
    Layout,
    PlacementIndex,
    affinity,
    best_exchange,
    vchannel_fair,
)
from tests.laws.profile import examples

NODES = ["a@1", "b@2", "c@3", "d@4"]


@st.composite
def views(draw: st.DrawFn, *, most: int = 10, nodes: int = 4) -> AssignmentView:
    there = tuple(draw(st.lists(st.sampled_from(NODES[:nodes]), min_size=1, unique=True)))
    owners = st.sampled_from([None, "gone@9", *there])
    channels = tuple(
        ChannelView(
            f"dml_{number}",
            draw(owners),
            draw(st.integers(0, 5)),
            draw(st.frozensets(st.integers(1, 3), max_size=2)),
            draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, most)))
    )
    return AssignmentView(there, channels, draw(st.booleans()), draw(st.integers(1, 3)))


def moved(view: AssignmentView) -> AssignmentView:
    to = {move.pchannel: move.to for move in vchannel_fair(view)}
    return replace(
        view, channels=tuple(replace(each, owner=to.get(each.pchannel, each.owner)) for each in view.channels)
    )


def settled(view: AssignmentView) -> AssignmentView:
    for _ in range(100):
        after = moved(view)
        if after == view:
            return view
        view = after
    raise AssertionError(f"does not converge: {view}")


def cost(view: AssignmentView) -> float:
    layout = Layout(view)
    for channel in view.channels:
        assert channel.owner is not None
        layout.put(channel, channel.owner)
    return layout.cost()


@examples(200)
@given(views())
def test_it_converges_with_everything_at_a_node_that_lives(view: AssignmentView) -> None:
    after = settled(view)
    assert all(channel.owner in view.nodes for channel in after.channels)


@examples(200)
@given(views())
def test_moves_are_few_and_for_a_reason(view: AssignmentView) -> None:
    moves = vchannel_fair(view)
    causes = Counter(move.cause for move in moves)
    homeless = [each.pchannel for each in view.channels if each.owner is None]
    by_name = {each.pchannel: each for each in view.channels}
    assert sorted(move.pchannel for move in moves if move.cause == "place") == sorted(homeless)
    assert max(causes["drain"], causes["balance"]) <= view.max_moves
    if causes["balance"]:
        assert view.allow_rebalance
        assert cost(moved(view)) < cost(view) - MIN_GAIN
        assert all(by_name[move.pchannel].movable for move in moves)
        assert all(by_name[move.pchannel].owner != move.to for move in moves)


@examples(100)
@given(views())
def test_it_is_a_function_of_the_view_in_whatever_order_nodes_are_named(view: AssignmentView) -> None:
    assert vchannel_fair(view) == vchannel_fair(replace(view, nodes=view.nodes[::-1]))


@examples(60)
@given(views(most=6, nodes=3))
def test_it_ends_near_the_optimum_that_brute_force_finds(view: AssignmentView) -> None:
    free = replace(
        view,
        allow_rebalance=True,
        max_moves=3,
        channels=tuple(replace(each, movable=True) for each in view.channels),
    )
    after = settled(free)
    layouts = product(free.nodes, repeat=len(free.channels))
    best = min(
        cost(replace(free, channels=tuple(replace(each, owner=to) for each, to in zip(free.channels, at, strict=True))))
        for at in layouts
    )
    assert cost(after) <= best * 1.3 + 0.1


def test_channels_that_share_collections_come_together_where_the_load_is_the_same() -> None:
    one, two = frozenset({1}), frozenset({2})
    channels = (
        ChannelView("p0", "a@1", 1, one),
        ChannelView("p1", "a@1", 1, two),
        ChannelView("p2", "b@2", 1, one),
        ChannelView("p3", "b@2", 1, two),
    )
    after = settled(AssignmentView(("a@1", "b@2"), channels))
    at = {each.pchannel: each.owner for each in after.channels}
    assert (at["p0"], at["p1"]) == (at["p2"], at["p3"])
    assert affinity(channels[0], channels[2]) == 1.0
    assert affinity(ChannelView("x", None), channels[0]) == 0.0


@examples(200)
@given(views(most=14))
def test_the_cheapest_place_is_that_of_all_nodes_though_few_are_looked_at(view: AssignmentView) -> None:
    layout = Layout(view)
    homeless = [channel for channel in view.channels if channel.owner not in layout.nodes]
    for channel in view.channels:
        if channel.owner in layout.nodes:
            layout.put(channel, channel.owner)
    places = PlacementIndex(layout)
    for channel in homeless:
        best = min(layout.nodes, key=lambda name: (round(layout.added_cost(channel, name), 12), name))
        assert places.cheapest_node(channel) == best
        places.put(channel, best)


@examples(200)
@given(views(most=12, nodes=2), st.integers(0, 2))
def test_between_two_nodes_the_best_change_that_is_allowed_is_found_and_gains_what_it_says(
    view: AssignmentView, room: int
) -> None:
    one, other = NODES[:2]
    there = [replace(channel, owner=channel.owner if channel.owner == one else other) for channel in view.channels]
    home = {channel.pchannel: channel.owner for channel in there}
    layout = Layout(AssignmentView((one, other), tuple(there)))
    for channel in there:
        layout.put(channel, str(channel.owner))

    def after(places: tuple[int, ...]) -> float:
        changed = list(there)
        for place in places:
            changed[place] = replace(there[place], owner=other if there[place].owner == one else one)
        return cost(AssignmentView((one, other), tuple(changed)))

    movable = [place for place, channel in enumerate(there) if channel.movable]
    changes = [(place,) for place in movable]
    changes += [pair for pair in combinations(movable, 2) if there[pair[0]].owner != there[pair[1]].owner]
    best = min((after(change) for change in changes if len(change) <= room), default=None)
    found = best_exchange(layout, one, other, home, set(), room)
    if best is None or found is None:
        assert best is None
        assert found is None
        return
    names = [channel.pchannel for channel in there]
    assert layout.cost() - found.gain == pytest.approx(best)
    assert after(tuple(names.index(channel.pchannel) for channel, _, _ in found.change)) == pytest.approx(best)
    assert all(home[channel.pchannel] == source != to for channel, source, to in found.change)


def test_without_nodes_nothing_moves() -> None:
    assert vchannel_fair(AssignmentView((), (ChannelView("p0", None),))) == []


def test_many_channels_are_placed_and_evened_out_in_good_time() -> None:
    nodes = tuple(f"n{number}@{number}" for number in range(100))
    channels = tuple(ChannelView(f"dml_{number}", nodes[number % 90], 2) for number in range(1_000))
    view = AssignmentView(nodes, channels, max_moves=3)
    moves = vchannel_fair(view)
    assert len(moves) == 3
    assert all(move.to in nodes[90:] for move in moves)
