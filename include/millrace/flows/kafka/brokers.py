"""Where Kafka's clients may connect: checked before a client is created, and again once it knows the other brokers.

librdkafka opens its connections itself, without a hook for us. Between our lookup and its own, the resolver may change
its answer, and it may reach brokers that it learns of later before anybody checks them. It sends them only Kafka's
handshake, which no server of keys answers. It connects only to brokers that it needs, so a client first asks for the
metadata, which is checked before the other brokers are reached.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka.admin._metadata import ClusterMetadata

from millrace.base.errors import InvalidSettings
from millrace.flows.declare.addresses import host_of, leads_astray
from millrace.flows.kafka.cluster import KafkaCluster


def client_settings(cluster: KafkaCluster) -> dict[str, str | int]:
    """Return the settings of a client of `cluster`. Raises InvalidSettings if a broker's address is forbidden."""
    _require(map(host_of, cluster.bootstrap))
    return cluster.client_settings()


def admin_settings(cluster: KafkaCluster) -> dict[str, str | int]:
    """The same for a client that consumes nothing. Raises InvalidSettings."""
    _require(map(host_of, cluster.bootstrap))
    return KafkaCluster.client_settings(cluster)


def looked_at(told: ClusterMetadata) -> ClusterMetadata:
    """What the brokers told. Raises InvalidSettings where they name one that no pipeline may reach."""
    _require(str(each.host) for each in told.brokers.values())
    return told


def _require(hosts: Iterable[str]) -> None:
    wrong = [host for host in hosts if leads_astray(host)]
    if wrong:
        raise InvalidSettings(f"{', '.join(wrong)}: a broker at an address that no pipeline may reach (link-local)")
