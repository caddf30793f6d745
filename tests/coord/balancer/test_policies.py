"""Policies by name, and what a package's policy may do: whatever it answers, every role finds a node that is there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.coord.balancer.policies import GROUP, NamedPolicy, find_policy, pchannel_count, policy_of
from millrace.coord.balancer.policy import AssignmentView, ChannelView, PlannedMove
from millrace.coord.balancer.vchannelfair import vchannel_fair
from tests.docs.pages import python_blocks
from tests.docs.test_examples import run

NODES = ("n1@1", "n2@2", "n3@3")
OWNERS = st.sampled_from([None, "gone@9", *NODES])


@st.composite
def views(draw: st.DrawFn) -> AssignmentView:
    owners = draw(st.lists(OWNERS, max_size=9))
    channels = tuple(
        ChannelView(f"dml_{number}", owner, draw(st.integers(0, 3)), movable=draw(st.booleans()))
        for number, owner in enumerate(owners)
    )
    nodes = tuple(draw(st.lists(st.sampled_from(NODES), unique=True, max_size=3)))
    return AssignmentView(nodes, channels, draw(st.booleans()), draw(st.integers(1, 4)))


def made(view: AssignmentView, moves: list[PlannedMove]) -> AssignmentView:
    to = {move.pchannel: move.to for move in moves}
    return replace(
        view, channels=tuple(replace(each, owner=to.get(each.pchannel, each.owner)) for each in view.channels)
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Registers an object as another package's policy."""

    def register(found: object) -> None:
        point = SimpleNamespace(name="mine", value="package:MINE", load=lambda: found)
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point] if group == GROUP else [])

    return register


def test_a_policy_is_chosen_by_the_setting(registered: Callable[[object], None]) -> None:
    assert policy_of(Settings()) is vchannel_fair
    assert policy_of(Settings(balance_policy="pchannelcount")) is pchannel_count
    with pytest.raises(InvalidSettings, match="known are pchannelcount, vchannelfair"):
        find_policy("random")
    registered(NamedPolicy("mine", lambda view: [PlannedMove("dml_0", "n2@2", "place")]))
    view = AssignmentView(NODES, (ChannelView("dml_0", None),))
    assert find_policy("mine")(view) == [PlannedMove("dml_0", "n2@2", "place")]
    with pytest.raises(InvalidSettings, match="known are mine, pchannelcount, vchannelfair"):
        find_policy("random")
    registered("no policy")
    with pytest.raises(InvalidSettings, match="NamedPolicy"):
        find_policy("mine")


@given(views())
def test_the_count_of_pchannels_is_evened_out_and_then_rests(view: AssignmentView) -> None:
    moves = pchannel_count(view)
    assert moves == pchannel_count(view), "a pure function"
    homeless = [each.pchannel for each in view.channels if each.owner is None]
    assert all(move.to in view.nodes for move in moves)
    assert len([move for move in moves if move.pchannel not in homeless]) <= view.max_moves
    if not view.nodes:
        assert moves == []
        return
    assert {move.pchannel for move in moves} >= set(homeless)
    for _ in range(20):
        view = made(view, pchannel_count(view))
    assert all(each.owner in view.nodes for each in view.channels)
    assert pchannel_count(view) == [], "at rest"
    counts = Counter(dict.fromkeys(view.nodes, 0) | Counter(each.owner for each in view.channels))
    stuck = {each.owner for each in view.channels if not each.movable}
    if view.allow_rebalance and not stuck:
        assert max(counts.values()) - min(counts.values()) <= 1


ANSWERS = st.lists(
    st.one_of(
        st.builds(
            PlannedMove,
            st.sampled_from([f"dml_{number}" for number in range(9)] + ["unknown"]),
            st.sampled_from([*NODES, "gone@9", ""]),
            st.just("mine"),
        ),
        st.just("no move"),
    ),
    max_size=6,
)


