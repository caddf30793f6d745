"""Ingest in the calling process, for maintenance, the command line and tests."""

from __future__ import annotations

from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.log.protocol import LogService
from millrace.node.ingest.definition import Ingest
from millrace.node.range.in_process import drain
from millrace.tables.wal.table import WalTable


def catch_up(settings: Settings, service: LogService, *, metrics: Metrics | None = None) -> dict[str, int]:
    """Bring the ``wal`` table to where the logs of `service` end now; the tick that each PChannel that moved has reached.

    Raises as :func:`drain` does: ChannelParked for a range that cannot be run, TableUnavailable for one that may be run later.
    """
    ingest = Ingest(settings, service, WalTable.create(settings.wal_uri))
    return drain(ingest, ingest.committer(metrics))
