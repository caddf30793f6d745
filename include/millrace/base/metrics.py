"""Every metric of Millrace, named in one place: the write, read and sync families, under Milvus' names where it has them.

A :class:`Metrics` belongs to one process and is handed to what reports; nothing registers globally. Durations are seconds,
sizes bytes, time ticks hybrid timestamps (``tick >> 18`` are Unix milliseconds; the gauges ``*_lag_seconds`` say how far
behind that is). Sources of names: Milvus' pkg/metrics/streaming_service_metrics.go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.exposition import generate_latest, write_to_textfile

NAMESPACE: Final = "millrace"

FAST: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Buckets of what takes from a fifth of a millisecond to seconds."""
SLOW: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Buckets of commits, syncs and lags."""
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
        "counter", "Messages appended, by how it ended.", ("pchannel", "type", "status")
    ),
    "wal_append_message_duration_seconds": MetricFamily("histogram", "From append to its result.", ("pchannel",)),
    "wal_append_retry_total": MetricFamily("counter", "Attempts of an append after its first.", ("pchannel",)),
    "wal_impls_append_message_duration_seconds": MetricFamily(
        "histogram", "Of an append, the log's part.", ("pchannel",)
    ),
    "wal_impls_append_bytes_total": MetricFamily("counter", "Bytes of entries the log acknowledged.", ("pchannel",)),
    "wal_interceptor_duration_seconds": MetricFamily(
        "histogram", "An interceptor's work on one run of messages.", ("pchannel", "interceptor")
    ),
    "wal_rejected_message_total": MetricFamily("counter", "Messages the chain rejected.", ("pchannel", "reason")),
    "wal_last_allocated_time_tick": MetricFamily("gauge", "The last time tick that was given.", ("pchannel",)),
    "wal_last_confirmed_time_tick": MetricFamily(
        "gauge", "What becomes visible later began behind it: the oldest open transaction holds it back.", ("pchannel",)
    ),
    "wal_committed_time_tick": MetricFamily("gauge", "Everything up to here is in the wal table.", ("pchannel",)),
    "wal_time_tick_delay_seconds": MetricFamily(
        "histogram", "From the log's stamp of an entry to its decision; one value a run of the chain.", ("pchannel",)
    ),
    "wal_mvcc_update_total": MetricFamily(
        "counter", "Moves of the tick up to which reads are confirmed.", ("pchannel",)
    ),
    "wal_unconfirmed_messages": MetricFamily(
        "gauge", "Messages that were appended through this host and are not judged yet.", ("pchannel",)
    ),
    "wal_sync_time_tick_total": MetricFamily(
        "counter", "Time ticks appended to the log, by why.", ("pchannel", "reason")
    ),
    "wal_inflight_txn": MetricFamily("gauge", "Transactions that are open.", ("pchannel",)),
    "wal_txn_duration_seconds": MetricFamily(
        "histogram", "From begin to end, in log time.", ("pchannel", "state"), SLOW
    ),
    "wal_growing_segment_rows_total": MetricFamily("gauge", "Rows in growing segments.", ("pchannel",)),
    "wal_growing_segment_bytes": MetricFamily("gauge", "Payload bytes in growing segments.", ("pchannel",)),
    "wal_segment_assign_flushed_segment_total": MetricFamily(
        "counter", "Segments flushed, by seal policy.", ("pchannel", "policy")
    ),
    "wal_commit_duration_seconds": MetricFamily("histogram", "One commit to the wal table.", ("pchannel",), SLOW),
    "wal_commit_part_duration_seconds": MetricFamily(
        "histogram", "Parts of a micro-batch: read, decode, chain, write, commit.", ("part",)
    ),
    "wal_commit_conflict_total": MetricFamily("counter", "Commits that had to be tried again.", ()),
    "wal_commit_fenced_total": MetricFamily("counter", "Ranges dropped for another committer's.", ("pchannel",)),
    "wal_committed_bytes_total": MetricFamily("counter", "Bytes of Parquet committed to the wal table.", ("pchannel",)),
    "wal_committed_rows_total": MetricFamily("counter", "Rows committed to the wal table.", ("pchannel", "kind")),
    "wal_lag_seconds": MetricFamily("gauge", "Age of the oldest log entry not in the wal table.", ("pchannel",)),
    "log_stored_bytes": MetricFamily("gauge", "Bytes of entries that the log holds.", ("pchannel",)),
    "log_refused_entries_total": MetricFamily(
        "counter", "Entries of appends that the log's server refused for their framing.", ("pchannel",)
    ),
    "log_clock_ahead_seconds": MetricFamily(
        "gauge", "Stamps of the embedded log less the wall clock; below 0 while a leap of it is not believed.", ()
    ),
    "log_clock_held": MetricFamily("gauge", "1 while a leap ahead of the wall clock is not believed.", ()),
    "log_time_ahead_seconds": MetricFamily("gauge", "How far log time is ahead of the wall clock.", ("pchannel",)),
    "log_denied_calls_total": MetricFamily(
        "counter", "Calls and appends that their token does not allow, by call (docs/access.md).", ("call",)
    ),
    "wal_parked": MetricFamily("gauge", "1 where an entry that cannot be processed holds the PChannel.", ("pchannel",)),
    "health_findings": MetricFamily("gauge", "What is not as it should be now, by kind.", ("severity", "kind")),
    "wal_rate_limit_state": MetricFamily("gauge", "1 for the mode that flow control is in.", ("mode",)),
    "wal_rate_limit_bytes_per_second": MetricFamily("gauge", "Rate that appends are held to; -1 where none binds.", ()),
    "wal_rate_limit_reading": MetricFamily("gauge", "What flow control decides by.", ("watermark",)),
    "wal_rate_limit_delayed": MetricFamily("gauge", "Appends that flow control let wait since the host started.", ()),
    "wal_rate_limit_refused": MetricFamily("gauge", "Appends that flow control refused since the host started.", ()),
    # Clients: producers with a spool, consumers.
    "producer_spool_bytes": MetricFamily("gauge", "Bytes in a producer's spool.", ()),
    "producer_spool_entries": MetricFamily("gauge", "Entries in a producer's spool that the log has not taken.", ()),
    "producer_spool_oldest_seconds": MetricFamily("gauge", "Age of the oldest entry in a producer's spool.", ()),
    "producer_spool_refused_total": MetricFamily("counter", "Appends refused because the spool was full.", ()),
    "consumer_lag_seconds": MetricFamily(
        "gauge", "Age of the newest unit that a consumer delivered.", ("group", "pchannel")
    ),
    "consumer_unacknowledged": MetricFamily("gauge", "Units delivered and not acknowledged.", ("group", "pchannel")),
    "consumer_delivery_delay_seconds": MetricFamily(
        "histogram", "From the log's stamp of a unit to its delivery.", ("group", "pchannel"), SLOW
    ),
    "consumer_backlog_messages": MetricFamily(
        "gauge", "Messages in the wal table behind a group's position.", ("group", "pchannel")
    ),
    # Read: scanners and reads at a time tick.
    "wal_scanner_total": MetricFamily("gauge", "Scanners that are open.", ("pchannel",)),
    "wal_scan_delay_seconds": MetricFamily(
        "histogram", "Age of the newest message when a scan delivers it; one value a delivery.", ("pchannel",), SLOW
    ),
    "wal_scan_message_total": MetricFamily("counter", "Messages delivered by scanners.", ("pchannel", "type")),
    "wal_scan_message_bytes_total": MetricFamily("counter", "Payload bytes delivered by scanners.", ("pchannel",)),
    "wal_scan_pass_message_total": MetricFamily("counter", "Messages a scanner's filters left out.", ("pchannel",)),
    "wal_scan_time_tick_violation_message_total": MetricFamily(
        "counter", "Messages out of time-tick order; any is a defect.", ("pchannel",)
    ),
    "wal_scanner_txn_buf_bytes": MetricFamily("gauge", "Bytes of transactions that scanners assemble.", ("pchannel",)),
    "stream_rows_total": MetricFamily(
        "counter",
        "Rows of a declared stream: in, out (to its sink), rejected (dead letters), late (dropped).",
        ("stream", "outcome"),
    ),
    "stream_batches_total": MetricFamily("counter", "Micro-batches of a declared stream.", ("stream",)),
    "stream_lag_seconds": MetricFamily(
        "gauge", "How far a declared stream is behind the wal table, in log time.", ("stream",)
    ),
    "stream_watermark_seconds": MetricFamily(
        "gauge", "The watermark of a declared stream, in Unix seconds.", ("stream",)
    ),
    "stream_state_rows": MetricFamily(
        "gauge", "Rows that the operators of a declared stream keep as state.", ("stream",)
    ),
    "stream_state_bytes": MetricFamily("gauge", "Memory that this state takes.", ("stream",)),
    "stream_running": MetricFamily(
        "gauge", "Whether a declared stream runs (1), by the files that all of them leave.", ("stream",)
    ),
    "stream_operated_total": MetricFamily(
        "counter",
        "Rows that the operator of a declared stream was given: taken + late + rejected are all. Beside that: partly_late, corrected, evicted.",
        ("stream", "outcome"),
    ),
    "read_duration_seconds": MetricFamily("histogram", "A client's read at a time tick, its wait included.", (), SLOW),
    # Sync: flusher, checkpoints, recovery.
    "flusher_time_tick": MetricFamily("gauge", "Everything up to here is in its collection.", ("vchannel",)),
    "flusher_lag_seconds": MetricFamily("gauge", "How far the flusher is behind the wal.", ("vchannel",)),
    "flusher_rows_total": MetricFamily("counter", "Rows written to collections.", ("vchannel",)),
    "flusher_commit_duration_seconds": MetricFamily("histogram", "One commit of the flusher.", ("table",), SLOW),
    "recovery_persisted_time_tick": MetricFamily("gauge", "The time tick of the last checkpoint.", ("pchannel",)),
    "recovery_duration_seconds": MetricFamily("histogram", "From start to the end of the replay.", ("pchannel",), SLOW),
    "recovery_replayed_message_total": MetricFamily("counter", "Messages replayed after a checkpoint.", ("pchannel",)),
    "truncated_bytes_total": MetricFamily("counter", "Log bytes given up behind the checkpoints.", ("pchannel",)),
    # Pipelines: topics -> transform -> sink.
    "pipeline_records_total": MetricFamily(
        "counter", "Records of a pipeline, by what became of them.", ("pipeline", "task", "outcome")
    ),
    "pipeline_lag_records": MetricFamily("gauge", "Records behind a task's position.", ("pipeline", "task")),
    "pipeline_latency_seconds": MetricFamily(
        "histogram", "From a record's timestamp to its acknowledgement by the sink.", ("pipeline", "task"), SLOW
    ),
    "pipeline_bulks_total": MetricFamily("counter", "Bulk requests to a pipeline's sink.", ("pipeline", "task")),
    "pipeline_retries_total": MetricFamily(
        "counter", "Documents that were sent to the sink again.", ("pipeline", "task")
    ),
    "pipeline_failures_total": MetricFamily(
        "counter", "Ranges of a task that failed, by error.", ("pipeline", "task", "code")
    ),
    "pipeline_cpu_seconds_total": MetricFamily("counter", "CPU time of a pipeline's worker.", ("pipeline",)),
    "pipeline_memory_bytes": MetricFamily("gauge", "Memory of a pipeline's worker.", ("pipeline",)),
    "pipeline_task_cpu_seconds_total": MetricFamily(
        "counter", "CPU time of a task's ranges, its bulks with them.", ("pipeline", "task")
    ),
    "pipeline_task_range_bytes": MetricFamily(
        "gauge", "Bytes of records that a task's newest range held in memory.", ("pipeline", "task")
    ),
    "pipeline_failed_tasks": MetricFamily("gauge", "Tasks that stand failed, until they are recovered.", ("pipeline",)),
    "pipeline_running": MetricFamily(
        "gauge", "1 for each pipeline that is to run and has a worker, 0 where it has none.", ("pipeline",)
    ),
    # What is where.
    "pchannel_info": MetricFamily("gauge", "1 for each PChannel this process serves.", ("pchannel", "term", "role")),
    "vchannel_total": MetricFamily("gauge", "VChannels on the PChannel.", ("pchannel",)),
}
"""Families by name, without the namespace."""

METRICS_SUFFIX: Final = ".prom"
"""Of the file beside a job's heartbeat in which it leaves its metrics."""

