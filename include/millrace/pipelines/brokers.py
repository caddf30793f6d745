"""Where Kafka's clients may connect: looked at before one is made, and again when it has been told of the other brokers.

librdkafka opens its connections itself, without a hook of ours: between a look and its own the resolver may change its mind, and brokers
that are named to it later it may reach before anybody looks. It says nothing there but Kafka's handshake, which no server of keys answers.
It connects to those alone that it needs, so that what a client asks first, its metadata, is looked at before the others are reached.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka.admin._metadata import ClusterMetadata

from millrace.base.errors import InvalidSettings
from millrace.pipelines.model.addresses import host_of, leads_astray
from millrace.pipelines.model.kafka import KafkaCluster


def client_settings(cluster: KafkaCluster) -> dict[str, str | int]:
    """What a client of `cluster` is made with. Raises InvalidSettings where a name of its brokers leads where no pipeline may reach."""
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
