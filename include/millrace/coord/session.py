"""Node sessions: a key under ``nodes/`` with a lease.

A session is named after its node and the number of the lease, so a node that returns has a new session.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from millrace.base.errors import SessionEnded
from millrace.base.log_backends import backend_of
from millrace.base.package import VERSION
from millrace.coord.clock import Clock
from millrace.coord.lease import LeasedKey
from millrace.meta.store import MetaStore, Put

NODE_PREFIX: Final = "nodes/"
LEVELS_PREFIX: Final = "levels/"
"""Prefix of the newest level that each session's build knows (millrace.coord.cluster_level), under the session's lease.

Not a part of NodeInfo, which earlier builds read.
"""
LEVEL: Final = 2
"""The newest level that this build knows."""
SESSION_SECONDS: Final = 10.0

APPEND: Final = "append"
INGEST: Final = "ingest"
ROLES: Final = (APPEND, INGEST)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The registration of a node."""

    name: str
    address: str
    """Address of its order server."""
    roles: tuple[str, ...] = ROLES
    client_address: str = ""
    """Address of its append server; "" if it is `address`."""

    def encode(self) -> bytes:
        return json.dumps([self.name, self.address, self.roles, self.client_address]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        name, address, roles, *newer = json.loads(data)
        return cls(name, address, tuple(roles), *newer)


def moving_roles(log: str) -> tuple[str, ...]:
    """Return the roles that move between nodes for the log at URL `log`.

    Appends move only if several processes can open the log.
    """
    return (INGEST,) if backend_of(log).local else ROLES


def encode_known_level() -> bytes:
    """Return what a node of this build registers."""
    return json.dumps({"level": LEVEL, "release": VERSION}).encode()


class Session:
    """A node's session. `on_end` is called once for each session that ends, before the next one opens."""

    def __init__(
        self,
        store: MetaStore,
        clock: Clock,
        node: NodeInfo,
        *,
        on_end: Callable[[], None],
        seconds: float = SESSION_SECONDS,
    ) -> None:
        self._tenure = LeasedKey(
            store,
            clock,
            key=lambda lease: f"{NODE_PREFIX}{node.name}@{lease}",
            value=node.encode(),
            seconds=seconds,
            beside=lambda lease: [Put(f"{LEVELS_PREFIX}{node.name}@{lease}", encode_known_level(), lease)],
        )
        self._on_end = on_end
        self._name = ""

    @property
    def name(self) -> str:
        """Name of the open session, ``<node>@<lease>``; "" if none is open."""
        return self._tenure.key.removeprefix(NODE_PREFIX) if self._tenure.lease else ""

    def held(self, name: str | None = None) -> bool:
        """Return whether the session is valid now. With `name`, also require that it is that session."""
        return self._tenure.held() and (name is None or name == self.name)

    def check(self, name: str) -> None:
        """Raise SessionEnded unless session `name` is valid."""
        if not self.held(name):
            raise SessionEnded(
                f"session {name} of this node has ended: the node owns nothing until it is assigned again"
            )

    def step(self) -> float:
        """Open or renew the session; return the seconds until the next call is due."""
        wait = self._tenure.step()
        if self._name != self.name:
            ended, self._name = self._name, self.name
            if ended:
                self._on_end()
        return wait

    def close(self) -> None:
        """End the session now. The node owns nothing afterwards."""
        self._tenure.release()
        if self._name:
            self._name = ""
            self._on_end()
