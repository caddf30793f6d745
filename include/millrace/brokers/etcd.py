"""etcd: one member on the loopback interface, used through its JSON gateway. It accepts every client of this host.

It does not fsync unless `durable` is set: acknowledged writes survive its SIGKILL, but not a power loss.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path

from millrace.base.settings import Settings
from millrace.brokers.programs import find_program
from millrace.brokers.server import LOOPBACK, LocalServer


class EtcdServer(LocalServer):
    """A single-member etcd over the folder `data`."""

    port_names = ("client", "peer")
    heap = ""

    def __init__(
        self,
        data: Path,
        *,
        settings: Settings | None = None,
        properties: Mapping[str, str] | None = None,
        host: str = LOOPBACK,
        durable: bool = False,
    ) -> None:
        """`properties` are further etcd flags, without their dashes. With `durable`, it syncs before it answers."""
        super().__init__(data, settings=settings, properties=properties, host=host)
        self._durable = durable

    @property
    def url(self) -> str:
        """The URL for the setting `meta_store`."""
        return f"etcd://{self.address}"

    def ready(self) -> bool:
        """Return whether it has a leader and serves requests."""
        connection = http.client.HTTPConnection(self.host, self.port["client"], timeout=2.0)
        try:
            connection.request("GET", "/health")
            return str(json.loads(connection.getresponse().read()).get("health")) == "true"
        except (OSError, http.client.HTTPException, ValueError, AttributeError):
            return False
        finally:
            connection.close()

    def prepare(self) -> list[str]:
        client, peer = (f"http://{self.host}:{self.port[name]}" for name in self.port_names)
        flags = {
            "name": "one",
            "data-dir": str(self.data / "member"),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"one={peer}",
            "log-level": "warn",
        } | self._properties
        command = [find_program("etcd", "etcd"), *(f"--{name}={value}" for name, value in flags.items())]
        return command if self._durable else [*command, "--unsafe-no-fsync"]
