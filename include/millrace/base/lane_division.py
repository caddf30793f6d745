"""The division of lanes among members: a flow's lanes among its workers, VChannels among a consumer group's members.

A division is a pure function, and only a hint: two members may briefly believe that they have one lane. A claim or a
commit that only one of them can make keeps them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence


def shares(lanes: Iterable[str], members: Sequence[str], held: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the owner of each lane: every member has as many lanes as any other, or one more.

    `held` names the present owner of a lane. An owner keeps its lanes up to its share, so a member that joins n others
    moves at most 1/(n + 1) of the lanes, and one that leaves moves only its own. A lane without an owner goes to the
    member with the highest hash of both among those that have room, so most lanes stay where they are even if nobody
    knows the owners. The order of the arguments is irrelevant. Without members no lane has an owner.
    """
    found: dict[str, str] = {}
    ordered, names = sorted(set(lanes)), sorted(set(members))
    if not names:
        return found
    most, more = divmod(len(ordered), len(names))
    taken = dict.fromkeys(names, 0)

    def room(name: str) -> bool:
        return taken[name] < most or (more > 0 and taken[name] == most)

    def give(lane: str, name: str) -> None:
        nonlocal more
        found[lane] = name
        more -= taken[name] == most
        taken[name] += 1

    for lane in ordered:
        if (owner := (held or {}).get(lane)) in taken and room(owner):
            give(lane, owner)
    for lane in ordered:
        if lane not in found:
            give(lane, max((name for name in names if room(name)), key=lambda name: _rank(name, lane)))
    return found


def divide(wanted: Mapping[str, Iterable[str]], held: Mapping[str, str]) -> dict[str, str]:
    """Return the owner of each lane if members want different lanes: `wanted` has the lanes that a member reads.

    Lanes that the same members want are divided among these by :func:`shares`.
    """
    by_lane: dict[str, set[str]] = {}
    for member, lanes in wanted.items():
        for lane in lanes:
            by_lane.setdefault(lane, set()).add(member)
    classes: dict[frozenset[str], list[str]] = {}
    for lane, members in by_lane.items():
        classes.setdefault(frozenset(members), []).append(lane)
    found: dict[str, str] = {}
    for those, lanes in classes.items():
        found |= shares(lanes, sorted(those), held)
    return found


def _rank(name: str, lane: str) -> bytes:
    return hashlib.sha256(f"{name}\n{lane}".encode()).digest()
