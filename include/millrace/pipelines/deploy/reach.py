"""Checks of a declaration's addresses and files: its author chooses where this service and its workers connect.

Link-local addresses are always refused: there a cloud serves the machine's keys (169.254.169.254), and no Kafka or
OpenSearch. ``reach.hosts`` of pipeline-config.yaml restricts the others to those that it lists. The connection to
OpenSearch checks the resolved address again (sinks/opensearch/connection.py), and so does flows/kafka/brokers.py before
it creates a Kafka client.

Files are refused, except those below ``reach.folders``: a worker may read files that the author may not.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from millrace.flows.declare.addresses import address_of, is_forbidden, leads_astray
from millrace.flows.declare.configuration import Reach
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import Part, Problem, invalid


def require_allowed(pipeline: Flow, reach: Reach) -> None:
    """Raise PipelineInvalid if an address is link-local or not in `reach`, or a file is not in one of its folders."""
    wrong, hosts = [], reach.hosts
    for path, part in _parts(pipeline):
        for field, file in part.local_paths():
            if not any(_is_below(file, folder) for folder in reach.folders):
                words = "is not in a folder that flows of this service may read or write (reach.folders)"
                wrong.append(Problem(f"{path}.{field}", f"{file} {words}", "reach"))
    for path, host in _hosts(pipeline):
        if hosts and not any(_matches(host, pattern) for pattern in hosts):
            wrong.append(
                Problem(path, f"{host} is not among the hosts that this service may reach (reach.hosts)", "reach")
            )
        elif is_forbidden(host):
            wrong.append(Problem(path, f"{host} is a forbidden address", "reach"))
    if wrong:
        raise invalid(wrong)


def require_reachable(pipeline: Flow) -> None:
    """Check the current addresses of the names like :func:`require_allowed`. Raises PipelineInvalid."""
    wrong = []
    for path, host in _hosts(pipeline):
        if leads_astray(host):
            wrong.append(Problem(path, f"{host} is a forbidden address", "reach"))
    if wrong:
        raise invalid(wrong)


def _hosts(flow: Flow) -> Iterator[tuple[str, str]]:
    """Yield field and host of each address."""
    for path, part in _parts(flow):
        yield from ((f"{path}.{field}", host) for field, host in part.addresses())


def _parts(flow: Flow) -> Iterator[tuple[str, Part]]:
    yield from (("source", flow.source), ("sink", flow.sink))
    if flow.errors.cluster is not None:
        yield "errors.cluster", flow.errors.cluster


def _is_below(file: str, folder: str) -> bool:
    """Return whether `file` is in `folder`, after links are resolved. Both may be URIs of an object store."""
    file, folder = file.removeprefix("file://"), folder.removeprefix("file://")
    if "://" in file or "://" in folder:
        return ".." not in file.split("/") and file.startswith(f"{folder.rstrip('/')}/")
    return Path(file).resolve().is_relative_to(Path(folder).resolve())


def _matches(host: str, pattern: str) -> bool:
    found = address_of(host)
    if found is None:
        return fnmatchcase(host, pattern.lower())
    try:
        return found in ipaddress.ip_network(pattern, strict=False)
    except (ValueError, TypeError):
        return False