@given(views(), st.one_of(ANSWERS, st.just(None), st.just(ZeroDivisionError("mine"))))
def test_whatever_a_packages_policy_answers_every_role_is_placed_on_a_node_that_is_there(
    view: AssignmentView, answer: object
) -> None:
    def mine(view: AssignmentView) -> list[PlannedMove]:
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    with pytest.MonkeyPatch.context() as patch:
        point = SimpleNamespace(name="mine", value="p:M", load=lambda: NamedPolicy("mine", mine))
        patch.setattr("importlib.metadata.entry_points", lambda group: [point])
        moves = find_policy("mine")(view)
    homeless = {each.pchannel for each in view.channels if each.owner is None}
    assert all(move.to in view.nodes for move in moves)
    assert len({move.pchannel for move in moves}) == len(moves)
    assert len([move for move in moves if move.pchannel not in homeless]) <= view.max_moves
    if view.nodes:
        assert {move.pchannel for move in moves} >= homeless


def test_a_role_that_may_not_move_now_stays_whatever_a_packages_policy_answers(
    registered: Callable[[object], None],
) -> None:
    """A policy that begins each handover anew in each round would keep the roles from opening."""

    def everything(view: AssignmentView) -> list[PlannedMove]:
        return [PlannedMove(each.pchannel, "n2@2", "mine") for each in view.channels]

    registered(NamedPolicy("mine", everything))
    mine = find_policy("mine")
    moved = ChannelView("dml_0", "n1@1", movable=False)
    lost = ChannelView("dml_1", "gone@9", movable=False)
    free = ChannelView("dml_2", "n1@1")
    homeless = ChannelView("dml_3", None)
    view = AssignmentView(NODES, (moved, lost, free, homeless))
    assert [move.pchannel for move in mine(view)] == ["dml_1", "dml_2", "dml_3"]
    frozen = replace(view, allow_rebalance=False)
    assert [move.pchannel for move in mine(frozen)] == ["dml_1", "dml_3"]


@pytest.mark.parametrize("cause", [None, "x" * 65])
def test_a_cause_that_a_record_cannot_hold_is_not_used(registered: Callable[[object], None], cause: object) -> None:
    registered(NamedPolicy("mine", lambda view: [PlannedMove("dml_0", "n3@3", cause)]))  # type: ignore[arg-type]
    view = AssignmentView(NODES, (ChannelView("dml_0", None),))
    assert find_policy("mine")(view) == vchannel_fair(view)


def test_a_policy_that_does_not_return_costs_a_round_and_one_thread(
    registered: Callable[[object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.coord.balancer.policies.POLICY_SECONDS", 0.05)
    gate = threading.Event()
    calls: list[AssignmentView] = []

    def hanging(view: AssignmentView) -> list[PlannedMove]:
        calls.append(view)
        gate.wait(60)
        return []

    registered(NamedPolicy("mine", hanging))
    mine = find_policy("mine")
    view = AssignmentView(NODES, (ChannelView("dml_0", None),))
    try:
        for _ in range(5):
            assert mine(view) == vchannel_fair(view)
        assert len(calls) == 1
    finally:
        gate.set()


def test_a_packages_policy_that_leaves_roles_without_an_owner_gets_them_placed(
    registered: Callable[[object], None],
) -> None:
    registered(NamedPolicy("mine", lambda view: [PlannedMove("dml_1", "n1@1", "mine")]))
    view = AssignmentView(NODES, tuple(ChannelView(f"dml_{number}", None) for number in range(3)))
    moves = {move.pchannel: move.to for move in find_policy("mine")(view)}
    assert moves.keys() == {"dml_0", "dml_1", "dml_2"}
    assert moves["dml_1"] == "n1@1"
    assert set(moves.values()) == set(NODES)


def test_the_policy_on_the_page_is_one(registered: Callable[[object], None]) -> None:
    [block] = python_blocks("docs/coordinator.md")
    names: dict[str, object] = {}
    run(block.text, names)
    registered(names["MINE"])
    view = AssignmentView(NODES, (ChannelView("dml_0", None), ChannelView("dml_1", "n2@2")))
    assert find_policy("mine")(view) == [PlannedMove("dml_0", "n1@1", "place")]
