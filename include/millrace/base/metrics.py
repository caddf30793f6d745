"""All metrics of Millrace, defined in one place: the write, read and sync families, with Milvus's names where it has
them.

A :class:`Metrics` belongs to one process and is passed to the code that reports; nothing registers globally. Durations
are in seconds, sizes in bytes, time ticks are hybrid timestamps (``tick >> 18`` is Unix milliseconds; the gauges
``*_lag_seconds`` give the lag). Names come from Milvus's pkg/metrics/streaming_service_metrics.go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, start_http_server
from prometheus_client.exposition import generate_latest, write_to_textfile

NAMESPACE: Final = "millrace"

FAST: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Buckets, in seconds, for operations of 0.2 ms to seconds."""
SLOW: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets, in seconds, for commits, syncs and lags."""
_BUFFERED: Final = 4096
"""Observations that a buffered histogram holds at most."""

SIZES: Final = (256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0)

Kind = Literal["counter", "gauge", "histogram"]


class MetricFamily(NamedTuple):
    """One metric family as it is exposed."""

    kind: Kind
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = FAST


FAMILIES: Final[dict[str, MetricFamily]] = {
    # Write: producer -> log -> chain -> wal.
    "wal_append_message_bytes": MetricFamily(
        "histogram", "Payload bytes of an appended message.", ("pchannel",), SIZES
    ),
    "wal_append_message_total": MetricFamily(
        "counter", "Appended messages, by result.", ("pchannel", "type", "status")
    ),
    "wal_append_message_duration_seconds": MetricFamily(
        "histogram", "Time from an append to its result.", ("pchannel",)
    ),
    "wal_append_retry_total": MetricFamily("counter", "Retries of appends.", ("pchannel",)),
    "wal_impls_append_message_duration_seconds": MetricFamily(
        "histogram", "The log's share of an append's duration.", ("pchannel",)
    ),
    "wal_impls_append_bytes_total": MetricFamily(
        "counter", "Bytes of entries that the log acknowledged.", ("pchannel",)
    ),
    "wal_interceptor_duration_seconds": MetricFamily(
        "histogram", "Time of an interceptor for one run of messages.", ("pchannel", "interceptor")
    ),
    "wal_rejected_message_total": MetricFamily("counter", "Messages that the chain rejected.", ("pchannel", "reason")),
    "wal_last_allocated_time_tick": MetricFamily("gauge", "The last allocated time tick.", ("pchannel",)),
    "wal_last_confirmed_time_tick": MetricFamily(
        "gauge", "The last confirmed time tick; the oldest open transaction holds it back.", ("pchannel",)
    ),
    "wal_committed_time_tick": MetricFamily(
        "gauge", "The time tick up to which the wal table is complete.", ("pchannel",)
    ),
    "wal_time_tick_delay_seconds": MetricFamily(
        "histogram", "Time from an entry's log timestamp to its decision; one value per chain run.", ("pchannel",)
    ),
    "wal_mvcc_update_total": MetricFamily(
        "counter", "Advances of the tick up to which reads are confirmed.", ("pchannel",)
    ),
    "wal_unconfirmed_messages": MetricFamily(
        "gauge", "Messages appended through this host and not decided yet.", ("pchannel",)
    ),
    "wal_sync_time_tick_total": MetricFamily(
        "counter", "Time ticks appended to the log, by reason.", ("pchannel", "reason")
    ),
    "wal_inflight_txn": MetricFamily("gauge", "Open transactions.", ("pchannel",)),
    "wal_txn_duration_seconds": MetricFamily(
        "histogram", "Time from begin to end of a transaction, in log time.", ("pchannel", "state"), SLOW
    ),
    "wal_growing_segment_rows_total": MetricFamily("gauge", "Rows in growing segments.", ("pchannel",)),
    "wal_growing_segment_bytes": MetricFamily("gauge", "Payload bytes in growing segments.", ("pchannel",)),
    "wal_segment_assign_flushed_segment_total": MetricFamily(
        "counter", "Segments flushed, by seal policy.", ("pchannel", "policy")
    ),
    "wal_commit_duration_seconds": MetricFamily(
        "histogram", "Duration of a commit to the wal table.", ("pchannel",), SLOW
    ),
    "wal_commit_part_duration_seconds": MetricFamily(
        "histogram", "Duration of a micro-batch's parts: read, decode, chain, write, commit.", ("part",)
    ),
    "wal_commit_conflict_total": MetricFamily("counter", "Commits retried after a conflict.", ()),
    "wal_commit_fenced_total": MetricFamily(
        "counter", "Ranges dropped because another committer was first.", ("pchannel",)
    ),
    "wal_committed_bytes_total": MetricFamily("counter", "Bytes of Parquet committed to the wal table.", ("pchannel",)),
    "wal_committed_rows_total": MetricFamily("counter", "Rows committed to the wal table.", ("pchannel", "kind")),
    "wal_lag_seconds": MetricFamily("gauge", "Age of the oldest log entry not in the wal table.", ("pchannel",)),
    "log_stored_bytes": MetricFamily("gauge", "Bytes of entries in the log.", ("pchannel",)),
    "log_refused_entries_total": MetricFamily(
        "counter", "Entries that the log's server rejected for invalid framing.", ("pchannel",)
    ),
    "log_clock_ahead_seconds": MetricFamily(
        "gauge", "Embedded log's timestamps minus the wall clock; negative while a forward jump is not followed.", ()
    ),
    "log_clock_held": MetricFamily("gauge", "1 while a forward jump of the wall clock is not followed.", ()),
    "log_time_ahead_seconds": MetricFamily("gauge", "Log time minus the wall clock.", ("pchannel",)),
    "log_denied_calls_total": MetricFamily(
        "counter", "Calls and appends denied by their token, by call (docs/access.md).", ("call",)
    ),
    "coord_broadcasts_open": MetricFamily("gauge", "Broadcasts, DDL and messages, that some VChannel lacks.", ()),
    "coord_broadcast_oldest_seconds": MetricFamily("gauge", "Age of the oldest open broadcast; 0 without any.", ()),
    "access_log_lines_total": MetricFamily(
        "counter",
        "Lines of the access log, by result: written, or dropped because the queue or disk was full.",
        ("result",),
    ),
    "wal_parked": MetricFamily(
        "gauge", "1 if an entry that cannot be processed has parked the PChannel.", ("pchannel",)
    ),
    "health_findings": MetricFamily("gauge", "Current problems, by kind.", ("severity", "kind")),
    "wal_rate_limit_state": MetricFamily("gauge", "1 for the current mode of flow control.", ("mode",)),
    "wal_rate_limit_bytes_per_second": MetricFamily("gauge", "Rate limit of appends; -1 without a limit.", ()),
    "wal_rate_limit_reading": MetricFamily("gauge", "Values that flow control decides by.", ("watermark",)),
    "wal_rate_limit_delayed": MetricFamily("gauge", "Appends delayed by flow control since the host started.", ()),
    "wal_rate_limit_refused": MetricFamily("gauge", "Appends rejected by flow control since the host started.", ()),
    # Clients: producers with a spool, consumers.
    "producer_spool_bytes": MetricFamily("gauge", "Bytes in a producer's spool.", ()),
    "producer_spool_entries": MetricFamily(
        "gauge", "Entries in a producer's spool that the log has not acknowledged.", ()
    ),
    "producer_spool_oldest_seconds": MetricFamily("gauge", "Age of the oldest entry in a producer's spool.", ()),
    "producer_spool_refused_total": MetricFamily("counter", "Appends rejected because the spool was full.", ()),
    "consumer_lag_seconds": MetricFamily(
        "gauge", "Age of the newest unit delivered by a consumer.", ("group", "pchannel")
    ),
    "consumer_unacknowledged": MetricFamily("gauge", "Units delivered and not acknowledged.", ("group", "pchannel")),
    "consumer_delivery_delay_seconds": MetricFamily(
        "histogram", "Time from a unit's log timestamp to its delivery.", ("group", "pchannel"), SLOW
    ),
    "consumer_backlog_messages": MetricFamily(
        "gauge", "Messages in the wal table after a group's position.", ("group", "pchannel")
    ),
    "consumer_group_lag_seconds": MetricFamily(
        "gauge", "Age of the oldest message in the wal table after a group's position.", ("group", "pchannel")
    ),
    "consumer_group_members": MetricFamily("gauge", "Members of a consumer group at this server.", ("group",)),
    "consumer_position_commits_total": MetricFamily(
        "counter", "Writes of group positions; each has the moves of all members in an interval.", ()
    ),
    # Work queues, as far as this server dispatches them.
    "queue_ready_tasks": MetricFamily("gauge", "Tasks in the windows that no consumer has.", ("group",)),
    "queue_in_flight_tasks": MetricFamily("gauge", "Tasks that consumers have under a lease.", ("group",)),
    "queue_oldest_task_seconds": MetricFamily("gauge", "Age of the oldest task that is not done.", ("group",)),
    "queue_deliveries_total": MetricFamily("counter", "Deliveries of tasks.", ("group",)),
    "queue_redeliveries_total": MetricFamily("counter", "Deliveries of tasks that were delivered before.", ("group",)),
    "queue_acknowledged_total": MetricFamily("counter", "Acknowledgements of tasks.", ("group",)),
    "queue_expired_leases_total": MetricFamily("counter", "Leases of tasks that ended by time.", ("group",)),
    # Read: scanners and reads at a time tick.
    "wal_scanner_total": MetricFamily("gauge", "Open scanners.", ("pchannel",)),
    "wal_scan_delay_seconds": MetricFamily(
        "histogram", "Age of the newest message at delivery by a scan; one value per delivery.", ("pchannel",), SLOW
    ),
    "wal_scan_message_total": MetricFamily("counter", "Messages delivered by scanners.", ("pchannel", "type")),
    "wal_scan_message_bytes_total": MetricFamily("counter", "Payload bytes delivered by scanners.", ("pchannel",)),
    "wal_scan_pass_message_total": MetricFamily("counter", "Messages excluded by a scanner's filters.", ("pchannel",)),
    "wal_scan_time_tick_violation_message_total": MetricFamily(
        "counter", "Messages out of time-tick order; a non-zero value is a defect.", ("pchannel",)
    ),
    "wal_scanner_txn_buf_bytes": MetricFamily("gauge", "Bytes of transactions buffered by scanners.", ("pchannel",)),
    "read_duration_seconds": MetricFamily(
        "histogram", "Duration of a client's read at a time tick, including its wait.", (), SLOW
    ),
    # Sync: flusher, checkpoints, recovery.
    "flusher_time_tick": MetricFamily("gauge", "The time tick up to which collections are complete.", ("pchannel",)),
    "flusher_lag_seconds": MetricFamily("gauge", "Lag of the flusher behind the wal table.", ("pchannel",)),
    "flusher_rows_total": MetricFamily("counter", "Rows written to collections.", ("pchannel",)),
    "flusher_folded_bytes_total": MetricFamily("counter", "Bytes of small files that the flusher joined.", ()),
    "flusher_commit_duration_seconds": MetricFamily(
        "histogram", "Duration of a commit of the flusher.", ("table",), SLOW
    ),
    "publish_lag_seconds": MetricFamily(
        "gauge", "Age of the oldest published tick of a collection with unpublished rows.", ()
    ),
    "publish_duration_seconds": MetricFamily(
        "histogram", "Time to plan one publish of a collection: judging rows, without its commit.", (), SLOW
    ),
    "publish_masked_rows_total": MetricFamily("counter", "Rows of published files that were masked later.", ()),
    "publish_vector_bytes_total": MetricFamily("counter", "Bytes of deletion vectors written.", ()),
    "recovery_persisted_time_tick": MetricFamily("gauge", "The time tick of the last checkpoint.", ("pchannel",)),
    "recovery_duration_seconds": MetricFamily(
        "histogram", "Time from the start to the end of the replay.", ("pchannel",), SLOW
    ),
    "recovery_replayed_message_total": MetricFamily("counter", "Messages replayed after a checkpoint.", ("pchannel",)),
    "truncated_bytes_total": MetricFamily("counter", "Log bytes truncated up to the checkpoints.", ("pchannel",)),
    # Flows: source -> transform -> sink. A lane is a topic's partition, a collection, or the query of a stream.
    "flow_rows_total": MetricFamily(
        "counter",
        "Rows of a flow, by outcome: in, out (in its sink), error (dead letters), late, filtered, stale (the sink holds"
        " a newer version).",
        ("flow", "lane", "outcome"),
    ),
    "flow_lag_records": MetricFamily("gauge", "Records of a lane that were not read yet.", ("flow", "lane")),
    "flow_lag_seconds": MetricFamily("gauge", "Lag of a flow behind a collection, in log time.", ("flow",)),
    "flow_source_lag_bytes": MetricFamily(
        "gauge", "Bytes of a captured database's log that were not read yet.", ("flow",)
    ),
    "flow_source_lag_seconds": MetricFamily(
        "gauge", "Age of the newest change of a captured database that was read, if others came after it.", ("flow",)
    ),
    "flow_source_messages": MetricFamily(
        "gauge", "Messages of a best-effort source, by outcome; lost: by their sequence numbers.", ("flow", "outcome")
    ),
    "flow_latency_seconds": MetricFamily(
        "histogram", "Time from a record's timestamp to its acknowledgement by the sink.", ("flow", "lane"), SLOW
    ),
    "flow_running": MetricFamily(
        "gauge",
        "1 if a flow runs, else 0: of each declared stream (host spark), and of each managed pipeline that should run"
        " (host range).",
        ("flow", "host"),
    ),
    "flow_failed_lanes": MetricFamily("gauge", "Failed lanes that are not recovered yet.", ("flow",)),
    "flow_failures_total": MetricFamily("counter", "Failed ranges of a lane, by error.", ("flow", "lane", "code")),
    "flow_batches_total": MetricFamily("counter", "Micro-batches of a stream.", ("flow", "lane")),
    "flow_bulks_total": MetricFamily("counter", "Bulk requests to a flow's sink.", ("flow", "lane")),
    "flow_retries_total": MetricFamily("counter", "Documents sent to the sink again.", ("flow", "lane")),
    "flow_watermark_seconds": MetricFamily("gauge", "The watermark of a flow, in Unix seconds.", ("flow",)),
    "flow_state_rows": MetricFamily("gauge", "Rows in the state of a flow's operators.", ("flow",)),
    "flow_state_bytes": MetricFamily("gauge", "Bytes of that state in memory.", ("flow",)),
    "flow_operated_total": MetricFamily(
        "counter",
        "Rows given to a flow's operator: taken, late or rejected; also partly_late, corrected, evicted.",
        ("flow", "outcome"),
    ),
    "flow_cpu_seconds_total": MetricFamily("counter", "CPU time of a pipeline's worker.", ("flow",)),
    "flow_memory_bytes": MetricFamily("gauge", "Memory of a pipeline's worker.", ("flow",)),
    "flow_lane_cpu_seconds_total": MetricFamily(
        "counter", "CPU time of a lane's ranges, including bulk requests.", ("flow", "lane")
    ),
    "flow_lane_range_bytes": MetricFamily(
        "gauge", "Bytes of records held in memory by a lane's newest range.", ("flow", "lane")
    ),
    # What is where.
    "pchannel_info": MetricFamily(
        "gauge", "1 for each PChannel that this process serves.", ("pchannel", "term", "role")
    ),
    "vchannel_total": MetricFamily("gauge", "VChannels on the PChannel.", ("pchannel",)),
}
"""Families by name, without the namespace."""

METRICS_SUFFIX: Final = ".prom"
"""The suffix of the file next to a job's heartbeat that holds its metrics."""

