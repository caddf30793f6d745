"""The schedule of ingest over a log at hand, for tests that do for themselves what Spark would."""

from __future__ import annotations

from pathlib import Path

from millrace.log.protocol import LogService
from millrace.node.ingest.ingester import IngestPlan
from millrace.node.ingest.planner import LogPlanner
from millrace.node.range_loop.schedule import RangeSchedule, StallBackoff
from millrace.tables.wal.table import WalTable


def log_schedule(
    service: LogService, table: WalTable, *, parked: Path, stalls: StallBackoff | None = None
) -> RangeSchedule[IngestPlan]:
    """Of all PChannels of `service`; who closes it closes the service for itself."""
    return RangeSchedule(LogPlanner(lambda: service, table, parked=parked), parked=parked, stalls=stalls)
