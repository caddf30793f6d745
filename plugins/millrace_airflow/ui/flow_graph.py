"""The layout of the graph on the page *Flows*: one column for each level, from left to right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.flows.status import FlowStatus
from millrace.observe.flows import Endpoint, FlowsView

WIDTHS: Final = {"flow": 236, "end": 168}
HEIGHTS: Final = {"flow": 92, "end": 44}
GAP: Final = (56, 18)
"""The gap between columns, and between the boxes of a column."""
_LETTERS: Final = {"flow": 18, "end": 20}


@dataclass(frozen=True, slots=True)
class Box:
    """A flow, or one of its inputs and outputs."""

    id: str
    x: float
    y: float
    width: int
    height: int
    title: str
    """The name, shortened to fit its box."""
    flow: FlowStatus | None
    end: Endpoint | None


@dataclass(frozen=True, slots=True)
class Edge:
    """A line from a source to a flow, or from a flow to its sink."""

    path: str
    active: bool
    """Whether the flow runs."""


@dataclass(frozen=True, slots=True)
class GraphLayout:
    width: float
    height: float
    boxes: list[Box]
    lines: list[Edge]


def graph_layout(view: FlowsView) -> GraphLayout:
    """Return the boxes in columns.

    Each column is ordered by the mean place of its boxes' inputs, so that few lines cross.
    """
    flows = {each.node: each for each in view.flows}
    ends = {each.id: each for each in view.endpoints}
    columns: dict[int, list[str]] = {}
    for node, level in view.levels.items():
        columns.setdefault(level, []).append(node)
    before: dict[str, list[str]] = {}
    for row in view.flows:
        before.setdefault(row.node, []).extend(row.reads)
        for each in row.writes:
            before.setdefault(each, []).append(row.node)
    tall = max((_height(nodes, flows) for nodes in columns.values()), default=0.0)
    middles: dict[str, float] = {}
    boxes: dict[str, Box] = {}
    x = 0.0
    for level in sorted(columns):
        nodes = columns[level]
        mean = {
            each: _mean([middles[one] for one in before.get(each, ()) if one in middles], tall / 2) for each in nodes
        }
        y = (tall - _height(nodes, flows)) / 2
        kinds = {each: "flow" if each in flows else "end" for each in nodes}
        for each in sorted(nodes, key=lambda name: (mean[name], name)):
            kind, flow, end = kinds[each], flows.get(each), ends.get(each)
            name = flow.name if flow is not None else end.name if end is not None else each
            boxes[each] = Box(each, x, y, WIDTHS[kind], HEIGHTS[kind], _short(name, _LETTERS[kind]), flow, end)
            middles[each] = y + HEIGHTS[kind] / 2
            y += HEIGHTS[kind] + GAP[1]
        x += max(WIDTHS[kind] for kind in kinds.values()) + GAP[0]
    lines = []
    for node, row in flows.items():
        active = row.state.live
        lines += [_line(boxes[each], boxes[node], active) for each in row.reads]
        lines += [_line(boxes[node], boxes[each], active) for each in row.writes]
    return GraphLayout(max(x - GAP[0], 0.0), tall, list(boxes.values()), lines)


def _height(nodes: list[str], flows: dict[str, FlowStatus]) -> float:
    return sum(HEIGHTS["flow" if each in flows else "end"] for each in nodes) + GAP[1] * (len(nodes) - 1)


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _short(name: str, letters: int) -> str:
    """Shorten a long name to its end, where paths differ."""
    return name if len(name) <= letters else f"…{name[1 - letters :]}"


def _line(one: Box, other: Box, active: bool) -> Edge:
    x1, y1, x2, y2 = one.x + one.width, one.y + one.height / 2, other.x, other.y + other.height / 2
    bend = max(30.0, abs(x2 - x1) / 2)
    return Edge(f"M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}", active)
