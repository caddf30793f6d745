"""What the append host reports of a PChannel: messages, segments, transactions, its chain, and its own start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.log.rocksmq import RocksMQ
from millrace.message import builders
from millrace.message.wire import encode_entry
from millrace.metrics import Metrics
from millrace.node.append_host import AppendHost
from millrace.wal.state import ChannelState
from tests.node.append_host_samples import PCHANNEL, insert, judged, keys_of, open_log, opening, transaction

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
