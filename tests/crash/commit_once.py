"""A streaming node without Spark that lives for one micro-batch: python commit_once.py <log folder> <wal folder>."""

from __future__ import annotations

import sys
from pathlib import Path

from millrace.log.rocksmq.service import RocksMQ
from millrace.node.ingest.committer import Committer
from millrace.node.ingest.ranges import run_range
from millrace.node.range.schedule import START
from millrace.tables.wal.table import WalTable
from tests.node.schedules import log_schedule


def commit_once(log: Path, wal: Path) -> int:
    """Commit what the log holds beyond the table; the rows that went in."""
    with RocksMQ(log) as service:
        planner = log_schedule(service, WalTable.create(wal), parked=wal.parent / "parked")
        plans = planner.plan(planner.latest(START))
        reports = [run_range(plan, log=service.open(plan.base.pchannel), table=wal) for plan in plans]
        # A checkpoint and a clean-up behind each commit, so that their crash points are passed.
        result = Committer(WalTable.open(wal), checkpoint_commits=1, keep_commits=0).commit(reports)
        return sum(item.totals.digest.rows for item in result.committed)


if __name__ == "__main__":
    commit_once(Path(sys.argv[1]), Path(sys.argv[2]))
