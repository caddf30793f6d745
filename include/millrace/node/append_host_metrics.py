"""What the append host counts, a run of the chain at a time: columns in, a few counters out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from millrace.metrics import Metrics
from millrace.wal.chain import Outcome
from millrace.wal.state import ChannelState

ACCEPTED = "accepted"
REJECTED = "rejected"


class HostMetrics:
    """One PChannel's counters and gauges in `metrics`."""

    def __init__(self, metrics: Metrics, pchannel: str) -> None:
        self._metrics = metrics
        self._pchannel = pchannel
        self._duration = metrics.wal_append_message_duration_seconds.labels(pchannel)
        self._log_duration = metrics.wal_impls_append_message_duration_seconds.labels(pchannel)
        self._log_bytes = metrics.wal_impls_append_bytes_total.labels(pchannel)
        self._allocated = metrics.wal_last_allocated_time_tick.labels(pchannel)
        self._confirmed = metrics.wal_last_confirmed_time_tick.labels(pchannel)
        self._txns = metrics.wal_inflight_txn.labels(pchannel)
        self._rows = metrics.wal_growing_segment_rows_total.labels(pchannel)
        self._bytes = metrics.wal_growing_segment_bytes.labels(pchannel)
        metrics.wal_parked.labels(pchannel).set(0)

    def appended(self, seconds: float, *, bytes: int) -> None:
        """The log acknowledged an append."""
        self._log_duration.observe(seconds)
        self._log_bytes.inc(bytes)

    def answered(self, seconds: float) -> None:
        """An append has its result."""
        self._duration.observe(seconds)

    def decided(self, outcome: Outcome) -> None:
        """A run of the chain was decided."""
        metrics, pchannel = self._metrics, self._pchannel
        for rows, status in ((outcome.messages, ACCEPTED), (outcome.rejections, REJECTED)):
            for name, count in _counts(rows, "type"):
                metrics.wal_append_message_total.labels(pchannel, name, status).inc(count)
        for name, count in _counts(outcome.rejections, "reason"):
            metrics.wal_rejected_message_total.labels(pchannel, name).inc(count)
        self._stands(outcome.state)

    def _stands(self, state: ChannelState) -> None:
        self._allocated.set(state.last_tick)
        self._confirmed.set(state.last_tick)
        self._txns.set(sum(len(channel.txns) for channel in state.vchannels.values()))
        growing = [segment for channel in state.vchannels.values() for segment in channel.growing.values()]
        self._rows.set(sum(segment.rows for segment in growing))
        self._bytes.set(sum(segment.bytes for segment in growing))

    def ticked(self, reason: str) -> None:
        """A time tick was appended: because a `timer` fell due, the PChannel was `idle`, or somebody `asked`."""
        self._metrics.wal_sync_time_tick_total.labels(self._pchannel, reason).inc()

    def parked(self) -> None:
        """The PChannel cannot go on."""
        self._metrics.wal_parked.labels(self._pchannel).set(1)


def _counts(rows: pa.RecordBatch, name: str) -> Iterator[tuple[str, int]]:
    """Each value of a dictionary column and how often it stands there."""
    if not rows.num_rows:
        return
    column = rows.column(name)
    counts = np.bincount(column.indices.drop_null().to_numpy(zero_copy_only=False), minlength=1)
    for code in np.flatnonzero(counts):
        yield column.dictionary[int(code)].as_py(), int(counts[code])
