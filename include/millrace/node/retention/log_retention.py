"""Retention of the ingress log by size and time, applied by the process that owns the log and bounded by the
checkpoints.

Off unless `log_retention_bytes` or `log_retention_seconds` is set. Retention removes entries that are too old, or
beyond the size, and that both checkpoints have passed (millrace.node.retention.truncation). A PChannel that is parked,
or whose flusher lags, keeps all entries that it still needs, whatever their size.
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
    """A log with its own retention, such as the embedded one."""

    def enforce_retention(
        self, *, allowed: LogId, retention_bytes: int | None = None, retention_ms: int | None = None
    ) -> int: ...


def retention_configured(settings: Settings) -> bool:
    """Return whether the settings ask for retention of the log."""
    return bool(settings.log_retention_bytes or settings.log_retention_seconds)


def enforce_log_retention(settings: Settings, service: LogService) -> dict[str, int]:
    """Remove what exceeds the retention of each PChannel's log, as far as its checkpoints allow. Returns the bytes
    freed.

    May be killed at any time and repeated. Frees nothing while a backup blocks removals
    (millrace.node.retention.removal_lock) or while critical quality expectations fail.
    """
    blocks = failed_critical_expectations(settings)
    if blocks:
        _log.warning("the log keeps all entries: critical expectations are failing (%s)", ", ".join(blocks))
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
        # A state row of an earlier build has no checksum and is not proved here. The next commit writes one with a
        # checksum.
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
            _log.info("retention freed bytes of the log: %s", freed)
        self._passed()
