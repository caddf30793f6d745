"""A node's side of assignment: which roles it holds, in which term; what it opens and closes on the coordinator's order.

Orders come late, twice and out of order. Of each role a node knows the newest term that it was told, and whether to have it or
to have let it go; what is older is ignored. One role is opened or closed by one thread at a time, and what was open in an older
term is closed before the next opens. What the node holds counts while its session does.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from millrace.base.errors import AssignmentStale, OrderIgnored, OrderPending
from millrace.coord.concurrency import RunAll, run_sequentially
from millrace.coord.session import Session


class RoleOpener(Protocol):
    """What really hosts a role."""

    def open(self, pchannel: str, role: str, term: int, session: str) -> None:
        """Returns when the role is at work in this term; what it raises, its order is answered with."""
        ...

    def close(self, pchannel: str, role: str, term: int) -> None:
        """Returns when nothing of the role is at work any more; called for what was opened, or failed to open."""
        ...


@dataclass(slots=True)
class _Slot:
    """One role: what is wanted, and what is. A term with False is one that was let go."""

    wanted: tuple[int, bool] = (0, False)
    session: str = ""
    """In which session it is wanted."""
    open: int = 0
    """The term that is open, 0 for none."""
    opened_in: str = ""
    busy: bool = False


@dataclass(frozen=True, slots=True)
class HeldRole:
    pchannel: str
    role: str
    term: int


class RoleManager:
    """What one node holds. Thread-safe; no lock is held while something opens or closes."""

    def __init__(self, session: Session, opener: RoleOpener, *, run_all: RunAll = run_sequentially) -> None:
        """`together`: how the roles are closed that a session had."""
        self._session = session
        self._opener = opener
        self._together = run_all
        self._lock = threading.Lock()
        self._slots: dict[tuple[str, str], _Slot] = {}

    def assign(self, session: str, pchannel: str, role: str, term: int) -> None:
        """Have the role in `term`: returns when it does. Raises OrderIgnored (a newer order came before), SessionEnded,
        OrderPending (ask again), and what its opening raises."""
        self._order(session, pchannel, role, (term, True))

    def remove(self, session: str, pchannel: str, role: str, term: int) -> None:
        """Let the role go, if it is held in `term` or an older one: returns when it is. Raises SessionEnded, OrderPending."""
        self._order(session, pchannel, role, (term, False))

    def _order(self, session: str, pchannel: str, role: str, order: tuple[int, bool]) -> None:
        term, wants = order
        with self._lock:
            self._session.check(session)
            slot = self._slots.setdefault((pchannel, role), _Slot())
            newest, wanted = slot.wanted
            if term < newest or (term == newest and wants and not wanted):
                if wants:
                    raise OrderIgnored(f"{pchannel} ({role}) was told of term {newest}, and {term} is older")
                if slot.open > term or slot.open == 0:
                    return  # what it is to let go of is closed
                raise OrderPending(f"{pchannel} ({role}) is at work on term {newest}: ask again")
            slot.wanted, slot.session = order, session
            if slot.busy:
                raise OrderPending(f"{pchannel} ({role}) is opening or closing: ask again")
            slot.busy = True
        self._settle(pchannel, role, slot)
        if wants:
            self.check(pchannel, role, term)

    def _settle(self, pchannel: str, role: str, slot: _Slot) -> None:
        """Have the role as it is wanted, by whoever made it busy; it is that no more when this returns or raises."""
        try:
            while True:
                with self._lock:
                    order, session = slot.wanted, slot.session
                    term, wants = order[0], order[1] and self._session.held(session)
                    stale = slot.open and (slot.open != term or not wants or slot.opened_in != session)
                    if not stale and (slot.open or not wants):
                        slot.busy = False
                        return
                if stale:
                    self._opener.close(pchannel, role, slot.open)
                    slot.open = 0
                    continue
                try:
                    self._opener.open(pchannel, role, term, session)
                except BaseException:
                    self._opener.close(pchannel, role, term)
                    raise
                slot.open, slot.opened_in = term, session
        except BaseException:
            slot.busy = False
            raise

    def check(self, pchannel: str, role: str, term: int) -> None:
        """Whether the node may act for the role in `term`, this moment. Raises AssignmentStale."""
        slot = self._slots.get((pchannel, role))
        if slot is None or slot.open != term or slot.wanted != (term, True) or not self._session.held(slot.opened_in):
            raise AssignmentStale(f"this node does not hold {pchannel} ({role}) in term {term}: ask who does")

    def held_roles(self) -> list[HeldRole]:
        """What the node holds now (collect status)."""
        return [
            HeldRole(pchannel, role, slot.open)
            for (pchannel, role), slot in sorted(self._slots.items())
            if slot.open and slot.wanted == (slot.open, True) and self._session.held(slot.opened_in)
        ]

    def end(self) -> None:
        """The session ended, and the next has not begun: everything is closed at the same time, or will be by whoever is opening
        it. What the next session was given meanwhile would be closed with it."""
        mine = []
        with self._lock:
            for (pchannel, role), slot in self._slots.items():
                slot.wanted = (slot.wanted[0], False)
                if not slot.busy:
                    slot.busy = True
                    mine.append(partial(self._settle, pchannel, role, slot))
        self._together(mine)
