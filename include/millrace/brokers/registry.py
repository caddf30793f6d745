"""The servers that can be started here, by name; a module is imported when its server is asked for."""

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
"""Brokers that a log lies on: name -> ``module:class``, each a Broker made from its data folder and the settings."""

META_STORES: Final[dict[str, str]] = {
    "etcd": "millrace.brokers.etcd:EtcdServer",
    "mariadb": "millrace.brokers.mariadb:MariaDbServer",
}
"""Servers that hold what a cluster agrees on, the same way."""

SINK_SERVERS: Final[dict[str, str]] = {"opensearch": "millrace.brokers.opensearch:OpenSearchServer"}
"""Servers that pipelines write to, the same way."""


def create_server(name: str, data: Path, *, settings: Settings) -> LocalServer:
    """A broker over the folder `data`, not started. Raises InvalidSettings."""
    known = LOG_BROKERS | META_STORES | SINK_SERVERS
    if name not in known:
        raise InvalidSettings(f"there is no broker {name!r} to start; known are {', '.join(sorted(known))}")
    module, _, kind = known[name].partition(":")
    found: LocalServer = getattr(import_module(module), kind)(data, settings=settings)
    return found
