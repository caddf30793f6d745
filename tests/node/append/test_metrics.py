"""What the append host reports of a PChannel: messages, segments, transactions, its chain, and its own start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.base.metrics import Metrics
from millrace.log.protocol import Log
from millrace.log.rocksmq.service import RocksMQ
from millrace.message import builders
from millrace.message.ids import LogId, tick_physical_ms
from millrace.message.log_entries import LogEntries
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost, HostSettings
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, insert, judged, keys_of, open_log, opening, transaction

V0 = "p0_1v0"
LINKS = {"redo", "lock", "timetick", "txn", "shard"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RocksMQ]:
    with open_log(tmp_path / "log", PCHANNEL) as opened:
        yield opened


def told(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"millrace_{name}", {"pchannel": PCHANNEL, **labels}) or 0.0


def test_messages_segments_transactions_and_the_chains_links_are_reported(service: RocksMQ) -> None:
    metrics = Metrics()
    with AppendHost(service, ChannelState.new, metrics=metrics) as host:
        host.append(PCHANNEL, opening()).results()
        keys = keys_of(V0, 8)
        host.append(PCHANNEL, encode_entry([insert(key) for key in keys[:3]])).results()
        begin, *rest = transaction(5, keys[3:5], vchannel=V0)
        host.append(PCHANNEL, encode_entry([begin])).results()
        host.append(PCHANNEL, encode_entry(rest)).results()
        host.append(PCHANNEL, encode_entry(transaction(6, keys[5:7], vchannel=V0, commit=False))).results()
        host.append(PCHANNEL, encode_entry([builders.flush_all(term=1)])).results()
        host.tick(PCHANNEL)
    own = judged(service)
    rows = own.messages.num_rows + own.rejections.num_rows
    sizes = sum(len(payload or b"") for payload in own.messages.column("payload").to_pylist())
    assert told(metrics, "wal_append_message_bytes_count") == rows
    assert told(metrics, "wal_append_message_bytes_sum") == sizes
    assert told(metrics, "wal_txn_duration_seconds_count", state="committed") == 1
    assert told(metrics, "wal_txn_duration_seconds_count", state="rolled back") == 1
    flushes = own.messages.column("type").to_pylist().count("FLUSH")
    assert flushes
    assert told(metrics, "wal_segment_assign_flushed_segment_total", policy="flush_all") == flushes
    for link in LINKS:
        assert told(metrics, "wal_interceptor_duration_seconds_count", interceptor=link) > 0, link
        assert told(metrics, "wal_interceptor_duration_seconds_sum", interceptor=link) > 0, link


def test_a_host_that_starts_counts_what_it_replays(service: RocksMQ) -> None:
    first = Metrics()
    with AppendHost(service, ChannelState.new, metrics=first) as host:
        host.append(PCHANNEL, opening()).results()
        host.append(PCHANNEL, encode_entry([insert(key) for key in keys_of(V0, 3)])).results()
    assert told(first, "recovery_replayed_message_total") == 0
    assert told(first, "recovery_duration_seconds_count") == 1
    again = Metrics()
    own = judged(service)
    with AppendHost(service, ChannelState.new, metrics=again) as host:
        host.describe(PCHANNEL)
        until = time.monotonic() + 10.0
        while not told(again, "recovery_duration_seconds_count"):
            assert time.monotonic() < until
            threading.Event().wait(0.01)
    assert told(again, "recovery_replayed_message_total") == own.messages.num_rows + own.rejections.num_rows


def test_an_append_moves_bytes_durations_ticks_and_growing_segments(service: RocksMQ) -> None:
    metrics, keys = Metrics(), keys_of(V0, 4)
    ahead = 5_000  # as if five seconds passed between the log's stamp and the decision
    with AppendHost(
        service, ChannelState.new, metrics=metrics, now_ms=lambda: time.time_ns() // 1_000_000 + ahead
    ) as host:
        host.append(PCHANNEL, opening()).results()
        before = {name: told(metrics, name) for name in MOVED}
        entry = encode_entry([insert(key) for key in keys[:3]])
        last = host.append(PCHANNEL, entry).results()[-1]
        moved = {name: told(metrics, name) - before[name] for name in MOVED}
        assert moved["wal_append_message_duration_seconds_count"] == 1
        assert moved["wal_impls_append_message_duration_seconds_count"] == 1
        assert moved["wal_impls_append_bytes_total"] >= len(entry)
        assert moved["wal_growing_segment_rows_total"] == 3
        assert moved["wal_growing_segment_bytes"] > 0
        assert moved["wal_mvcc_update_total"] == moved["wal_time_tick_delay_seconds_count"] == 1
        assert moved["wal_time_tick_delay_seconds_sum"] >= ahead / 1000
        allocated = int(told(metrics, "wal_last_allocated_time_tick"))
        assert tick_physical_ms(allocated) >= tick_physical_ms(last.time_tick)
        assert told(metrics, "wal_last_confirmed_time_tick") == told(metrics, "wal_last_allocated_time_tick")


MOVED = (
    "wal_append_message_duration_seconds_count",
    "wal_impls_append_message_duration_seconds_count",
    "wal_impls_append_bytes_total",
    "wal_growing_segment_rows_total",
    "wal_growing_segment_bytes",
    "wal_mvcc_update_total",
    "wal_time_tick_delay_seconds_count",
    "wal_time_tick_delay_seconds_sum",
)


def test_an_open_transaction_is_counted_and_holds_the_confirmed_tick_back(service: RocksMQ) -> None:
    metrics = Metrics()
    with AppendHost(service, ChannelState.new, metrics=metrics) as host:
        host.append(PCHANNEL, opening()).results()
        begin, body, commit = transaction(5, keys_of(V0, 1), vchannel=V0)
        begun = host.append(PCHANNEL, encode_entry([begin])).results()[0].time_tick
        host.append(PCHANNEL, encode_entry([body])).results()
        while tick_physical_ms(host.tick(PCHANNEL)) <= tick_physical_ms(begun):
            pass  # a gauge is a float: it tells ticks of different milliseconds apart
        assert told(metrics, "wal_inflight_txn") == 1
        assert told(metrics, "wal_last_confirmed_time_tick") == float(begun - 1)
        assert told(metrics, "wal_last_allocated_time_tick") > begun
        host.append(PCHANNEL, encode_entry([commit])).results()
        assert told(metrics, "wal_inflight_txn") == 0
        assert told(metrics, "wal_last_confirmed_time_tick") == told(metrics, "wal_last_allocated_time_tick")


class _Held:
    """A log whose reads wait until they are let go."""

    def __init__(self, log: Log, go: threading.Event, waits: threading.Event) -> None:
        self._log, self._go, self._waits = log, go, waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def read(self, position: LogId, **options: Any) -> LogEntries:
        if not self._go.wait(0.05):
            self._waits.set()
            options |= {"end": position}
        return self._log.read(position, **options)


def test_messages_that_are_not_judged_yet_are_counted(service: RocksMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, go, waits, opened = Metrics(), threading.Event(), threading.Event(), service.open
    go.set()
    monkeypatch.setattr(service, "open", lambda name: _Held(opened(name), go, waits))
    with AppendHost(service, ChannelState.new, settings=HostSettings(tick_interval=0.2), metrics=metrics) as host:
        host.append(PCHANNEL, opening()).results()
        assert told(metrics, "wal_unconfirmed_messages") == 0
        go.clear()
        assert waits.wait(10.0), "a read that began before would still be answered"
        asked = host.submit(PCHANNEL, encode_entry([insert(key) for key in keys_of(V0, 7)]))
        assert told(metrics, "wal_unconfirmed_messages") == 7
        go.set()
        asked.outcome(timeout=10.0).results()
        assert told(metrics, "wal_unconfirmed_messages") == 0
