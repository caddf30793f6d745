"""A streaming node without Spark that lives for one micro-batch: python commit_once.py <log folder> <wal table>."""

from __future__ import annotations

import sys
from pathlib import Path

from millrace.log.rocksmq.service import RocksMQ
from millrace.node.ingest.committer import WalCommitter
from millrace.node.ingest.ingester import run_ingest
from millrace.node.range_loop.schedule import START
from millrace.tables.wal.table import WalTable
from tests.node.schedules import log_schedule


def commit_once(log: Path, wal: Path | str) -> int:
    """Commit what the log holds beyond the table at `wal`; the rows that went in."""
    with RocksMQ(log) as service:
        planner = log_schedule(service, WalTable.create(wal), parked=log.parent / "parked")
        plans = planner.plan(planner.next_offset(START))
        reports = [run_ingest(plan, log=service.open(plan.base.pchannel), table=wal) for plan in plans]
        # A checkpoint and a clean-up behind each commit, so that their crash points are passed.
        result = WalCommitter(WalTable.open(wal), checkpoint_commits=1, keep_commits=0).commit(reports)
        return sum(item.totals.digest.rows for item in result.committed)


if __name__ == "__main__":
    commit_once(Path(sys.argv[1]), sys.argv[2])
