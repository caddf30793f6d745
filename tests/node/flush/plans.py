"""What the flusher would do next, for tests that run and commit for themselves."""

from __future__ import annotations

from millrace.base.settings import Settings
from millrace.node.flush.definition import FlushPlanner
from millrace.node.flush.flusher import FlushPlan
from millrace.node.range_loop.schedule import UNBOUNDED


def plans_of(settings: Settings) -> list[FlushPlan]:
    """The next range of every PChannel that has one."""
    planner = FlushPlanner(settings)
    return planner.plan(planner.ends(), max_bytes=UNBOUNDED)
