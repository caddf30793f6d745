"""What a policy decides by, and what it decides: frozen values of one role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ChannelView:
    """A PChannel in one role."""

    pchannel: str
    owner: str | None
    """The session that has it, or is to have it; None: it is to be placed."""
    vchannels: int = 0
    collections: frozenset[int] = frozenset()
    """By what they share PChannels have affinity: it is cheap to have both on one node."""
    movable: bool = True
    """Not for what moved a while ago, or is behind."""


@dataclass(frozen=True, slots=True)
class AssignmentView:
    nodes: tuple[str, ...]
    """Sessions that may get something."""
    channels: tuple[ChannelView, ...]
    allow_rebalance: bool = True
    max_moves: int = 3


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """`pchannel` is to go to the session `to`."""

    pchannel: str
    to: str
    cause: str


class Policy(Protocol):
    def __call__(self, view: AssignmentView) -> list[PlannedMove]:
        """A pure function: the same view, the same moves. What has no owner, or one that is no node of the view, is placed
        (all of what has none; of the others at most `max_moves`); the rest moves where that is worth it."""
        ...
