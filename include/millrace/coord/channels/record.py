"""Who owns a role of a PChannel: the record, and the steps from one state to the next as values."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Self

CHANNEL_PREFIX: Final = "channels/"
MAX_MOVES: Final = 16
"""Moves of one role that its record remembers: the newest."""


class AssignmentState(StrEnum):
    UNINITIALISED = "uninitialised"
    """Nobody ever owned it."""
    ASSIGNING = "assigning"
    """`owner` is to have it in `term`; those of `history` may still hold it."""
    ASSIGNED = "assigned"
    """`owner` has it in `term`, and nobody else."""
    UNAVAILABLE = "unavailable"
    """Its owner went; nobody is named yet."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A session that a role was given to, in a term."""

    session: str
    address: str
    term: int
    client_address: str = ""
    """Where clients find it; "": at its address."""

    def to_json(self) -> list[Any]:
        return [self.session, self.address, self.term, *([self.client_address] if self.client_address else [])]


@dataclass(frozen=True, slots=True)
class CompletedMove:
    """A role came to be at a node. Moments are Unix seconds by the leader's wall clock, to be shown and nothing else."""

    term: int
    source: str
    """The session that had it before; "" for the first."""
    to: str
    cause: str
    began: float
    """When its owner was lost, or its next one named."""
    ended: float
    """When the new owner had it."""


@dataclass(frozen=True, slots=True)
class ChannelRecord:
    """One role of one PChannel."""

    pchannel: str
    role: str
    state: AssignmentState = AssignmentState.UNINITIALISED
    term: int = 0
    owner: Owner | None = None
    history: tuple[Owner, ...] = ()
    """Who had it before, and was not seen to have let go."""
    cause: str = ""
    """Why it is where it is, in a word."""
    moves: tuple[CompletedMove, ...] = ()
    """Oldest first, at most KEPT_MOVES."""
    since: float = 0.0
    """Since when it changes hands; 0: it does not."""
    revision: int = 0
    """Of its key; 0: it is not kept yet."""

    @property
    def key(self) -> str:
        return f"{CHANNEL_PREFIX}{self.pchannel}@{self.role}"

    def begin_assignment(
        self, session: str, address: str, cause: str, at: float = 0.0, *, client_address: str = ""
    ) -> ChannelRecord:
        """The next term is to be of `session`."""
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
        """Its owner is gone: one that is to be seen to have let go before anybody else gets it."""
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
        moves, since = newer or ((), 0.0)  # a cluster's of before there were moves
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
