"""Where the boxes and lines of the page *Streams* lie: a column a level, from left to right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.flows.spark_host.status import StreamStatus
from millrace.observe.streams import StreamEndpoint, StreamsView, stream_node

WIDTHS: Final = {"stream": 236, "table": 168}
HEIGHTS: Final = {"stream": 92, "table": 44}
GAP: Final = (56, 18)
"""Between columns, and between the boxes of one."""
_LETTERS: Final = {"stream": 18, "table": 20}


@dataclass(frozen=True, slots=True)
class Box:
    """A stream or a table."""

    id: str
    x: float
    y: float
    width: int
    height: int
    title: str
    """Short enough for its box."""
    stream: StreamStatus | None
    table: StreamEndpoint | None


@dataclass(frozen=True, slots=True)
class Edge:
    """From a table to a stream or from there to a table."""

    path: str
    active: bool
    """Whether the stream runs."""


@dataclass(frozen=True, slots=True)
class GraphLayout:
    width: float
    height: float
    boxes: list[Box]
    lines: list[Edge]


def graph_layout(view: StreamsView) -> GraphLayout:
    """The boxes in columns; in a column by the mean place of what leads to them, so that few lines cross."""
    streams = {stream_node(each): each for each in view.streams}
    tables = {each.id: each for each in view.tables}
    columns: dict[int, list[str]] = {}
    for node, level in view.levels.items():
        columns.setdefault(level, []).append(node)
    before: dict[str, list[str]] = {}
    for row in view.streams:
        before.setdefault(stream_node(row), []).extend(row.reads)
        for each in row.writes:
            before.setdefault(each, []).append(stream_node(row))
    tall = max((_height(nodes, streams) for nodes in columns.values()), default=0.0)
    middles: dict[str, float] = {}
    boxes: dict[str, Box] = {}
    x = 0.0
    for level in sorted(columns):
        nodes = columns[level]
        mean = {
            each: _mean([middles[one] for one in before.get(each, ()) if one in middles], tall / 2) for each in nodes
        }
        y = (tall - _height(nodes, streams)) / 2
        kinds = {each: "stream" if each in streams else "table" for each in nodes}
        for each in sorted(nodes, key=lambda name: (mean[name], name)):
            kind, stream, table = kinds[each], streams.get(each), tables.get(each)
            name = stream.name if stream is not None else table.name if table is not None else each
            boxes[each] = Box(each, x, y, WIDTHS[kind], HEIGHTS[kind], _short(name, _LETTERS[kind]), stream, table)
            middles[each] = y + HEIGHTS[kind] / 2
            y += HEIGHTS[kind] + GAP[1]
        x += max(WIDTHS[kind] for kind in kinds.values()) + GAP[0]
    lines = []
    for node, row in streams.items():
        flows = row.state == "running"
        lines += [_line(boxes[each], boxes[node], flows) for each in row.reads]
        lines += [_line(boxes[node], boxes[each], flows) for each in row.writes]
    return GraphLayout(max(x - GAP[0], 0.0), tall, list(boxes.values()), lines)


def _height(nodes: list[str], streams: dict[str, StreamStatus]) -> float:
    return sum(HEIGHTS["stream" if each in streams else "table"] for each in nodes) + GAP[1] * (len(nodes) - 1)


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _short(name: str, letters: int) -> str:
    """A long name by its end: paths differ there."""
    return name if len(name) <= letters else f"…{name[1 - letters :]}"


def _line(one: Box, other: Box, flows: bool) -> Edge:
    x1, y1, x2, y2 = one.x + one.width, one.y + one.height / 2, other.x, other.y + other.height / 2
    bend = max(30.0, abs(x2 - x1) / 2)
    return Edge(f"M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}", flows)
