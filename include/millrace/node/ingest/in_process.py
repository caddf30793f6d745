"""Ingest in the calling process, for maintenance, the command line and tests."""

from __future__ import annotations

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.node.ingest.definition import IngestLoop
from millrace.node.range_loop.in_process import run_to_end
from millrace.tables.wal.table import WalTable


def ingest_to_end(settings: Settings, service: LogService, *, metrics: Metrics | None = None) -> dict[str, int]:
    """Bring the ``wal`` table to where the logs of `service` end now; the tick that each PChannel that moved has reached.

    Raises as :func:`run_to_end` does: ChannelParked for a range that cannot be run, TableUnavailable for one that may be run later.
    """
    ingest = IngestLoop(settings, service, WalTable.create(settings.wal_uri))
    return run_to_end(ingest, ingest.committer(metrics))
