"""What people ask of a cluster, and what they see of it: nodes, PChannels, draining, balance. By the meta store alone, so that it
needs no coordinator that answers; whoever leads does it in its next round.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from millrace.base.errors import NodeNotFound
from millrace.coord.channels.record import CHANNEL_PREFIX, ChannelRecord
from millrace.coord.leadership import LEADER_KEY
from millrace.coord.session import NODE_PREFIX, NodeInfo
from millrace.meta.store import Delete, MetaStore, Put

CONTROL_PREFIX: Final = "control/"
DRAIN_PREFIX: Final = "control/drains/"
"""Nodes, by name, that are to be emptied."""
FREEZE_KEY: Final = "control/frozen"
"""While it is there, nothing moves for balance alone."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as its session and the records have it."""

    name: str
    session: str
    """"" where it has none: it is gone, and what it had is being given to others."""
    address: str
    roles: tuple[str, ...]
    draining: bool
    owns: tuple[str, ...]
    """PChannels of which it owns a role, or is to."""

    @property
    def state(self) -> Literal["up", "draining", "drained", "gone"]:
        if self.draining:
            return "draining" if self.owns else "drained"
        return "up" if self.session else "gone"


@dataclass(frozen=True, slots=True)
class ControlState:
    """What people asked for."""

    drains: frozenset[str]
    frozen: bool


def read_control_state(store: MetaStore) -> ControlState:
    keys = [entry.key for entry in store.list(CONTROL_PREFIX).entries]
    drains = frozenset(key.removeprefix(DRAIN_PREFIX) for key in keys if key.startswith(DRAIN_PREFIX))
    return ControlState(drains, FREEZE_KEY in keys)


def channels(store: MetaStore) -> list[ChannelRecord]:
    """All records, by PChannel and role."""
    found = (ChannelRecord.decode(entry.value, entry.modified) for entry in store.list(CHANNEL_PREFIX).entries)
    return sorted(found, key=lambda record: (record.pchannel, record.role))


def nodes(store: MetaStore) -> list[NodeView]:
    """The nodes that are there, and those that are not and have something still, or are to be emptied; by name."""
    asked = read_control_state(store)
    owns: dict[str, list[str]] = {}
    for record in channels(store):
        if record.owner is not None:
            owns.setdefault(record.owner.session, []).append(record.pchannel)
    found = []
    for entry in store.list(NODE_PREFIX).entries:
        session, info = entry.key.removeprefix(NODE_PREFIX), NodeInfo.decode(entry.value)
        owned = tuple(sorted(set(owns.pop(session, ()))))
        found.append(NodeView(info.name, session, info.address, info.roles, info.name in asked.drains, owned))
    for session, names in owns.items():
        name = session.rpartition("@")[0]
        found.append(NodeView(name, "", "", (), name in asked.drains, tuple(sorted(set(names)))))
    there = {each.name for each in found}
    found += [NodeView(name, "", "", (), True, ()) for name in asked.drains - there]
    return sorted(found, key=lambda each: (each.name, each.session))


def leader(store: MetaStore) -> tuple[str, str]:
    """Name and address of the coordinator that leads, "" for none; that address answers whoever leads."""
    there = store.get(LEADER_KEY)
    if there is None:
        return "", ""
    name, address = json.loads(there.value)
    return name, address


def drain(store: MetaStore, name: str) -> None:
    """Have the node `name` emptied, and given nothing, until :func:`undrain`. Raises NodeNotFound."""
    _known(store, name)
    store.commit([Put(DRAIN_PREFIX + name, b"")])


def undrain(store: MetaStore, name: str) -> None:
    """Let the node have something again. Raises NodeNotFound where nobody knows it."""
    if store.get(DRAIN_PREFIX + name) is None:
        _known(store, name)
    store.commit([Delete(DRAIN_PREFIX + name)])


def owned_by(store: MetaStore, name: str) -> Sequence[str]:
    """The PChannels that a node owns, is to own, or has not let go of yet."""
    sessions = (
        (record.pchannel, owner.session)
        for record in channels(store)
        for owner in (*record.history, *([] if record.owner is None else [record.owner]))
    )
    return sorted({pchannel for pchannel, session in sessions if session.rpartition("@")[0] == name})


def freeze(store: MetaStore, *, frozen: bool) -> None:
    """Have nothing moved for balance alone from now on, or have it again. What has no owner is placed all the same."""
    store.commit([Put(FREEZE_KEY, b"") if frozen else Delete(FREEZE_KEY)])


def _known(store: MetaStore, name: str) -> None:
    there = [each.name for each in nodes(store)]
    if name not in there:
        known = f"there are {', '.join(sorted(set(there)))}" if there else "no node is registered"
        raise NodeNotFound(f"no node {name!r} in this cluster: {known}")
