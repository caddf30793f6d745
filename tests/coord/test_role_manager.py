"""A node obeys the newest order of each role, in whatever order they come, and holds nothing without its session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from millrace.base.errors import AssignmentStale, LogUnavailable, OrderIgnored, OrderPending, SessionEnded
from millrace.coord.role_manager import HeldRole, RoleManager
from millrace.coord.session import APPEND, NODE_PREFIX, NodeInfo, Session
from millrace.meta.memory import MemoryStore
from millrace.meta.store import Delete


@dataclass
class Hand:
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Opens:
    """What really hosts, as a list of what it was told; `meanwhile` is what happens while it opens."""

    told: list[tuple[str, int]] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None
    closing: Callable[[], None] = lambda: None

    def open(self, pchannel: str, role: str, term: int, session: str) -> None:
        self.told.append(("open", term))
        self.meanwhile()

    def close(self, pchannel: str, role: str, term: int) -> None:
        self.told.append(("close", term))
        self.closing()


class Rig:
    def __init__(self) -> None:
        self.clock, self.opens = Hand(), Opens()
        self.store = MemoryStore(self.clock.monotonic)
        self.session = Session(self.store, self.clock, NodeInfo("n1", "here:1"), on_end=self._end, seconds=10.0)
        self.hosting = RoleManager(self.session, self.opens)
        self.session.step()
        self.name = self.session.name

    def _end(self) -> None:
        self.hosting.end()

    def assign(self, term: int) -> None:
        self.hosting.assign(self.name, "dml_0", APPEND, term)

    def remove(self, term: int) -> None:
        self.hosting.remove(self.name, "dml_0", APPEND, term)

    def holds(self) -> list[int]:
        return [held.term for held in self.hosting.held_roles()]


def test_what_was_open_in_an_older_term_is_closed_before_the_next_opens() -> None:
    rig = Rig()
    rig.assign(1)
    rig.assign(1)
    rig.assign(3)
    assert rig.opens.told == [("open", 1), ("close", 1), ("open", 3)]
    assert rig.hosting.held_roles() == [HeldRole("dml_0", APPEND, 3)]
    rig.hosting.check("dml_0", APPEND, 3)
    with pytest.raises(AssignmentStale):
        rig.hosting.check("dml_0", APPEND, 1)


def test_late_orders_have_no_effect() -> None:
    rig = Rig()
    rig.remove(2)
    for late in (1, 2):
        with pytest.raises(OrderIgnored):
            rig.assign(late)
    rig.assign(3)
    rig.remove(2)
    assert rig.holds() == [3]


def test_a_failed_opening_is_closed_and_can_be_tried_again() -> None:
    rig = Rig()

    def fails() -> None:
        raise LogUnavailable("not now")

    rig.opens.meanwhile = fails
    with pytest.raises(LogUnavailable):
        rig.assign(1)
    assert rig.holds() == []
    rig.opens.meanwhile = lambda: None
    rig.assign(1)
    assert rig.opens.told == [("open", 1), ("close", 1), ("open", 1)]


def test_an_order_that_comes_while_something_opens_is_carried_out_by_who_opens() -> None:
    rig = Rig()

    def removed_meanwhile() -> None:
        with pytest.raises(OrderPending):
            rig.remove(1)

    rig.opens.meanwhile = removed_meanwhile
    with pytest.raises(AssignmentStale):
        rig.assign(1)
    assert rig.opens.told == [("open", 1), ("close", 1)]
    rig.remove(1)


def test_nothing_is_held_without_the_session_and_another_session_takes_no_orders_of_the_old_one() -> None:
    rig = Rig()
    rig.assign(1)
    rig.clock.now += 9.4  # the store would keep the lease for 10
    rig.hosting.check("dml_0", APPEND, 1)
    rig.clock.now += 0.2
    with pytest.raises(AssignmentStale):
        rig.hosting.check("dml_0", APPEND, 1)
    assert rig.store.get(NODE_PREFIX + rig.name) is not None
    rig.session.step()
    rig.session.step()
    assert rig.session.name not in ("", rig.name)
    assert rig.opens.told == [("open", 1), ("close", 1)]
    with pytest.raises(SessionEnded):
        rig.assign(2)


def test_the_next_session_begins_when_what_the_last_one_had_is_closed() -> None:
    """A node that slept and woke.

    What its next session is given meanwhile would be closed with what the last one had.
    """
    rig = Rig()
    for pchannel in ("dml_0", "dml_1"):
        rig.hosting.assign(rig.name, pchannel, APPEND, 1)
    seen: list[str] = []

    def orders_come() -> None:
        seen.append(rig.session.name)
        for entry in rig.store.list(NODE_PREFIX).entries:
            with pytest.raises((SessionEnded, OrderPending)):
                rig.hosting.assign(entry.key.removeprefix(NODE_PREFIX), "dml_1", APPEND, 2)

    rig.opens.closing = orders_come
    rig.clock.now += 30.0
    rig.session.step()
    assert seen == ["", ""]
    rig.opens.closing = lambda: None
    rig.session.step()
    rig.hosting.assign(rig.session.name, "dml_1", APPEND, 2)
    assert rig.hosting.held_roles() == [HeldRole("dml_1", APPEND, 2)]


def test_a_session_that_was_taken_from_its_node_ends_when_it_renews() -> None:
    rig = Rig()
    rig.assign(1)
    rig.store.commit([Delete(NODE_PREFIX + rig.name)])
    rig.clock.now += 3.0
    assert rig.holds() == [1]
    rig.session.step()
    assert rig.holds() == []
    rig.session.close()
    assert rig.store.list(NODE_PREFIX).entries == ()
