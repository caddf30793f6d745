"""Where a declaration may lead this service and its workers: its writer chooses the addresses that they connect to.

Link-local addresses are always refused: there a cloud serves the machine's keys (169.254.169.254), and no Kafka or
OpenSearch. ``reach.hosts`` of pipeline-config.yaml restricts the others to those that it names. The connection to
OpenSearch checks the resolved address again (sinks/opensearch/connection.py), and so does flows/kafka/brokers.py
before it creates a client of Kafka.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from millrace.flows.declare.addresses import address_of, host_of, is_forbidden, leads_astray
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import Problem, invalid
from millrace.flows.kafka.cluster import KafkaCluster
from millrace.flows.sinks.opensearch.model import OpenSearchSink
from millrace.flows.sources.kafka.model import KafkaSource


def require_allowed(pipeline: Flow, hosts: Sequence[str]) -> None:
    """Raise PipelineInvalid if an address is link-local or matches none of `hosts`.

    `hosts` are patterns of names, or networks; empty means all.
    """
    wrong = []
    for path, host in _hosts(pipeline):
        if hosts and not any(_matches(host, pattern) for pattern in hosts):
            wrong.append(
                Problem(path, f"{host} is not among the hosts that this service may reach (reach.hosts)", "reach")
            )
        elif is_forbidden(host):
            wrong.append(Problem(path, f"{host} is an address that no pipeline may reach", "reach"))
    if wrong:
        raise invalid(wrong)


def require_reachable(pipeline: Flow) -> None:
    """Do as :func:`require_allowed` for the current addresses of the names. Raises PipelineInvalid."""
    wrong = []
    for path, host in _hosts(pipeline):
        if leads_astray(host):
            wrong.append(Problem(path, f"{host} is an address that no pipeline may reach", "reach"))
    if wrong:
        raise invalid(wrong)


def _hosts(pipeline: Flow) -> Iterator[tuple[str, str]]:
    """Field and host of each address."""
    clusters = [("source", pipeline.source), ("sink", pipeline.sink), ("errors.cluster", pipeline.errors.cluster)]
    for path, part in clusters:
        if isinstance(part, OpenSearchSink):
            yield from (
                (f"{path}.hosts.{place}", host_of(url.partition("://")[2])) for place, url in enumerate(part.hosts)
            )
        elif isinstance(part, KafkaCluster):
            yield from ((f"{path}.bootstrap.{place}", host_of(each)) for place, each in enumerate(part.bootstrap))
        if isinstance(part, KafkaSource) and part.debezium.registry is not None:
            yield f"{path}.debezium.registry.url", host_of(urlsplit(part.debezium.registry.url).netloc)


def _matches(host: str, pattern: str) -> bool:
    found = address_of(host)
    if found is None:
        return fnmatchcase(host, pattern.lower())
    try:
        return found in ipaddress.ip_network(pattern, strict=False)
    except (ValueError, TypeError):
        return False