NAMES: Final = tuple(f"{NAMESPACE}_{name}" for name in FAMILIES)
"""Every family's full name, as dashboards and docs/operating.md use it."""


class Metrics:
    """The metrics of one process. Each family of :data:`FAMILIES` is an attribute of its name."""

    def __init__(self, *, registry: CollectorRegistry | None = None) -> None:
        self.registry: Final = CollectorRegistry() if registry is None else registry
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

        self.wal_scanner_total = gauge("wal_scanner_total")
        self.wal_scan_delay_seconds = histogram("wal_scan_delay_seconds")
        self.wal_scan_message_total = counter("wal_scan_message_total")
        self.wal_scan_message_bytes_total = counter("wal_scan_message_bytes_total")
        self.wal_scan_pass_message_total = counter("wal_scan_pass_message_total")
        self.wal_scan_time_tick_violation_message_total = counter("wal_scan_time_tick_violation_message_total")
        self.wal_scanner_txn_buf_bytes = gauge("wal_scanner_txn_buf_bytes")
        self.stream_rows_total = counter("stream_rows_total")
        self.stream_batches_total = counter("stream_batches_total")
        self.stream_lag_seconds = gauge("stream_lag_seconds")
        self.stream_watermark_seconds = gauge("stream_watermark_seconds")
        self.stream_state_rows = gauge("stream_state_rows")
        self.stream_state_bytes = gauge("stream_state_bytes")
        self.stream_running = gauge("stream_running")
        self.stream_operated_total = counter("stream_operated_total")
        self.read_duration_seconds = histogram("read_duration_seconds")

        self.flusher_time_tick = gauge("flusher_time_tick")
        self.flusher_lag_seconds = gauge("flusher_lag_seconds")
        self.flusher_rows_total = counter("flusher_rows_total")
        self.flusher_commit_duration_seconds = histogram("flusher_commit_duration_seconds")
        self.recovery_persisted_time_tick = gauge("recovery_persisted_time_tick")
        self.recovery_duration_seconds = histogram("recovery_duration_seconds")
        self.recovery_replayed_message_total = counter("recovery_replayed_message_total")
        self.truncated_bytes_total = counter("truncated_bytes_total")

        self.pipeline_records_total = counter("pipeline_records_total")
        self.pipeline_lag_records = gauge("pipeline_lag_records")
        self.pipeline_latency_seconds = histogram("pipeline_latency_seconds")
        self.pipeline_bulks_total = counter("pipeline_bulks_total")
        self.pipeline_retries_total = counter("pipeline_retries_total")
        self.pipeline_failures_total = counter("pipeline_failures_total")
        self.pipeline_cpu_seconds_total = counter("pipeline_cpu_seconds_total")
        self.pipeline_memory_bytes = gauge("pipeline_memory_bytes")
        self.pipeline_task_cpu_seconds_total = counter("pipeline_task_cpu_seconds_total")
        self.pipeline_task_range_bytes = gauge("pipeline_task_range_bytes")
        self.pipeline_failed_tasks = gauge("pipeline_failed_tasks")
        self.pipeline_running = gauge("pipeline_running")

        self.pchannel_info = gauge("pchannel_info")
        self.vchannel_total = gauge("vchannel_total")

    def render(self) -> bytes:
        """All values now, in the Prometheus text format."""
        return generate_latest(self.registry)

    def write_textfile(self, path: Path) -> None:
        """Write :meth:`render` to a file, replaced whole."""
        write_to_textfile(str(path), self.registry)

    def serve(self, port: int, *, host: str = "127.0.0.1") -> MetricsServer:
        """Serve :meth:`render` on `port` (0 takes a free one) from a thread of its own. Raises OSError where it is taken."""
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
    """As ``histogram.observe`` of each value, at the cost of one: for what comes by the thousand."""
    bounds: Any = histogram._upper_bounds
    for place, count in enumerate(np.bincount(np.searchsorted(bounds, values), minlength=len(bounds)).tolist()):
        if count:
            histogram._buckets[place].inc(float(count))
    histogram._sum.inc(float(values.sum()))


class MetricsServer:
    """A running metrics endpoint."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
