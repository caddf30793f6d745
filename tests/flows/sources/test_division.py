"""Lanes that workers divide by leases: each is one worker's, few move, a dead or stopped worker loses its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.base.errors import LogUnavailable, MetaUnavailable
from millrace.flows.sources import division
from millrace.flows.sources.division import Division, LeasedMember, members
from millrace.meta.memory import MemoryStore

LANES = [("c", place) for place in range(4)]
ALL = frozenset(f"c-{place}" for place in range(4))


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Member(LeasedMember):
    """Whose lease is renewed when the test says so."""

    def beat(self) -> None:
        self._keeper.run_once()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    monkeypatch.setattr(division._Keeper, "start", lambda self: None)
    return Time()


@pytest.fixture
def store(clock: Time) -> Iterator[MemoryStore]:
    with MemoryStore(clock.monotonic) as made:
        yield made


def joined(store: MemoryStore, clock: Time, name: str) -> Member:
    made = Member(store, clock, flow="p", instance=name, seconds=10.0)
    made.follow(LANES)
    made.beat()
    return made


def test_a_member_has_all_and_shares_with_one_that_comes(store: MemoryStore, clock: Time) -> None:
    first = Member(store, clock, flow="p", instance="a", seconds=10.0)
    first.follow(LANES)
    assert first.poll() == Division(frozenset()), "nothing without a lease"
    first.beat()
    assert first.poll() == Division(ALL, came=ALL)
    assert first.poll() == Division(ALL)
    second = joined(store, clock, "b")
    theirs = second.poll().held
    assert len(theirs) == 2
    clock.now += 1
    assert first.poll() == Division(ALL - theirs, went=theirs)
    assert members(store, "p") == ("a", "b")
    second._key.release()
    clock.now += 1
    assert first.poll() == Division(ALL, came=theirs)


def test_a_member_that_is_dead_or_stopped_loses_its_lanes_by_its_own_clock_first(
    store: MemoryStore, clock: Time
) -> None:
    first, second = joined(store, clock, "a"), joined(store, clock, "b")
    mine, theirs = first.poll().held, second.poll().held
    for _ in range(4):
        clock.now += 2.4
        second.beat()  # the first one is stopped
    assert first.poll() == Division(frozenset(), went=mine), "before anybody else has them"
    assert second.poll().held == theirs
    clock.now += 1
    second.beat()
    assert second.poll() == Division(ALL, came=mine)
    first.beat()
    first.beat()
    again = first.poll()
    assert again.held == again.came == mine
    clock.now += 1
    second.beat()
    assert second.poll().went == mine


def test_lanes_that_were_lost_and_came_back_between_two_polls_are_said_to_have_gone(
    store: MemoryStore, clock: Time
) -> None:
    first = joined(store, clock, "a")
    first.poll()
    clock.now += 30
    first.beat()  # lets go of the lease that has ended
    first.beat()
    assert first.poll() == Division(ALL, came=ALL, went=ALL), "another may have claimed them meanwhile"


def test_a_member_whose_loop_stands_still_lets_go_and_one_whose_range_is_long_does_not(
    store: MemoryStore, clock: Time
) -> None:
    first = joined(store, clock, "a")
    first.poll()
    for _ in range(30):
        clock.now += 5
        first.beat()
    assert first.poll() == Division(ALL), "a range of 150 s"
    for _ in range(70):
        clock.now += 5
        first.beat()
    assert members(store, "p") == ()


def test_a_store_that_does_not_answer_changes_nothing_while_the_lease_holds(
    store: MemoryStore, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = joined(store, clock, "a")
    first.poll()

    def silent(*_: object, **__: object) -> None:
        raise MetaUnavailable("no answer")

    monkeypatch.setattr(store, "list", silent)
    clock.now += 5
    assert first.poll() == Division(ALL)
    clock.now += 5
    assert first.poll() == Division(frozenset(), went=ALL)
    with pytest.raises(LogUnavailable, match="no lease"):
        first.wait_joined(0.0)
