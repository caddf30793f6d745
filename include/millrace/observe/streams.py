"""The graph of declared streams: their connections, and the status of each, read from the files that they write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.flows.spark_host.status import StreamStatus, statuses

MAX_STREAMS: Final = 500
"""Maximum number of streams shown. Beyond that a graph is unreadable."""
_RUNNING: Final = "running"


class StreamEndpoint(BaseModel):
    """A source or target of a stream: a collection, a Delta table, a topic, a function."""

    id: str
    kind: str
    name: str


class StreamsView(BaseModel):
    """All declared streams by name, and the tables between them."""

    streams: list[StreamStatus]
    tables: list[StreamEndpoint]
    levels: dict[str, int]
    """Distance from a table that no stream writes, by table id, or by ``stream:`` and the stream's name."""
    more: int = 0
    """Number of streams left out."""


def streams_view(settings: Settings) -> StreamsView:
    """Return the graph. Raises InvalidStream if a declaration cannot be read."""
    found = statuses(settings)
    rows = found[:MAX_STREAMS]
    ids = dict.fromkeys(name for each in rows for name in (*each.reads, *each.writes))
    tables = [StreamEndpoint(id=each, kind=each.partition(":")[0], name=each.partition(":")[2]) for each in ids]
    edges = [(name, stream_node(each)) for each in rows for name in each.reads]
    edges += [(stream_node(each), name) for each in rows for name in each.writes]
    return StreamsView(streams=rows, tables=tables, levels=levels(edges), more=len(found) - len(rows))


def stream_node(stream: StreamStatus) -> str:
    """Return the stream's key in the levels, which no table has."""
    return f"stream:{stream.name}"


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


def stream_metrics(view: StreamsView) -> str:
    """Return the metrics of the streams from the read model: a stream that does not run reports none itself."""
    metrics = Metrics()
    for each in view.streams:
        metrics.stream_running.labels(each.name).set(each.state == _RUNNING)
    return metrics.render().decode()
