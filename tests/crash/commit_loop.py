"""A streaming node without Spark that commits until it is killed: python commit_loop.py <data folder>."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.definition import IngestLoop
from millrace.node.ingest.ingester import IngestPlan, run_ingest
from millrace.node.range_loop.schedule import START, RangeSchedule
from millrace.rpc.launch import launch_of
from millrace.rpc.remote_log import RemoteLogService
from millrace.tables.wal.table import WalTable


def commit_what_is_there(settings: Settings, log: LogService, planner: RangeSchedule[IngestPlan]) -> int:
    """Plan one micro-batch, run its ranges, commit them; how many PChannels moved."""
    plans = planner.plan(planner.next_offset(START))
    reports = [run_ingest(plan, log=log.open(plan.base.pchannel), table=Path(settings.wal_uri)) for plan in plans]
    failures = [report.failure for report in reports if report.failure is not None and not report.failure.retriable]
    assert not failures, failures
    return len(WalCommitter(WalTable.open(Path(settings.wal_uri))).commit(reports).committed)


def main() -> None:
    settings = Settings(data_dir=Path(sys.argv[1]))
    WalTable.create(Path(settings.wal_uri))
    with RemoteLogService.connect(settings.log_path, launch=launch_of(settings)) as log:
        planner = RangeSchedule(IngestLoop(settings, log).planner(), parked=settings.parked_path)
        while True:
            try:
                moved = commit_what_is_there(settings, log, planner)
            except MillraceError as error:
                if not error.retriable:
                    raise
                moved = 0
            if not moved:
                threading.Event().wait(0.05)


if __name__ == "__main__":
    main()
