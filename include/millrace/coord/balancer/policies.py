"""Balancing policies by name: those of Millrace, and those that other packages register as entry points.

A policy of another package is not trusted with the roles: whatever it raises or returns, or if it does not return at
all, every role that has no owner is placed, no role goes to a session that is not there, and no role moves again before
the limits allow it (:func:`find_policy`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from millrace.base.bounded_call import BoundedCalls
from millrace.base.entry_points import load_entry_points
from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.coord.balancer.policy import AssignmentView, ChannelView, PlannedMove, Policy
from millrace.coord.balancer.vchannelfair import vchannel_fair

GROUP: Final = "millrace.balancer_policies"
"""The group of entry points; each is a :class:`NamedPolicy`."""

POLICY_SECONDS: Final = 5.0
"""Time that a package's policy may take for a round."""
MAX_CAUSE: Final = 64
"""Characters of a move's cause, which its role's record keeps."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy with the name that the setting ``balance_policy`` chooses it by."""

    name: str
    policy: Policy


def pchannel_count(view: AssignmentView) -> list[PlannedMove]:
    """Spread PChannels evenly by their number alone, whatever is on them: Milvus' `pchannel_count_fair`.

    A role without an owner goes to the session with the fewest. For balance, roles move from the session with the most
    to that with the fewest while they differ by two or more.
    """
    if not view.nodes:
        return []
    counts = Counter(dict.fromkeys(sorted(view.nodes), 0))
    counts.update(each.owner for each in view.channels if each.owner is not None and each.owner in counts)
    channels = sorted(view.channels, key=lambda each: each.pchannel)
    moves: list[PlannedMove] = []

    def put(pchannel: str, cause: str) -> None:
        to = min(counts, key=lambda name: (counts[name], name))
        counts[to] += 1
        moves.append(PlannedMove(pchannel, to, cause))

    for channel in channels:
        if channel.owner is None:
            put(channel.pchannel, "place")
    for channel in [each for each in channels if each.owner is not None and each.owner not in counts][: view.max_moves]:
        put(channel.pchannel, "drain")
    if moves or not view.allow_rebalance:
        return moves
    movable = [each for each in channels if each.movable]
    while len(moves) < view.max_moves:
        most = max(counts, key=lambda name: (counts[name], name))
        channel_of_most = next((each for each in movable if each.owner == most), None)
        if channel_of_most is None or counts[most] - min(counts.values()) < 2:
            break
        movable.remove(channel_of_most)
        counts[most] -= 1
        put(channel_of_most.pchannel, "balance")
    return moves


POLICIES: Final[dict[str, Policy]] = {"vchannelfair": vchannel_fair, "pchannelcount": pchannel_count}
"""The policies of Millrace itself."""


def find_policy(name: str) -> Policy:
    """Return a policy by name: one of Millrace's, or a guarded one that another package registers.

    Raises InvalidSettings.
    """
    if name in POLICIES:
        return POLICIES[name]
    others = {each.name: each.policy for each in load_entry_points(GROUP, NamedPolicy)}
    if name not in others:
        known = ", ".join(sorted(POLICIES.keys() | others.keys()))
        raise InvalidSettings(f"unknown balancer policy {name!r}; known are {known}")
    return _Guarded(name, others[name])


def policy_of(settings: Settings) -> Policy:
    """Return the policy that the settings choose. Raises InvalidSettings."""
    return find_policy(settings.balance_policy)


def _one_call() -> BoundedCalls:
    return BoundedCalls("balancer-policy", most=1)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A policy whose answer is used only if it can be. Otherwise `vchannelfair` plans this round."""

    name: str
    policy: Policy
    calls: BoundedCalls = field(default_factory=_one_call, compare=False)

    def __call__(self, view: AssignmentView) -> list[PlannedMove]:
        try:
            returned = self.calls.run(lambda: list(self.policy(view)), POLICY_SECONDS)
            moves = self._checked(view, returned)
        except Exception as error:  # whatever another package's code raises
            _log.warning("the balancer policy %s failed, and vchannelfair plans this round: %s", self.name, error)
            return vchannel_fair(view)
        # A role without an owner must not wait for a policy that does not place it.
        placed = {move.pchannel: move.to for move in moves}
        left = {each.pchannel for each in view.channels if each.owner is None} - placed.keys()
        if left:
            after = tuple(replace(each, owner=placed.get(each.pchannel, each.owner)) for each in view.channels)
            more = vchannel_fair(replace(view, channels=after, allow_rebalance=False))
            moves += [move for move in more if move.pchannel in left]
        return moves

    def _checked(self, view: AssignmentView, moves: Sequence[object]) -> list[PlannedMove]:
        """Return the moves that may be made now. Raises InvalidSettings if one can never be made."""
        channels = {each.pchannel: each for each in view.channels}
        known: list[PlannedMove] = []
        for move in moves:
            if not isinstance(move, PlannedMove) or move.pchannel not in channels or move.to not in view.nodes:
                raise InvalidSettings(f"{move!r} does not move a known PChannel to a living session")
            cause: object = move.cause
            if not isinstance(cause, str) or len(cause) > MAX_CAUSE:
                raise InvalidSettings(f"the cause of the move of {move.pchannel} is not text of {MAX_CAUSE} characters")
            known.append(move)
        if len({move.pchannel for move in known}) != len(known):
            raise InvalidSettings("it moves a PChannel twice in a round")
        # Moves for balance that are not allowed now are left out. A role whose handover they begin anew in each round
        # would never open.
        allowed = [move for move in known if _may_move(view, channels[move.pchannel])]
        others = [move for move in allowed if channels[move.pchannel].owner is not None]
        if len(others) > view.max_moves:
            raise InvalidSettings(f"it makes {len(others)} moves in a round, and {view.max_moves} are allowed")
        return allowed


def _may_move(view: AssignmentView, channel: ChannelView) -> bool:
    """Return whether a role has no living owner, or may move for balance."""
    return channel.owner not in view.nodes or (view.allow_rebalance and channel.movable)
