"""The input and output of a balancing policy: immutable values for one role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ChannelView:
    """One role of a PChannel."""

    pchannel: str
    owner: str | None
    """Session that holds the role or is about to; None if the role has to be placed."""
    vchannels: int = 0
    collections: frozenset[int] = frozenset()
    """Collections of the PChannel. PChannels that share collections have affinity: they belong on one node."""
    movable: bool = True
    """False for a PChannel that moved recently or lags."""


@dataclass(frozen=True, slots=True)
class AssignmentView:
    nodes: tuple[str, ...]
    """Sessions that may get roles."""
    channels: tuple[ChannelView, ...]
    allow_rebalance: bool = True
    max_moves: int = 3


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """`pchannel` is to move to session `to`."""

    pchannel: str
    to: str
    cause: str


class Policy(Protocol):
    def __call__(self, view: AssignmentView) -> list[PlannedMove]:
        """Return moves. A pure function: the same view gives the same moves.

        Roles without an owner are placed, all of them; roles of an owner outside of the view too, at most
        `max_moves`. Other roles move if that is worth it.
        """
        ...
