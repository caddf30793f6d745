"""Assignments of PChannel roles to nodes, as clients and nodes follow them: versioned, and resumable from any version.

A caller reports a stale assignment and gets a newer one once there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.base.errors import RevisionCompacted


@dataclass(frozen=True, slots=True)
class Assignment:
    """The assignment of one role of a PChannel; `address` is "" while no node serves it."""

    pchannel: str
    role: str
    term: int
    session: str
    address: str


@dataclass(frozen=True, slots=True)
class AssignmentUpdate:
    """Assignments as of `version`: all of them (`whole`), or the changes since the requested version."""

    version: int
    whole: bool
    assignments: tuple[Assignment, ...]


class AssignmentSource(Protocol):
    def since(self, version: int) -> AssignmentUpdate:
        """Return the changes after `version`. Raises RevisionCompacted."""
        ...

    def all(self) -> AssignmentUpdate: ...


class AssignmentCache:
    """One client's copy of the assignments. :meth:`refresh` updates it; its version never decreases."""

    def __init__(self, source: AssignmentSource) -> None:
        self._source = source
        self.version = -1
        self._known: dict[tuple[str, str], Assignment] = {}
        self._stale: dict[tuple[str, str], int] = {}

    def refresh(self) -> None:
        """Fetch the changes. Raises the source's errors except RevisionCompacted."""
        try:
            update = self._source.all() if self.version < 0 else self._source.since(self.version)
        except RevisionCompacted:
            update = self._source.all()
        self._take(update)

    def _take(self, update: AssignmentUpdate) -> None:
        if update.version < self.version:
            return  # a late answer, overtaken by a newer one
        if update.whole:
            self._known = {}
        for each in update.assignments:
            self._known[each.pchannel, each.role] = each
        self.version = update.version

    def invalidate(self) -> None:
        """Fetch everything in the next refresh: what is known may be outdated without a change to report it."""
        self.version = -1

    def get(self, pchannel: str, role: str) -> Assignment | None:
        """Return the assignment of a role, or None if no node is known to serve it: wait for the next refresh."""
        found = self._known.get((pchannel, role))
        if found is None or not found.address or found.term <= self._stale.get((pchannel, role), 0):
            return None
        return found

    def mark_stale(self, assignment: Assignment) -> None:
        """Note that the node no longer serves that term: only a newer term counts from now on."""
        key = assignment.pchannel, assignment.role
        self._stale[key] = max(assignment.term, self._stale.get(key, 0))

    def known(self) -> Sequence[Assignment]:
        return [self._known[key] for key in sorted(self._known)]
