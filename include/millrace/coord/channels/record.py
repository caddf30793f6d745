"""The assignment record of one role of a PChannel, and its state transitions as values."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

CHANNEL_PREFIX: Final = "channels/"
MAX_MOVES: Final = 16
"""Number of newest moves that a record keeps."""


class AssignmentState(StrEnum):
    UNINITIALISED = "uninitialised"
    """The role never had an owner."""
    ASSIGNING = "assigning"
    """`owner` is to get the role in `term`; former owners in `history` may still hold it."""
    ASSIGNED = "assigned"
    """`owner` holds the role in `term`, and no other node does."""
    UNAVAILABLE = "unavailable"
    """The owner is gone and no new one is chosen yet."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A session that got a role, in a term."""

    session: str
    address: str
    term: int
    client_address: str = ""
    """Address for clients; "" if it is `address`."""

    def to_json(self) -> list[Any]:
        return [self.session, self.address, self.term, *([self.client_address] if self.client_address else [])]


@dataclass(frozen=True, slots=True)
class CompletedMove:
    """One change of owner. Times are Unix seconds of the leader's wall clock, for display only."""

    term: int
    source: str
    """Session of the previous owner; "" for the first."""
    to: str
    cause: str
    began: float
    """Time at which the previous owner was lost, or the next one chosen."""
    ended: float
    """Time at which the new owner had the role."""


@dataclass(frozen=True, slots=True)
class ChannelRecord:
    """One role of one PChannel."""

    pchannel: str
    role: str
    state: AssignmentState = AssignmentState.UNINITIALISED
    term: int = 0
    owner: Owner | None = None
    history: tuple[Owner, ...] = ()
    """Former owners that have not been seen to release the role."""
    cause: str = ""
    """Reason of the current assignment, in a word."""
    moves: tuple[CompletedMove, ...] = ()
    """Oldest first, at most MAX_MOVES."""
    since: float = 0.0
    """Start of the change in progress; 0 if there is none."""
    revision: int = 0
    """Revision of the key; 0 before the record is stored."""

    @property
    def key(self) -> str:
        return f"{CHANNEL_PREFIX}{self.pchannel}@{self.role}"

    def begin_assignment(
        self, session: str, address: str, cause: str, at: float = 0.0, *, client_address: str = ""
    ) -> ChannelRecord:
        """Assign the next term to `session`."""
        term = self.term + 1
        history = self.history if self.owner is None else (*self.history, self.owner)
        newest = {owner.session: owner for owner in history}
        return replace(
            self,
            state=AssignmentState.ASSIGNING,
            term=term,
            owner=Owner(session, address, term, client_address),
            history=tuple(newest.values()),
            cause=cause,
            since=self.since or at,
        )

    def without_history(self, sessions: set[str]) -> ChannelRecord:
        return replace(self, history=tuple(owner for owner in self.history if owner.session not in sessions))

    def complete_assignment(self, at: float = 0.0) -> ChannelRecord:
        assert self.owner is not None
        source = self.moves[-1].to if self.moves else ""
        move = CompletedMove(self.term, source, self.owner.session, self.cause, self.since, at)
        moves = (*self.moves, move)[-MAX_MOVES:]
        return replace(self, state=AssignmentState.ASSIGNED, history=(), moves=moves, since=0.0)

    def mark_unavailable(self, cause: str, at: float = 0.0) -> ChannelRecord:
        """Remove the owner, which must be seen to release the role before another gets it."""
        history = self.history if self.owner is None else (*self.history, self.owner)
        newest = {owner.session: owner for owner in history}
        former = tuple(newest.values())
        return replace(
            self, state=AssignmentState.UNAVAILABLE, owner=None, history=former, cause=cause, since=self.since or at
        )

    def encode(self) -> bytes:
        owner = self.owner and self.owner.to_json()
        history = [each.to_json() for each in self.history]
        moves = [[each.term, each.source, each.to, each.cause, each.began, each.ended] for each in self.moves]
        words = [self.pchannel, self.role, self.state, self.term, owner, history, self.cause, moves, self.since]
        return json.dumps(words).encode()

    @classmethod
    def decode(cls, data: bytes, revision: int) -> Self:
        pchannel, role, state, term, owner, history, cause, *newer = json.loads(data)
        moves, since = newer or ((), 0.0)  # written by a build without moves
        return cls(
            pchannel,
            role,
            AssignmentState(state),
            term,
            owner and Owner(*owner),
            tuple(Owner(*each) for each in history),
            cause,
            tuple(CompletedMove(*each) for each in moves),
            since,
            revision,
        )
