"""The streaming node's loop without Spark: plan, run and commit in this process, for maintenance, the CLI and tests.

jobs/streaming_node.py does the same with Spark's scheduling and retries around the same three functions.
"""

from __future__ import annotations

from millrace.base.errors import TableUnavailable
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.node.ingest.committer import Committer
from millrace.node.ingest.planner import START, Planner
from millrace.node.ingest.ranges import run_range
from millrace.node.range.parking import Parked
from millrace.tables.wal.table import WalTable


def catch_up(settings: Settings, service: LogService, *, metrics: Metrics | None = None) -> dict[str, int]:
    """Bring the ``wal`` table to where the logs of `service` end now; the tick that each PChannel that moved has reached.

    Another node may be at work: what it commits first is not committed again. Once
    the others are committed, raises ChannelParked for a range that cannot be run, and TableUnavailable for one that may be
    run later.
    """
    table = WalTable.create(settings.wal_uri)
    planner = Planner(service, table, parked=settings.parked_path)
    committer, offset = Committer(table, metrics=metrics), START
    reached: dict[str, int] = {}
    while (following := planner.latest(offset)) != offset:
        reports = []
        for plan in planner.plan(following):
            log = service.open(plan.base.pchannel)
            try:
                reports.append(run_range(plan, log=log, table=settings.wal_uri))
            finally:
                log.close()
        result = committer.commit(reports)
        reached.update({item.pchannel: item.last_tick for item in result.committed})
        for report in reports:
            failure = report.failure
            if failure is not None and failure.retriable:
                raise TableUnavailable(
                    f"{report.pchannel} cannot go on from {failure.position} now: {failure.code}: {failure.message}. "
                    "Nothing of that range was committed; try again."
                )
            if failure is not None:
                raise Parked.of(report.pchannel, failure).error()
        offset = following
    return reached