NAMES: Final = tuple(f"{NAMESPACE}_{name}" for name in FAMILIES)
"""The full name of every family, as dashboards and docs/operating.md use it."""


class Metrics:
    """The metrics of one process. Each family of :data:`FAMILIES` is an attribute with its name."""

    def __init__(self, *, registry: CollectorRegistry | None = None) -> None:
        self.registry: Final = CollectorRegistry() if registry is None else registry
        self._buffered: list[BufferedHistogram] = []
        self.registry.register(self)  # before all others: a scrape flushes first
        counter, gauge, histogram = self._counter, self._gauge, self._histogram

        self.wal_append_message_bytes = histogram("wal_append_message_bytes")
        self.wal_append_message_total = counter("wal_append_message_total")
        self.wal_append_message_duration_seconds = histogram("wal_append_message_duration_seconds")
        self.wal_append_retry_total = counter("wal_append_retry_total")
        self.wal_impls_append_message_duration_seconds = histogram("wal_impls_append_message_duration_seconds")
        self.wal_impls_append_bytes_total = counter("wal_impls_append_bytes_total")
        self.wal_interceptor_duration_seconds = histogram("wal_interceptor_duration_seconds")
        self.wal_rejected_message_total = counter("wal_rejected_message_total")
        self.wal_last_allocated_time_tick = gauge("wal_last_allocated_time_tick")
        self.wal_last_confirmed_time_tick = gauge("wal_last_confirmed_time_tick")
        self.wal_committed_time_tick = gauge("wal_committed_time_tick")
        self.wal_time_tick_delay_seconds = histogram("wal_time_tick_delay_seconds")
        self.wal_mvcc_update_total = counter("wal_mvcc_update_total")
        self.wal_unconfirmed_messages = gauge("wal_unconfirmed_messages")
        self.wal_sync_time_tick_total = counter("wal_sync_time_tick_total")
        self.wal_inflight_txn = gauge("wal_inflight_txn")
        self.wal_txn_duration_seconds = histogram("wal_txn_duration_seconds")
        self.wal_growing_segment_rows_total = gauge("wal_growing_segment_rows_total")
        self.wal_growing_segment_bytes = gauge("wal_growing_segment_bytes")
        self.wal_segment_assign_flushed_segment_total = counter("wal_segment_assign_flushed_segment_total")
        self.wal_commit_duration_seconds = histogram("wal_commit_duration_seconds")
        self.wal_commit_part_duration_seconds = histogram("wal_commit_part_duration_seconds")
        self.wal_commit_conflict_total = counter("wal_commit_conflict_total")
        self.wal_commit_fenced_total = counter("wal_commit_fenced_total")
        self.wal_committed_bytes_total = counter("wal_committed_bytes_total")
        self.wal_committed_rows_total = counter("wal_committed_rows_total")
        self.wal_lag_seconds = gauge("wal_lag_seconds")
        self.log_stored_bytes = gauge("log_stored_bytes")
        self.log_refused_entries_total = counter("log_refused_entries_total")
        self.log_clock_ahead_seconds = gauge("log_clock_ahead_seconds")
        self.log_clock_held = gauge("log_clock_held")
        self.log_time_ahead_seconds = gauge("log_time_ahead_seconds")
        self.log_denied_calls_total = counter("log_denied_calls_total")
        self.coord_broadcasts_open = gauge("coord_broadcasts_open")
        self.coord_broadcast_oldest_seconds = gauge("coord_broadcast_oldest_seconds")
        self.access_log_lines_total = counter("access_log_lines_total")
        self.wal_parked = gauge("wal_parked")

        self.health_findings = gauge("health_findings")
        self.wal_rate_limit_state = gauge("wal_rate_limit_state")
        self.wal_rate_limit_bytes_per_second = gauge("wal_rate_limit_bytes_per_second")
        self.wal_rate_limit_reading = gauge("wal_rate_limit_reading")
        self.wal_rate_limit_delayed = gauge("wal_rate_limit_delayed")
        self.wal_rate_limit_refused = gauge("wal_rate_limit_refused")
        self.producer_spool_bytes = gauge("producer_spool_bytes")
        self.producer_spool_entries = gauge("producer_spool_entries")
        self.producer_spool_oldest_seconds = gauge("producer_spool_oldest_seconds")
        self.producer_spool_refused_total = counter("producer_spool_refused_total")
        self.consumer_lag_seconds = gauge("consumer_lag_seconds")
        self.consumer_unacknowledged = gauge("consumer_unacknowledged")
        self.consumer_delivery_delay_seconds = histogram("consumer_delivery_delay_seconds")
        self.consumer_backlog_messages = gauge("consumer_backlog_messages")
        self.consumer_group_lag_seconds = gauge("consumer_group_lag_seconds")
        self.consumer_group_members = gauge("consumer_group_members")
        self.consumer_position_commits_total = counter("consumer_position_commits_total")
        self.queue_ready_tasks = gauge("queue_ready_tasks")
        self.queue_in_flight_tasks = gauge("queue_in_flight_tasks")
        self.queue_oldest_task_seconds = gauge("queue_oldest_task_seconds")
        self.queue_deliveries_total = counter("queue_deliveries_total")
        self.queue_redeliveries_total = counter("queue_redeliveries_total")
        self.queue_acknowledged_total = counter("queue_acknowledged_total")
        self.queue_expired_leases_total = counter("queue_expired_leases_total")

        self.wal_scanner_total = gauge("wal_scanner_total")
        self.wal_scan_delay_seconds = histogram("wal_scan_delay_seconds")
        self.wal_scan_message_total = counter("wal_scan_message_total")
        self.wal_scan_message_bytes_total = counter("wal_scan_message_bytes_total")
        self.wal_scan_pass_message_total = counter("wal_scan_pass_message_total")
        self.wal_scan_time_tick_violation_message_total = counter("wal_scan_time_tick_violation_message_total")
        self.wal_scanner_txn_buf_bytes = gauge("wal_scanner_txn_buf_bytes")
        self.read_duration_seconds = histogram("read_duration_seconds")

        self.flusher_time_tick = gauge("flusher_time_tick")
        self.flusher_lag_seconds = gauge("flusher_lag_seconds")
        self.flusher_rows_total = counter("flusher_rows_total")
        self.flusher_folded_bytes_total = counter("flusher_folded_bytes_total")
        self.flusher_commit_duration_seconds = histogram("flusher_commit_duration_seconds")
        self.publish_lag_seconds = gauge("publish_lag_seconds")
        self.publish_duration_seconds = histogram("publish_duration_seconds")
        self.publish_masked_rows_total = counter("publish_masked_rows_total")
        self.publish_vector_bytes_total = counter("publish_vector_bytes_total")
        self.recovery_persisted_time_tick = gauge("recovery_persisted_time_tick")
        self.recovery_duration_seconds = histogram("recovery_duration_seconds")
        self.recovery_replayed_message_total = counter("recovery_replayed_message_total")
        self.truncated_bytes_total = counter("truncated_bytes_total")

        self.flow_rows_total = counter("flow_rows_total")
        self.flow_lag_records = gauge("flow_lag_records")
        self.flow_lag_seconds = gauge("flow_lag_seconds")
        self.flow_source_lag_bytes = gauge("flow_source_lag_bytes")
        self.flow_source_messages = gauge("flow_source_messages")
        self.flow_source_lag_seconds = gauge("flow_source_lag_seconds")
        self.flow_latency_seconds = histogram("flow_latency_seconds")
        self.flow_running = gauge("flow_running")
        self.flow_failed_lanes = gauge("flow_failed_lanes")
        self.flow_failures_total = counter("flow_failures_total")
        self.flow_batches_total = counter("flow_batches_total")
        self.flow_bulks_total = counter("flow_bulks_total")
        self.flow_retries_total = counter("flow_retries_total")
        self.flow_watermark_seconds = gauge("flow_watermark_seconds")
        self.flow_state_rows = gauge("flow_state_rows")
        self.flow_state_bytes = gauge("flow_state_bytes")
        self.flow_operated_total = counter("flow_operated_total")
        self.flow_cpu_seconds_total = counter("flow_cpu_seconds_total")
        self.flow_memory_bytes = gauge("flow_memory_bytes")
        self.flow_lane_cpu_seconds_total = counter("flow_lane_cpu_seconds_total")
        self.flow_lane_range_bytes = gauge("flow_lane_range_bytes")

        self.pchannel_info = gauge("pchannel_info")
        self.vchannel_total = gauge("vchannel_total")

    def buffered(self, histogram: Histogram) -> BufferedHistogram:
        """Return a histogram whose observations are cheap, and counted in groups: before each scrape at the latest."""
        made = BufferedHistogram(histogram)
        self._buffered.append(made)
        return made

    def render(self) -> bytes:
        """Return all current values in the Prometheus text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Flush the buffered histograms. The registry calls this first of its collectors."""
        for each in self._buffered:
            each.flush()
        return iter(())

    def write_textfile(self, path: Path) -> None:
        """Write :meth:`render` to a file, atomically."""
        write_to_textfile(str(path), self.registry)

    def serve(self, port: int, *, host: str = "127.0.0.1") -> MetricsServer:
        """Serve :meth:`render` on `port` (0 picks a free one) from a background thread.

        Raises OSError if the port is taken.
        """
        server, thread = start_http_server(port, addr=host, registry=self.registry)
        return MetricsServer(server, thread)

    def _counter(self, name: str) -> Counter:
        return Counter(name, *self._arguments(name, "counter"), namespace=NAMESPACE, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, *self._arguments(name, "gauge"), namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        words, labels = self._arguments(name, "histogram")
        buckets = FAMILIES[name].buckets
        return Histogram(name, words, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)

    @staticmethod
    def _arguments(name: str, kind: Kind) -> tuple[str, tuple[str, ...]]:
        family = FAMILIES[name]
        assert family.kind == kind, f"{name} is a {family.kind}"
        return family.description, family.labels


def observe_many(histogram: Histogram, values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> None:
    """Observe all `values` at about the cost of one, for values that come by the thousand."""
    bounds: Any = histogram._upper_bounds
    for place, count in enumerate(np.bincount(np.searchsorted(bounds, values), minlength=len(bounds)).tolist()):
        if count:
            histogram._buckets[place].inc(float(count))
    histogram._sum.inc(float(values.sum()))


class BufferedHistogram:
    """Observes into a histogram in groups. Thread-safe."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._values: deque[float] = deque()

    def observe(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) >= _BUFFERED:
            self.flush()

    def observe_many(self, values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> None:
        observe_many(self._histogram, values)

    def flush(self) -> None:
        """Add the pending observations to the histogram."""
        taken: list[float] = []
        with suppress(IndexError):  # another thread may flush too
            while True:
                taken.append(self._values.popleft())
        if taken:
            observe_many(self._histogram, np.array(taken))


class MetricsServer:
    """A running metrics endpoint."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
