"""Operator commands and their state: drained nodes, frozen balance, and the cluster as the meta store shows it.

Commands only write to the meta store, so they need no running coordinator. The leader acts on them in its next round.
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
"""Prefix of the keys that name nodes to drain."""
FREEZE_KEY: Final = "control/frozen"
"""Key that stops rebalancing while it exists."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, from its session and the channel records."""

    name: str
    session: str
    """Name of its session; "" if the node is gone and its roles are being reassigned."""
    address: str
    roles: tuple[str, ...]
    draining: bool
    owns: tuple[str, ...]
    """PChannels with a role that the node owns, or is about to own."""

    @property
    def state(self) -> Literal["up", "draining", "drained", "gone"]:
        if self.draining:
            return "draining" if self.owns else "drained"
        return "up" if self.session else "gone"


@dataclass(frozen=True, slots=True)
class ControlState:
    """Requests of operators."""

    drains: frozenset[str]
    frozen: bool


def read_control_state(store: MetaStore) -> ControlState:
    """Read the current requests."""
    keys = [entry.key for entry in store.list(CONTROL_PREFIX).entries]
    drains = frozenset(key.removeprefix(DRAIN_PREFIX) for key in keys if key.startswith(DRAIN_PREFIX))
    return ControlState(drains, FREEZE_KEY in keys)


def channels(store: MetaStore) -> list[ChannelRecord]:
    """Return all channel records, sorted by PChannel and role."""
    found = (ChannelRecord.decode(entry.value, entry.modified) for entry in store.list(CHANNEL_PREFIX).entries)
    return sorted(found, key=lambda record: (record.pchannel, record.role))


def nodes(store: MetaStore) -> list[NodeView]:
    """Return live nodes, and missing nodes that still own a role or are to be drained, sorted by name."""
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
    """Return name and address of the leading coordinator, ("", "") if there is none. The address serves on any
    coordinator.
    """
    there = store.get(LEADER_KEY)
    if there is None:
        return "", ""
    name, address = json.loads(there.value)
    return name, address


def drain(store: MetaStore, name: str) -> None:
    """Drain the node `name`: move its roles away and assign nothing to it until :func:`undrain`.

    Raises NodeNotFound.
    """
    _require_node(store, name)
    store.commit([Put(DRAIN_PREFIX + name, b"")])


def undrain(store: MetaStore, name: str) -> None:
    """Allow assignments to the node again.

    Raises NodeNotFound if the cluster does not know it.
    """
    if store.get(DRAIN_PREFIX + name) is None:
        _require_node(store, name)
    store.commit([Delete(DRAIN_PREFIX + name)])


def owned_by(store: MetaStore, name: str) -> Sequence[str]:
    """Return the PChannels that a node owns, is about to own, or has not released yet."""
    sessions = (
        (record.pchannel, owner.session)
        for record in channels(store)
        for owner in (*record.history, *([] if record.owner is None else [record.owner]))
    )
    return sorted({pchannel for pchannel, session in sessions if session.rpartition("@")[0] == name})


def freeze(store: MetaStore, *, frozen: bool) -> None:
    """Stop rebalancing (`frozen`), or allow it again. Roles without an owner are assigned in either case."""
    store.commit([Put(FREEZE_KEY, b"") if frozen else Delete(FREEZE_KEY)])


def _require_node(store: MetaStore, name: str) -> None:
    there = [each.name for each in nodes(store)]
    if name not in there:
        known = f"there are {', '.join(sorted(set(there)))}" if there else "no node is registered"
        raise NodeNotFound(f"no node {name!r} in this cluster: {known}")
