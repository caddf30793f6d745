"""Retention of the ingress log by size and by time, applied by the process that owns it, and bounded by the checkpoints.

Off unless the settings `log_retention_bytes` or `log_retention_seconds` say otherwise. What retention gives up is old, or beyond
the size, and both checkpoints have passed it (millrace.node.retention.truncation): a PChannel that is parked, or whose flusher is behind,
keeps everything that it still needs, however much that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol, runtime_checkable

from millrace.base.errors import TableNotFound
from millrace.base.failpoint import hit
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.log.protocol import Log, LogService
from millrace.message.ids import LogId
from millrace.node.retention.removal_lock import removal_permit
from millrace.node.retention.truncation import read_synced_tables, truncation_limit
from millrace.runtime.periodic import PeriodicTask
from millrace.tables.quality_state import failed_critical_expectations

PASS_SECONDS: Final = 60.0
"""Seconds between two passes."""

_log = logging.getLogger(__name__)


@runtime_checkable
class LogWithRetention(Log, Protocol):
    """A log with retention of its own, as the embedded one is."""

    def enforce_retention(
        self, *, allowed: LogId, retention_bytes: int | None = None, retention_ms: int | None = None
    ) -> int: ...


def retention_configured(settings: Settings) -> bool:
    """Whether a deployment has a retention for its log."""
    return bool(settings.log_retention_bytes or settings.log_retention_seconds)


def enforce_log_retention(settings: Settings, service: LogService) -> dict[str, int]:
    """Give up what is beyond the retention of each PChannel's log, as far as its checkpoints allow; bytes freed.

    May be killed at any instant and repeated. While a backup holds it back (millrace.node.retention.removal_lock), or quality does, nothing
    is freed.
    """
    blocks = failed_critical_expectations(settings)
    if blocks:
        _log.warning("nothing of the log is given up: critical expectations stand failed (%s)", ", ".join(blocks))
        return {}
    with removal_permit(settings) as free:
        return _enforce(settings, service) if free else {}


def _enforce(settings: Settings, service: LogService) -> dict[str, int]:
    try:
        wal, checkpoints = read_synced_tables(settings)
    except TableNotFound:
        return {}
    freed = {}
    for pchannel, position in wal.valid_positions(wal.pchannels()).items():
        allowed = truncation_limit(position, checkpoints.get(pchannel))
        # A state without a checksum, of an earlier build, is not proved here: the next commit has one.
        if allowed is None or not position.has_checksum:
            continue
        log = service.open(pchannel)
        if isinstance(log, LogWithRetention):
            hit("retention.before")
            freed[pchannel] = log.enforce_retention(
                allowed=allowed,
                retention_bytes=settings.log_retention_bytes,
                retention_ms=int(settings.log_retention_seconds * 1000),
            )
            hit("retention.after")
        log.close()
    return freed


class LogRetention(PeriodicTask):
    """Enforces the retention every `pause` seconds."""

    def __init__(
        self,
        settings: Settings,
        service: LogService,
        *,
        pause: float = PASS_SECONDS,
        on_pass: Callable[[], None] = lambda: None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(name="log-retention", interval=pause)
        self._settings = settings
        self._service = service
        self._passed = on_pass
        self._metrics = metrics

    def run_once(self) -> None:
        freed = enforce_log_retention(self._settings, self._service)
        if self._metrics is not None:
            for pchannel, size in freed.items():
                self._metrics.truncated_bytes_total.labels(pchannel).inc(size)
        if any(freed.values()):
            _log.info("retention gave up %s bytes of the log", freed)
        self._passed()
