"""The flusher's loop without Spark: plan, run and commit in this process, for maintenance, the CLI and tests.

jobs/flusher.py does the same with Spark's scheduling and retries around the same three functions.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from millrace.base.errors import MillraceError, TableUnavailable
from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush.commit import FlushCommitter
from millrace.node.flush.flusher import FlushPlan, plan_flush, run_flush
from millrace.storage.table import open_table
from millrace.tables.collections.flush_tables import Checkpoint, read_checkpoints
from millrace.tables.wal.reader import MAX_TICK, WalSnapshot


def plan_flushes(
    settings: Settings, wal: WalSnapshot, *, up_to_tick: int = MAX_TICK, max_bytes: int | None = None
) -> list[FlushPlan]:
    """The next range of every PChannel that has one, each from its checkpoint."""
    path = settings.checkpoints_uri
    checkpoints = read_checkpoints(open_table(path))
    plans = []
    for pchannel in wal.pchannels():
        checkpoint = checkpoints.get(pchannel, Checkpoint(pchannel))
        plan = plan_flush(wal, checkpoint, up_to_tick=up_to_tick, max_bytes=max_bytes)
        if plan is not None:
            plans.append(plan)
    return plans


def flush(
    settings: Settings,
    *,
    up_to_tick: int = MAX_TICK,
    max_bytes: int | None = None,
    metrics: Metrics | None = None,
    seam: Callable[[str], None] = hit,
) -> dict[str, int]:
    """Flush what the WAL has now (up to `up_to_tick`), in ranges of about `max_bytes`; the tick each PChannel has reached.

    Another flusher may be at work: what it commits first is not committed again. Raises what keeps a PChannel from being
    flushed (ChannelParked, Malformed, StagedFileDamaged, TableUnavailable), once the others are flushed.
    """
    wal = WalSnapshot.open(settings.wal_uri)
    if wal is None:
        return {}
    committer = FlushCommitter(settings, metrics=metrics, seam=seam)
    reached: dict[str, int] = {}
    parked: dict[str, MillraceError] = {}
    while True:
        plans = plan_flushes(
            settings, wal, up_to_tick=up_to_tick, max_bytes=max_bytes or settings.max_bytes_per_trigger
        )
        plans = [plan for plan in plans if plan.checkpoint.pchannel not in parked]
        if not plans:
            break
        reports = []
        for plan in plans:
            try:
                reports.append(run_flush(settings, plan))
            except MillraceError as error:
                parked[plan.checkpoint.pchannel] = error
            except (OSError, pa.ArrowException) as error:
                parked[plan.checkpoint.pchannel] = TableUnavailable(
                    f"{plan.checkpoint.pchannel} cannot be flushed now: {error}. Nothing of that range was committed; "
                    "try again."
                )
        result = committer.commit(reports)
        parked |= result.parked
        reached.update({report.pchannel: report.new_checkpoint.time_tick for report in result.committed})
    for failure in parked.values():
        raise failure
    return reached
