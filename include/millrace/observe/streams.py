"""Declared streams as a graph: what feeds what, and how each is doing, by the files that they leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import BaseModel

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.streams.running.status import StreamStatus, statuses

MAX_STREAMS: Final = 500
"""Streams that are shown: beyond it a page is no graph any more."""
_RUNNING: Final = "running"


class StreamEndpoint(BaseModel):
    """What streams read or write: a collection, a Delta table, a topic, a function."""

    id: str
    kind: str
    name: str


class StreamsView(BaseModel):
    """All declared streams by name, and the tables between them."""

    streams: list[StreamStatus]
    tables: list[StreamEndpoint]
    levels: dict[str, int]
    """By table's id, or stream's name behind ``stream:``: how many steps it is from a table that no stream writes."""
    more: int = 0
    """Streams that are left out."""


def streams_view(settings: Settings) -> StreamsView:
    """Raises InvalidStream where a declaration cannot be read."""
    found = statuses(settings)
    rows = found[:MAX_STREAMS]
    ids = dict.fromkeys(name for each in rows for name in (*each.reads, *each.writes))
    tables = [StreamEndpoint(id=each, kind=each.partition(":")[0], name=each.partition(":")[2]) for each in ids]
    edges = [(name, stream_node(each)) for each in rows for name in each.reads]
    edges += [(stream_node(each), name) for each in rows for name in each.writes]
    return StreamsView(streams=rows, tables=tables, levels=levels(edges), more=len(found) - len(rows))


def stream_node(stream: StreamStatus) -> str:
    """The stream's name among the levels: no table has it."""
    return f"stream:{stream.name}"


def levels(edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Of each node the longest way to it from one that nothing leads to. What goes round in a circle counts from where it is met first."""
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
        while path:  # depth first, without recursion: a chain may be long
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
    """What the read model knows of them by itself, as metrics: a stream that does not run says nothing."""
    metrics = Metrics()
    for each in view.streams:
        metrics.stream_running.labels(each.name).set(each.state == _RUNNING)
    return metrics.render().decode()
