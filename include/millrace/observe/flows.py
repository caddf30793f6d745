"""The graph of flows: their connections, and the status of each, read from the files that they write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from pydantic import BaseModel

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.flows.directory import flow_statuses
from millrace.flows.spark_host import status as spark_host
from millrace.flows.spark_host.status import StreamStatus
from millrace.flows.status import FlowState, FlowStatus

MAX_FLOWS: Final = 500
"""Maximum number of flows shown. Beyond that a graph is unreadable."""


class Endpoint(BaseModel):
    """A source or target of a flow: a collection, a Delta table, a topic, an index, a function."""

    id: str
    kind: str
    name: str


class FlowsView(BaseModel):
    """Flows by name, and what lies between them."""

    flows: list[FlowStatus]
    endpoints: list[Endpoint]
    levels: dict[str, int]
    """Distance from a source that no flow writes, by endpoint id, or by :attr:`FlowStatus.node`."""
    more: int = 0
    """Number of flows left out."""


class StreamsView(BaseModel):
    """The same of declared streams alone, in the form of the API."""

    streams: list[StreamStatus]
    tables: list[Endpoint]
    levels: dict[str, int]
    """Distance from a table that no stream writes, by table id, or by ``stream:`` and the stream's name."""
    more: int = 0
    """Number of streams left out."""


def flows_view(settings: Settings, *, shown: Callable[[FlowStatus], bool] = lambda flow: True) -> FlowsView:
    """Return the graph of the flows that `shown` accepts. Raises InvalidStream if a declaration cannot be read.

    A flow of several topics is connected to each of them.
    """
    found = [_topic_by_topic(each) for each in flow_statuses(settings) if shown(each)]
    return graph_of(found)


def streams_view(settings: Settings) -> StreamsView:
    """Return the graph of declared streams. Raises InvalidStream if a declaration cannot be read."""
    view = graph_of(spark_host.flow_statuses(settings))
    rows = [StreamStatus.of(each) for each in view.flows]
    return StreamsView(streams=rows, tables=view.endpoints, levels=view.levels, more=view.more)


def graph_of(found: list[FlowStatus]) -> FlowsView:
    """Return the graph of these flows; of at most MAX_FLOWS."""
    rows = found[:MAX_FLOWS]
    ids = dict.fromkeys(name for each in rows for name in (*each.reads, *each.writes))
    ends = [Endpoint(id=each, kind=each.partition(":")[0], name=each.partition(":")[2]) for each in ids]
    edges = [(name, each.node) for each in rows for name in each.reads]
    edges += [(each.node, name) for each in rows for name in each.writes]
    return FlowsView(flows=rows, endpoints=ends, levels=levels(edges), more=len(found) - len(rows))


def _topic_by_topic(flow: FlowStatus) -> FlowStatus:
    reads = [
        f"kafka:{topic}" if kind == "kafka" else each
        for each in flow.reads
        for kind, _, name in [each.partition(":")]
        for topic in name.split(",")
    ]
    return flow.model_copy(update={"reads": tuple(dict.fromkeys(reads))})


def levels(edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return each node's longest distance from a node without predecessors.

    Cycles count from the node visited first.
    """
    following: dict[str, list[str]] = {}
    for one, other in edges:
        following.setdefault(one, []).append(other)
        following.setdefault(other, [])
    order: list[str] = []
    seen: dict[str, bool] = {}
    roots = set(following) - {each for found in following.values() for each in found}
    back: set[tuple[str, str]] = set()
    for root in sorted(following, key=lambda each: (each not in roots, each)):
        path: list[tuple[str, int]] = [] if root in seen else [(root, 0)]
        while path:  # depth first, without recursion, because a chain may be long
            node, turn = path.pop()
            seen[node] = True
            if turn < len(following[node]):
                path.append((node, turn + 1))
                other = following[node][turn]
                if other not in seen:
                    path.append((other, 0))
                elif seen[other]:
                    back.add((node, other))
            else:
                seen[node] = False
                order.append(node)
    found = dict.fromkeys(following, 0)
    for node in reversed(order):
        for other in following[node]:
            if (node, other) not in back:
                found[other] = max(found[other], found[node] + 1)
    return found


def flow_metrics(view: StreamsView) -> str:
    """Return the metrics of the streams from the read model: a stream that does not run reports none itself."""
    metrics = Metrics()
    for each in view.streams:
        metrics.flow_running.labels(each.name, "spark").set(each.state == FlowState.RUNNING)
    return metrics.render().decode()
