"""The servers that can be started here, by name. A server's module is imported when the server is created."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Final

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.server import LocalServer

LOG_BROKERS: Final[dict[str, str]] = {
    "kafka": "millrace.brokers.kafka:KafkaBroker",
    "pulsar": "millrace.brokers.pulsar:PulsarBroker",
}
"""Brokers that serve as a log: name -> ``module:class``, a `LocalServer` made from its data folder and settings."""

META_STORES: Final[dict[str, str]] = {
    "etcd": "millrace.brokers.etcd:EtcdServer",
    "mariadb": "millrace.brokers.mariadb:MariaDbServer",
}
"""Servers that serve as a cluster's meta store, in the same form."""

SINK_SERVERS: Final[dict[str, str]] = {"opensearch": "millrace.brokers.opensearch:OpenSearchServer"}
"""Servers that pipelines write to, in the same form."""

CAPTURED_SERVERS: Final[dict[str, str]] = {"postgres": "millrace.brokers.postgres:PostgresServer"}
"""Databases whose changes flows capture and that are no meta store, in the same form."""

OBJECT_STORES: Final[dict[str, str]] = {"s3": "millrace.brokers.versitygw:VersityGateway"}
"""Servers that hold tables, in the same form; the name is that of the store's kind."""


def create_server(name: str, data: Path, *, settings: Settings) -> LocalServer:
    """Create the server `name` over the folder `data`, without starting it. Raises InvalidSettings."""
    known = LOG_BROKERS | META_STORES | SINK_SERVERS | CAPTURED_SERVERS | OBJECT_STORES
    if name not in known:
        raise InvalidSettings(f"unknown broker {name!r}; known brokers: {', '.join(sorted(known))}")
    module, _, kind = known[name].partition(":")
    found: LocalServer = getattr(import_module(module), kind)(data, settings=settings)
    return found
