"""Who owns a role of a PChannel: the record, and the steps from one state to the next as values."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

CHANNELS: Final = "channels/"


class State(StrEnum):
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


@dataclass(frozen=True, slots=True)
class ChannelRecord:
    """One role of one PChannel."""

    pchannel: str
    role: str
    state: State = State.UNINITIALISED
    term: int = 0
    owner: Owner | None = None
    history: tuple[Owner, ...] = ()
    """Who had it before, and was not seen to have let go."""
    cause: str = ""
    """Why it is where it is, in a word."""
    revision: int = 0
    """Of its key; 0: it is not kept yet."""

    @property
    def key(self) -> str:
        return f"{CHANNELS}{self.pchannel}@{self.role}"

    def assigning(self, session: str, address: str, cause: str) -> ChannelRecord:
        """The next term is to be of `session`."""
        term = self.term + 1
        history = self.history if self.owner is None else (*self.history, self.owner)
        newest = {owner.session: owner for owner in history}
        return replace(
            self,
            state=State.ASSIGNING,
            term=term,
            owner=Owner(session, address, term),
            history=tuple(newest.values()),
            cause=cause,
        )

    def without_history(self, sessions: set[str]) -> ChannelRecord:
        return replace(self, history=tuple(owner for owner in self.history if owner.session not in sessions))

    def assigned(self) -> ChannelRecord:
        return replace(self, state=State.ASSIGNED, history=())

    def unavailable(self, cause: str) -> ChannelRecord:
        """Its owner is gone: one that is to be seen to have let go before anybody else gets it."""
        history = self.history if self.owner is None else (*self.history, self.owner)
        newest = {owner.session: owner for owner in history}
        return replace(self, state=State.UNAVAILABLE, owner=None, history=tuple(newest.values()), cause=cause)

    def encoded(self) -> bytes:
        owner = self.owner and [self.owner.session, self.owner.address, self.owner.term]
        history = [[each.session, each.address, each.term] for each in self.history]
        return json.dumps([self.pchannel, self.role, self.state, self.term, owner, history, self.cause]).encode()

    @classmethod
    def decoded(cls, data: bytes, revision: int) -> Self:
        pchannel, role, state, term, owner, history, cause = json.loads(data)
        return cls(
            pchannel,
            role,
            State(state),
            term,
            owner and Owner(*owner),
            tuple(Owner(*each) for each in history),
            cause,
            revision,
        )
