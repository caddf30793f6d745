"""Who serves which role of which PChannel, as clients and nodes follow it: versioned, and resumable from any version.

A caller whose assignment turned out stale says so, and gets a newer one when there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.base.errors import RevisionCompacted


@dataclass(frozen=True, slots=True)
class Assignment:
    """A role of a PChannel; `address` is "" while nobody serves it."""

    pchannel: str
    role: str
    term: int
    session: str
    address: str


@dataclass(frozen=True, slots=True)
class AssignmentUpdate:
    """What is so as of `version`: everything (`whole`), or what changed since the version that was asked for."""

    version: int
    whole: bool
    assignments: tuple[Assignment, ...]


class AssignmentSource(Protocol):
    def since(self, version: int) -> AssignmentUpdate:
        """What changed behind `version`. Raises RevisionCompacted."""
        ...

    def all(self) -> AssignmentUpdate: ...


class AssignmentCache:
    """One follower's copy. :meth:`step` brings it up to date; it never goes back."""

    def __init__(self, source: AssignmentSource) -> None:
        self._source = source
        self.version = -1
        self._known: dict[tuple[str, str], Assignment] = {}
        self._stale: dict[tuple[str, str], int] = {}

    def refresh(self) -> None:
        """Ask for what changed. Raises what the source does, RevisionCompacted aside."""
        try:
            update = self._source.all() if self.version < 0 else self._source.since(self.version)
        except RevisionCompacted:
            update = self._source.all()
        self._take(update)

    def _take(self, update: AssignmentUpdate) -> None:
        if update.version < self.version:
            return  # a slow answer, overtaken by a later one
        if update.whole:
            self._known = {}
        for each in update.assignments:
            self._known[each.pchannel, each.role] = each
        self.version = update.version

    def invalidate(self) -> None:
        """Ask for everything in the next step: what is known may not be so any more, and nobody would say so."""
        self.version = -1

    def get(self, pchannel: str, role: str) -> Assignment | None:
        """Who serves the role, None where nobody is known to: wait for the next step."""
        found = self._known.get((pchannel, role))
        if found is None or not found.address or found.term <= self._stale.get((pchannel, role), 0):
            return None
        return found

    def mark_stale(self, assignment: Assignment) -> None:
        """Its node does not serve that term any more: only a newer term counts from now on."""
        key = assignment.pchannel, assignment.role
        self._stale[key] = max(assignment.term, self._stale.get(key, 0))

    def known(self) -> Sequence[Assignment]:
        return [self._known[key] for key in sorted(self._known)]
