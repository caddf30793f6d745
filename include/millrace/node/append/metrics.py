"""Metrics of the append host, updated once per run of the chain from columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import Counter

from millrace.base.metrics import BufferedHistogram, Metrics
from millrace.log.clock import log_clock, wall_clock_ms
from millrace.log.protocol import LogService
from millrace.message.bodies import parse_body
from millrace.message.ids import LogId, tick_physical_ms
from millrace.message.types import MessageType
from millrace.wal.chain import ChainOutcome
from millrace.wal.definitions import OpenFigures
from millrace.wal.interceptors.interceptor import Interceptor, Proceed
from millrace.wal.message_run import DecidedBatch, DecidedMessage, MessageRun, payload_sizes
from millrace.wal.state import ChannelState

ACCEPTED = "accepted"
REJECTED = "rejected"

_CONTROL: Final = frozenset({"BEGIN_TXN", "COMMIT_TXN", "ROLLBACK_TXN", "FLUSH"})


def export_clock(metrics: Metrics, service: LogService) -> None:
    """Export the clock of a log that stamps by its own clock, read on each scrape."""

    def ahead() -> float:
        clock = log_clock(service)
        return 0.0 if clock is None else clock.view().ahead_seconds

    def held() -> float:
        clock = log_clock(service)
        return float(clock is not None and clock.view().held_since_ms is not None)

    metrics.log_clock_ahead_seconds.set_function(ahead)
    metrics.log_clock_held.set_function(held)


class TimedInterceptor:
    """Wraps an interceptor and measures the seconds it takes, excluding the interceptors inside it."""

    def __init__(self, link: Interceptor) -> None:
        self.name = link.name
        self._link = link
        self._seconds = 0.0

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        inside = 0.0

        def onward(run: MessageRun) -> None:
            nonlocal inside
            start = time.perf_counter()
            proceed(run)
            inside += time.perf_counter() - start

        start = time.perf_counter()
        self._link.decide(state, run, onward)
        self._seconds += time.perf_counter() - start - inside

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        start = time.perf_counter()
        self._link.evolve(state, rows)
        self._seconds += time.perf_counter() - start

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        start = time.perf_counter()
        self._link.evolve_one(state, row)
        self._seconds += time.perf_counter() - start

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class HostMetrics:
    """The counters and gauges of one PChannel."""

    def __init__(self, metrics: Metrics, pchannel: str) -> None:
        self._metrics = metrics
        self._pchannel = pchannel
        buffered = metrics.buffered
        self._duration = buffered(metrics.wal_append_message_duration_seconds.labels(pchannel))
        self._log_duration = buffered(metrics.wal_impls_append_message_duration_seconds.labels(pchannel))
        self._log_bytes = metrics.wal_impls_append_bytes_total.labels(pchannel)
        self._delay = buffered(metrics.wal_time_tick_delay_seconds.labels(pchannel))
        self._moves = metrics.wal_mvcc_update_total.labels(pchannel)
        self.unconfirmed = metrics.wal_unconfirmed_messages.labels(pchannel)
        self._message_bytes = buffered(metrics.wal_append_message_bytes.labels(pchannel))
        self._replayed = metrics.recovery_replayed_message_total.labels(pchannel)
        self._links: list[tuple[TimedInterceptor, BufferedHistogram]] = []
        self._appended: dict[tuple[str, str], Counter] = {}
        """Counters by type and status."""
        self._recovering: tuple[LogId, float] | None = None
        metrics.wal_parked.labels(pchannel).set(0)
        metrics.log_refused_entries_total.labels(pchannel)

    def export_state(self, state: Callable[[], ChannelState]) -> None:
        """Export what the newest state says, computed on each scrape."""
        metrics, pchannel = self._metrics, self._pchannel

        def confirmed() -> int:
            found = state()
            return min((txn.begin_tick - 1 for _, txn in found.open_txns()), default=found.last_tick)

        def ahead() -> float:
            return max(0.0, (tick_physical_ms(state().last_tick) - wall_clock_ms()) / 1000)

        metrics.log_time_ahead_seconds.labels(pchannel).set_function(ahead)
        metrics.wal_last_allocated_time_tick.labels(pchannel).set_function(lambda: state().last_tick)
        metrics.wal_last_confirmed_time_tick.labels(pchannel).set_function(confirmed)
        metrics.wal_inflight_txn.labels(pchannel).set_function(lambda: state().open_work.open_txns)
        metrics.wal_growing_segment_rows_total.labels(pchannel).set_function(
            lambda: OpenFigures.of(state()).growing_rows
        )
        metrics.wal_growing_segment_bytes.labels(pchannel).set_function(lambda: OpenFigures.of(state()).growing_bytes)

    def wrap_interceptor(self, link: Interceptor) -> Interceptor:
        """Wrap an interceptor of this PChannel's chain to measure its time."""
        timed = TimedInterceptor(link)
        duration = self._metrics.wal_interceptor_duration_seconds.labels(self._pchannel, timed.name)
        self._links.append((timed, self._metrics.buffered(duration)))
        return timed

    def start_recovery(self, position: LogId, *, end: LogId) -> None:
        """Record that the host starts at `position`; entries before `end` are a replay."""
        self._recovering = (end, time.perf_counter())
        self._recovered(position)

    def _recovered(self, position: LogId) -> None:
        if self._recovering is not None and position >= self._recovering[0]:
            seconds = time.perf_counter() - self._recovering[1]
            self._metrics.recovery_duration_seconds.labels(self._pchannel).observe(seconds)
            self._recovering = None

    def record_append(self, seconds: float, *, bytes: int) -> None:
        """Record an acknowledged append to the log."""
        self._log_duration.observe(seconds)
        self._log_bytes.inc(bytes)

    def record_answer(self, seconds: float) -> None:
        """Record an answered append."""
        self._duration.observe(seconds)

    def record_decisions(self, outcome: ChainOutcome, before: ChannelState, *, age: float) -> None:
        """Record a run of the chain from the state `before`. The log stamped its last entry `age` seconds ago."""
        metrics, pchannel = self._metrics, self._pchannel
        if outcome.plain is None:
            for link, duration in self._links:
                duration.observe(link.take_seconds())
        if self._recovering is not None:
            self._replayed.inc(outcome.accepted + (0 if outcome.plain is not None else outcome.rejections.num_rows))
            self._recovered(outcome.state.position)
        else:
            self._delay.observe(max(0.0, age))
        if outcome.state.last_tick > before.last_tick:
            self._moves.inc()
        if outcome.plain is not None:
            for each in outcome.plain:
                self._message_bytes.observe(each.size)
                self._total(each.type.name, ACCEPTED).inc()
            return
        control = False
        for rows, status in ((outcome.messages, ACCEPTED), (outcome.rejections, REJECTED)):
            if rows.num_rows:
                self._message_bytes.observe_many(payload_sizes(rows.column("payload")))
            for name, count in _counts(rows, "type"):
                self._total(name, status).inc(count)
                control |= status == ACCEPTED and name in _CONTROL
        if control:
            self._ended(outcome.messages, before)
        for name, count in _counts(outcome.rejections, "reason"):
            metrics.wal_rejected_message_total.labels(pchannel, name).inc(count)

    def _total(self, name: str, status: str) -> Counter:
        """Return the counter of a type's messages, cached: a lookup costs more than counting."""
        counter = self._appended.get((name, status))
        if counter is None:
            counter = self._metrics.wal_append_message_total.labels(self._pchannel, name, status)
            self._appended[name, status] = counter
        return counter

    def _ended(self, messages: pa.RecordBatch, before: ChannelState) -> None:
        """Record ended transactions and flushed segments."""
        begun: dict[tuple[str, int], int] = {}
        """Begin ticks by VChannel and id, of transactions that this run began."""
        wanted = pc.is_in(messages.column("type").cast(pa.utf8()), pa.array(sorted(_CONTROL)))
        columns = ["type", "vchannel", "txn_id", "time_tick", "detail", "payload"]
        for row in messages.select(columns).filter(wanted).to_pylist():
            place = (row["vchannel"], row["txn_id"])
            if row["type"] == "BEGIN_TXN":
                begun[place] = row["time_tick"]
            elif row["type"] == "FLUSH":
                policy = parse_body(MessageType.FLUSH, row["payload"])["policy"]
                self._metrics.wal_segment_assign_flushed_segment_total.labels(self._pchannel, policy).inc()
            elif (begin := begun.get(place) or _begin_tick(before, *place)) is not None:
                how = "committed" if row["type"] == "COMMIT_TXN" else row["detail"] or "rolled back"
                seconds = (tick_physical_ms(row["time_tick"]) - tick_physical_ms(begin)) / 1000
                self._metrics.wal_txn_duration_seconds.labels(self._pchannel, how).observe(seconds)

    def record_tick(self, reason: str) -> None:
        """Record an appended time tick, by reason: a due `timer`, an `idle` PChannel, or a request (`asked`)."""
        self._metrics.wal_sync_time_tick_total.labels(self._pchannel, reason).inc()

    def record_parked(self) -> None:
        """Record that the PChannel is parked."""
        self._metrics.wal_parked.labels(self._pchannel).set(1)


def _begin_tick(state: ChannelState, vchannel: str, txn_id: int) -> int | None:
    """Return the tick at which an open transaction began."""
    channel = state.vchannels.get(vchannel)
    txn = None if channel is None else channel.txns.get(txn_id)
    return None if txn is None else txn.begin_tick


def _counts(rows: pa.RecordBatch, name: str) -> Iterator[tuple[str, int]]:
    """Yield each value of a dictionary column with its number of rows."""
    if not rows.num_rows:
        return
    column = rows.column(name)
    counts = np.bincount(column.indices.drop_null().to_numpy(zero_copy_only=False), minlength=1)
    for code in np.flatnonzero(counts):
        yield column.dictionary[int(code)].as_py(), int(counts[code])
