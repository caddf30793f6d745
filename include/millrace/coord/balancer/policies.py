"""Balancing policies by name: those of Millrace, and those that other packages register as entry points.

A policy of another package is not trusted with the roles: whatever it raises or returns, every role that has no owner
is placed, and no role goes to a session that is not there (:func:`find_policy`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from millrace.base.entry_points import load_entry_points
from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.coord.balancer.policy import AssignmentView, PlannedMove, Policy
from millrace.coord.balancer.vchannelfair import vchannel_fair

GROUP: Final = "millrace.balancer_policies"
"""The group of entry points; each is a :class:`NamedPolicy`."""

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


@dataclass(frozen=True, slots=True)
class _Guarded:
    """A policy whose answer is used only if it can be. Otherwise `vchannelfair` plans this round."""

    name: str
    policy: Policy

    def __call__(self, view: AssignmentView) -> list[PlannedMove]:
        try:
            moves = list(self.policy(view))
            self._check(view, moves)
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

    def _check(self, view: AssignmentView, moves: Sequence[object]) -> None:
        owners = {each.pchannel: each.owner for each in view.channels}
        known: list[PlannedMove] = []
        for move in moves:
            if not isinstance(move, PlannedMove) or move.pchannel not in owners or move.to not in view.nodes:
                raise InvalidSettings(f"{move!r} does not move a known PChannel to a living session")
            known.append(move)
        if len({move.pchannel for move in known}) != len(known):
            raise InvalidSettings("it moves a PChannel twice in a round")
        others = [move for move in known if owners[move.pchannel] is not None]
        if len(others) > view.max_moves:
            raise InvalidSettings(f"it makes {len(others)} moves in a round, and {view.max_moves} are allowed")
