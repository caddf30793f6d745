"""The flusher in the calling process, for maintenance, the command line and tests."""

from __future__ import annotations

from collections.abc import Callable

from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.node.flush.committer import FlushCommitter
from millrace.node.flush.definition import FlushLoop
from millrace.node.range_loop.in_process import run_to_end
from millrace.tables.wal.reader import MAX_TICK


def flush_to_end(
    settings: Settings,
    *,
    up_to_tick: int = MAX_TICK,
    max_bytes: int | None = None,
    metrics: Metrics | None = None,
    seam: Callable[[str], None] = hit,
) -> dict[str, int]:
    """Flush what the WAL has now (up to `up_to_tick`), in ranges of about `max_bytes`; the tick each PChannel has reached.

    Raises as :func:`run_to_end` does, what keeps a PChannel from being flushed: ChannelParked, Malformed, StagedFileDamaged,
    TableUnavailable.
    """
    committer = FlushCommitter(settings, metrics=metrics, seam=seam)
    return run_to_end(FlushLoop(settings, up_to_tick), committer, max_bytes=max_bytes or settings.max_bytes_per_trigger)
