"""Orders to nodes over Flight: assign, remove, collect status (the balancer's protocol Orders).

Each order is one action with a JSON object. The node's server answers it (millrace.node.cluster.server) and its typed
errors are raised here.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from millrace.base.closeable import Closeable
from millrace.base.errors import NodeUnreachable
from millrace.base.settings import Settings
from millrace.coord.channels.record import Owner
from millrace.coord.store_factory import cluster_token
from millrace.rpc.discovery import ServerRecord
from millrace.rpc.link import ConnectionLost, Link, Watchdog

ASSIGN: Final = "assign"
REMOVE: Final = "remove"
STATUS: Final = "status"


class FlightOrders(Closeable):
    """One coordinator's connections to nodes. Thread-safe."""

    def __init__(self, settings: Settings, *, seconds: float) -> None:
        """`seconds`: timeout of one order."""
        self._token = cluster_token(settings)
        self._tls = settings.log_tls
        self._seconds = seconds
        self._watchdog = Watchdog()
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}

    def assign(self, owner: Owner, pchannel: str, role: str) -> None:
        self._order(ASSIGN, owner, pchannel, role)

    def remove(self, owner: Owner, pchannel: str, role: str) -> None:
        self._order(REMOVE, owner, pchannel, role)

    def status(self, address: str) -> dict[str, Any]:
        """Return what the node at `address` holds now.

        Raises NodeUnreachable.
        """
        return self._call(address, STATUS, {})

    def _order(self, name: str, owner: Owner, pchannel: str, role: str) -> None:
        order = {"session": owner.session, "pchannel": pchannel, "role": role, "term": owner.term}
        self._call(owner.address, name, order)

    def _call(self, address: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
        link = self._link(address)
        try:
            return link.act(name, request, timeout=self._seconds)
        except ConnectionLost as error:
            with self._lock:
                if self._links.get(address) is link:
                    del self._links[address]
            link.close()
            raise NodeUnreachable(f"the node at {address} did not answer: {error}") from error

    def _link(self, address: str) -> Link:
        with self._lock:
            link = self._links.get(address)
            if link is None:
                cert, _, name = self._tls or ("", "", "")
                record = ServerRecord.remote(address, self._token, roots=cert, tls_name=name)
                link = self._links[address] = Link(record, self._watchdog)
            return link

    def close(self) -> None:
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()
        self._watchdog.close()
