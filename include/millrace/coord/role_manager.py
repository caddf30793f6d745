"""A node's side of assignment: the roles that it holds, each in a term, opened and closed on the coordinator's orders.

Orders can arrive late, twice and out of order. For each role the node keeps the newest term that was ordered, and
whether to hold or release the role in it; older orders are ignored. One thread at a time opens or closes a role. A
role that is open in an older term is closed before it opens in the next. Roles count as held only while the node's
session is valid.
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
    """Hosts the roles."""

    def open(self, pchannel: str, role: str, term: int, session: str) -> None:
        """Return when the role works in this term. An error is the answer to the order."""
        ...

    def close(self, pchannel: str, role: str, term: int) -> None:
        """Return when the role has stopped. Called after a successful or a failed open."""
        ...


@dataclass(slots=True)
class _Slot:
    """One role: its wanted and its actual state. A wanted term with False is released."""

    wanted: tuple[int, bool] = (0, False)
    session: str = ""
    """Session in which the role is wanted."""
    open: int = 0
    """Term in which the role is open, 0 if it is closed."""
    opened_in: str = ""
    busy: bool = False


@dataclass(frozen=True, slots=True)
class HeldRole:
    pchannel: str
    role: str
    term: int


class RoleManager:
    """The roles of one node. Thread-safe. No lock is held while a role opens or closes."""

    def __init__(self, session: Session, opener: RoleOpener, *, run_all: RunAll = run_sequentially) -> None:
        """`run_all` runs the closing of all roles of an ended session."""
        self._session = session
        self._opener = opener
        self._run_all = run_all
        self._lock = threading.Lock()
        self._slots: dict[tuple[str, str], _Slot] = {}

    def assign(self, session: str, pchannel: str, role: str, term: int) -> None:
        """Hold the role in `term`; return when it is open.

        Raises OrderIgnored (a newer order came before), SessionEnded, OrderPending (retry), and what opening raises.
        """
        self._order(session, pchannel, role, (term, True))

    def remove(self, session: str, pchannel: str, role: str, term: int) -> None:
        """Release the role if it is held in `term` or an older one; return when it is closed.

        Raises SessionEnded, OrderPending (retry).
        """
        self._order(session, pchannel, role, (term, False))

    def _order(self, session: str, pchannel: str, role: str, order: tuple[int, bool]) -> None:
        term, wants = order
        with self._lock:
            self._session.check(session)
            slot = self._slots.setdefault((pchannel, role), _Slot())
            newest, wanted = slot.wanted
            if term < newest or (term == newest and wants and not wanted):
                if wants:
                    raise OrderIgnored(
                        f"{pchannel} ({role}) has an order for term {newest}, which is newer than {term}"
                    )
                if slot.open > term or slot.open == 0:
                    return  # the term to release is already closed
                raise OrderPending(f"{pchannel} ({role}) is processing an order for term {newest}: retry")
            slot.wanted, slot.session = order, session
            if slot.busy:
                raise OrderPending(f"{pchannel} ({role}) is opening or closing: retry")
            slot.busy = True
        self._settle(pchannel, role, slot)
        if wants:
            self.check(pchannel, role, term)

    def _settle(self, pchannel: str, role: str, slot: _Slot) -> None:
        """Bring the role to its wanted state. The caller marked it busy; it is no longer busy when this returns or
        raises.
        """
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
        """Raise AssignmentStale unless the node may act for the role in `term` at this moment."""
        if self.held_term(pchannel, role) != term:
            raise AssignmentStale(
                f"this node does not hold {pchannel} ({role}) in term {term}: read the assignments again"
            )

    def held_term(self, pchannel: str, role: str) -> int:
        """Return the term in which the node holds a role now; 0 if it does not."""
        slot = self._slots.get((pchannel, role))
        if slot is None or slot.wanted != (slot.open, True) or not self._session.held(slot.opened_in):
            return 0
        return slot.open

    def held_roles(self) -> list[HeldRole]:
        """Return the roles that the node holds now, by PChannel."""
        return [
            HeldRole(pchannel, role, term)
            for pchannel, role in sorted(self._slots)
            if (term := self.held_term(pchannel, role))
        ]

    def end(self) -> None:
        """Close all roles after the session ended and before the next one begins.

        Roles of the next session must not be assigned yet: they would be closed as well.
        """
        mine = []
        with self._lock:
            for (pchannel, role), slot in self._slots.items():
                slot.wanted = (slot.wanted[0], False)
                if not slot.busy:
                    slot.busy = True
                    mine.append(partial(self._settle, pchannel, role, slot))
        self._run_all(mine)
