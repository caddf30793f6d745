"""The schedule of ingest over a log at hand, for tests that do for themselves what Spark would."""

from __future__ import annotations

from pathlib import Path

from millrace.log.protocol import LogService
from millrace.node.ingest.planner import LogPlanner
from millrace.node.ingest.ranges import RangePlan
from millrace.node.range.schedule import Schedule, Stalls
from millrace.tables.wal.table import WalTable


def log_schedule(
    service: LogService, table: WalTable, *, parked: Path, stalls: Stalls | None = None
) -> Schedule[RangePlan]:
    """Of all PChannels of `service`; who closes it closes the service for itself."""
    return Schedule(LogPlanner(lambda: service, table, parked=parked), parked=parked, stalls=stalls)
