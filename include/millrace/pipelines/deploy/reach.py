"""Where a declaration may lead this service and its workers: whoever may declare a pipeline chooses the addresses that they connect to.

Link-local addresses are refused always: there are the keys of the machine that a cloud hands out (169.254.169.254), and no Kafka or
OpenSearch. ``reach.hosts`` of pipeline-config.yaml allows those that it names, and no others. Where a name leads is looked at again by the connection
to OpenSearch itself (sinks/opensearch/connection.py), and before a client of Kafka is made (pipelines/brokers.py).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from millrace.pipelines.model.addresses import address_of, host_of, is_forbidden, leads_astray
from millrace.pipelines.model.kafka import KafkaCluster
from millrace.pipelines.model.part import Problem, invalid
from millrace.pipelines.model.pipeline import Pipeline
from millrace.pipelines.model.sinks import OpenSearchSink


def require_allowed(pipeline: Pipeline, hosts: Sequence[str]) -> None:
    """Raises PipelineInvalid where an address is none of `hosts` (patterns of names, or networks; none: all), or a link-local one."""
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


def require_reachable(pipeline: Pipeline) -> None:
    """As :func:`require_allowed`, of what the names are now: a name may lead to such an address. Raises PipelineInvalid."""
    wrong = []
    for path, host in _hosts(pipeline):
        if leads_astray(host):
            wrong.append(Problem(path, f"{host} is an address that no pipeline may reach", "reach"))
    if wrong:
        raise invalid(wrong)


def _hosts(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """Field and host of each address."""
    clusters = [("source", pipeline.source), ("sink", pipeline.sink), ("errors.cluster", pipeline.errors.cluster)]
    for path, part in clusters:
        if isinstance(part, OpenSearchSink):
            yield from (
                (f"{path}.hosts.{place}", host_of(url.partition("://")[2])) for place, url in enumerate(part.hosts)
            )
        elif isinstance(part, KafkaCluster):
            yield from ((f"{path}.bootstrap.{place}", host_of(each)) for place, each in enumerate(part.bootstrap))


def _matches(host: str, pattern: str) -> bool:
    found = address_of(host)
    if found is None:
        return fnmatchcase(host, pattern.lower())
    try:
        return found in ipaddress.ip_network(pattern, strict=False)
    except (ValueError, TypeError):
        return False
