"""Sessions: a node is what holds a key under ``nodes/`` by a lease. Its name is the node's with the number of that lease, so
that a node that comes back is another one to everybody."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from millrace.base.errors import SessionEnded
from millrace.base.log_backends import backend_of
from millrace.coord.clock import Clock
from millrace.coord.lease import LeasedKey
from millrace.meta.store import MetaStore

NODE_PREFIX: Final = "nodes/"
SESSION_SECONDS: Final = 10.0

APPEND: Final = "append"
INGEST: Final = "ingest"
ROLES: Final = (APPEND, INGEST)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says of itself when it registers."""

    name: str
    address: str
    """Where it takes orders."""
    roles: tuple[str, ...] = ROLES
    client_address: str = ""
    """Where it takes appends; "": at its address."""

    def encode(self) -> bytes:
        return json.dumps([self.name, self.address, self.roles, self.client_address]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        name, address, roles, *newer = json.loads(data)
        return cls(name, address, tuple(roles), *newer)


def moving_roles(log: str) -> tuple[str, ...]:
    """The roles that move between nodes on the log at the URL `log`: appends do where the log is no one process's."""
    return (INGEST,) if backend_of(log).local else ROLES


class Session:
    """A node's session. `on_end` is called once each time one ends, before the next is opened."""

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
            store, clock, key=lambda lease: f"{NODE_PREFIX}{node.name}@{lease}", value=node.encode(), seconds=seconds
        )
        self._on_end = on_end
        self._name = ""

    @property
    def name(self) -> str:
        """``<node>@<lease>``, "" where none is open."""
        return self._tenure.key.removeprefix(NODE_PREFIX) if self._tenure.lease else ""

    def held(self, name: str | None = None) -> bool:
        """Whether the session (that of `name`) may be relied on now."""
        return self._tenure.held() and (name is None or name == self.name)

    def check(self, name: str) -> None:
        """Raises SessionEnded."""
        if not self.held(name):
            raise SessionEnded(f"the session {name} of this node has ended: it owns nothing until it is assigned anew")

    def step(self) -> float:
        """Open or renew the session; the seconds until this is to be called again."""
        wait = self._tenure.step()
        if self._name != self.name:
            ended, self._name = self._name, self.name
            if ended:
                self._on_end()
        return wait

    def close(self) -> None:
        """End the session now: the node owns nothing any more."""
        self._tenure.release()
        if self._name:
            self._name = ""
            self._on_end()
