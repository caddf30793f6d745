"""The check of broker addresses: before a client is created, and again when it knows the other brokers.

librdkafka opens its connections itself, without a hook. The resolver may answer differently between this check and
librdkafka's own lookup, and librdkafka may connect to brokers that it learns of later before they are checked. It sends
them only Kafka's handshake, which metadata services do not answer. It connects only to brokers that it needs, so a
client first asks for the metadata, which is checked before the other brokers are reached.
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
    """Return the settings of a client that consumes nothing. Raises InvalidSettings if an address is forbidden."""
    _require(map(host_of, cluster.bootstrap))
    return KafkaCluster.client_settings(cluster)


def checked_metadata(metadata: ClusterMetadata) -> ClusterMetadata:
    """Return the brokers' metadata. Raises InvalidSettings if it names a broker at a forbidden address."""
    _require(str(each.host) for each in metadata.brokers.values())
    return metadata


def _require(hosts: Iterable[str]) -> None:
    wrong = [host for host in hosts if leads_astray(host)]
    if wrong:
        raise InvalidSettings(f"{', '.join(wrong)}: a broker at a forbidden address (link-local)")
