"""The append host's flow control on a real log.

What it reads, what it slows and refuses, and how it relieves a disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from millrace.access.grants import LOCAL_ADMIN
from millrace.base.errors import RateLimited
from millrace.base.metrics import Metrics
from millrace.base.settings import Settings
from millrace.client.database import connect
from millrace.log.rocksmq.service import RocksMQ
from millrace.message import builders
from millrace.message.ids import MessageId
from millrace.message.wire.encode import encode_entry
from millrace.node.append import flow_monitor
from millrace.node.append.authorizer import AppendAuthorizer
from millrace.node.append.flow_control import Mode
from millrace.node.append.flow_monitor import (
    DISK,
    LAG,
    FlowMonitor,
    FlushLag,
    carries_rows,
    limits_of,
    memory_used_fraction,
)
from millrace.node.append.host import AppendHost
from millrace.node.append.server import AppendExtension, committed_state_loader
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.ranges import TickRange
from millrace.operations.quality.results import record_run
from millrace.rpc import calls
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.tables.collections.flush_tables import (
    Checkpoint,
    ensure_checkpoints_table,
    next_checkpoint,
    read_checkpoints,
    write_checkpoint,
)
from millrace.tables.read.arrow import read_arrow
from millrace.wal.shared_map import SharedMap
from millrace.wal.visible.catalog import WalCatalog
from tests.node.append.samples import insert
from tests.wal.busy_channel import BusyChannel

P = "dml_0"

DOOR = AppendAuthorizer(LOCAL_ADMIN, lambda vchannel: None)


@pytest.mark.parametrize("name", ["flow_memory_slow", "flow_disk_slow", "flow_lag_slow"])
def test_a_watermark_that_is_not_looked_at_has_no_other_value_to_fit(tmp_path: Path, name: str) -> None:
    off = Settings(data_dir=tmp_path, cache_dir=tmp_path, **{name: 0})
    assert len(limits_of(off).watermarks) == {"flow_lag_slow": 2}.get(name, 1)


@pytest.fixture
def settings(filled: Settings) -> Settings:
    return filled


@pytest.fixture
def host(settings: Settings, engine: RocksMQ) -> Iterator[AppendHost]:
    with AppendHost(engine, committed_state_loader(Path(settings.wal_uri), engine), metrics=Metrics()) as host:
        host.tick(P)
        yield host


CHECK = Check("ticks", "expect_column_values_to_be_between", {"column": "tick_step", "min_value": 1}, "they increase")


def free_is(monkeypatch: pytest.MonkeyPatch, values: list[int]) -> None:
    """Have the disk say that so much is free, look after look; the last value stays."""
    left = deque(values)

    def usage(_: object) -> SimpleNamespace:
        return SimpleNamespace(free=left.popleft() if len(left) > 1 else left[0])

    monkeypatch.setattr(flow_monitor.shutil, "disk_usage", usage)


def test_inserts_and_deletes_and_what_does_not_decode_carry_rows_and_nothing_else_does() -> None:
    def entry(*messages: object) -> pa.LargeBinaryArray:
        return pa.array([encode_entry(list(messages))], pa.large_binary())  # type: ignore[arg-type]

    assert carries_rows(entry(insert(1)))
    assert carries_rows(entry(builders.flush_all(term=1), insert(1)))
    assert carries_rows(pa.array([b"no entry"], pa.large_binary()))
    assert not carries_rows(entry(builders.flush_all(term=1)))
    assert not carries_rows(entry(builders.time_tick(term=1)))
    assert not carries_rows(entry(builders.begin_txn(1, vchannel="p0_1v0", collection_id=1, term=1)))


def test_memory_in_use_is_a_part_of_what_there_is() -> None:
    assert 0.0 < memory_used_fraction() < 1.0


def test_flush_lag_is_how_long_the_oldest_unflushed_row_waits() -> None:
    lag = FlushLag()

    def seconds(now: float, visible: int, flushed: int) -> float:
        return lag.seconds({P: visible}, {P: SimpleNamespace(time_tick=flushed)}, now=now)  # type: ignore[dict-item]

    assert seconds(0.0, 10, 10) == 0.0
    assert seconds(1.0, 20, 10) == 0.0
    assert seconds(4.0, 30, 10) == 3.0
    assert seconds(5.0, 30, 20) == 1.0
    assert seconds(9.0, 30, 30) == 0.0
    assert [seconds(10.0 + each, 100 + each, 30) for each in range(2000)][-1] == 1999.0


def test_a_look_at_the_lag_costs_what_changed_since_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path, cache_dir=tmp_path, flow_lag_slow=10.0, flow_lag_reject=20.0)
    busy, other = BusyChannel(40), BusyChannel(3)
    other.state.pchannel = "p1"
    host = SimpleNamespace(states=lambda: {"p0": busy.state, "p1": other.state})
    monitor = FlowMonitor(settings, host, SimpleNamespace())  # type: ignore[arg-type]
    table = ensure_checkpoints_table(settings.checkpoints_uri)
    read: list[int] = []
    monkeypatch.setattr(
        flow_monitor, "read_checkpoints", lambda found: (read.append(found.version), read_checkpoints(found))[1]
    )
    looked: list[list[str]] = []
    changed = SharedMap.changed_keys
    monkeypatch.setattr(SharedMap, "changed_keys", lambda *maps: (looked.append(changed(*maps)), looked[-1])[1])
    newest = {name: max(each.mvcc for each in state.vchannels.values()) for name, state in host.states().items()}
    assert monitor._visible() == newest
    busy.append(busy.insert(7), busy.insert(9))
    looked.clear()
    assert monitor._visible() == newest | {"p0": busy.state.last_tick}
    assert looked == [["p0_7v0", "p0_9v0"], []]
    for _ in range(3):
        assert monitor._checkpoints() == {}
    assert read == [0]
    made = next_checkpoint(Checkpoint("p0"), time_tick=9, confirmed=MessageId(0, 1, 0, 0), term=1, catalog=WalCatalog())
    commit_fenced(table, [CommitPart(write_checkpoint(table.uri, made))]).raise_if_fenced()
    assert monitor._checkpoints()["p0"].time_tick == 9
    assert read == [0, 1]


@pytest.mark.slow
def test_a_row_that_no_flusher_takes_slows_and_then_stops_its_producers_until_one_does(
    settings: Settings, engine: RocksMQ, host: AppendHost
) -> None:
    now = [0.0]
    settings = replace(settings, flow_lag_slow=10.0, flow_lag_reject=20.0, flow_memory_slow=0, flow_disk_slow=0)
    settings = replace(settings, flow_memory_reject=0, flow_disk_reject=0)
    monitor = FlowMonitor(settings, host, engine, clock=lambda: now[0])
    modes = []
    for now[0] in (0.0, 9.0, 11.0, 21.0):
        modes.append(monitor.sample())
    assert modes == [Mode.NORMAL, Mode.NORMAL, Mode.SLOWDOWN, Mode.REJECT]
    ingest_to_end(settings, engine)
    flush_to_end(settings)
    assert monitor.sample() is Mode.RECOVERY
    assert monitor.control.describe()["readings"][LAG] == 0.0


@pytest.mark.slow
def test_in_reject_mode_row_changes_are_refused_before_the_log_and_everything_else_passes(
    settings: Settings, engine: RocksMQ, host: AppendHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_is(monkeypatch, [1])
    monitor = FlowMonitor(settings, host, engine, metrics=host.metrics, relief_pause=1e9)
    monitor._relieved = monitor._clock()
    extension = AppendExtension(host, flow=monitor)
    assert monitor.sample() is Mode.REJECT
    end = engine.open(P).describe().end
    with pytest.raises(RateLimited, match="free disk bytes is 1 "):
        extension.submit(P, [pa.array([encode_entry([insert(1)])], pa.large_binary())], DOOR)
    assert engine.open(P).describe().end == end
    flushed = encode_entry([builders.flush_all(term=host.state(P).term)])
    assert extension.submit(P, [pa.array([flushed], pa.large_binary())], DOOR)[0].outcome(timeout=10).result().time_tick
    assert host.metrics is not None
    monitor.sample()
    text = host.metrics.render().decode()
    assert 'millrace_wal_rate_limit_state{mode="reject"} 1.0' in text
    assert "millrace_wal_rate_limit_refused 1.0" in text
    assert f'millrace_wal_rate_limit_reading{{watermark="{DISK}"}} 1.0' in text
    assert "millrace_wal_rate_limit_bytes_per_second -1.0" in text


@pytest.mark.slow
def test_an_append_that_waits_is_counted_and_the_rate_is_shown(
    settings: Settings, engine: RocksMQ, host: AppendHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_is(monkeypatch, [settings.flow_disk_slow - 1])
    assert host.metrics is not None
    monitor = FlowMonitor(settings, host, engine, metrics=host.metrics, relief_pause=1e9)
    monitor._relieved = monitor._clock()
    assert monitor.sample() is Mode.SLOWDOWN
    assert monitor.control.admit(1 << 20, now=monitor._clock()) == 0.0
    assert monitor.control.admit(1, now=monitor._clock()) > 0.0, "behind the first"
    monitor.sample()
    assert host.metrics.registry.get_sample_value("millrace_wal_rate_limit_delayed") == 1
    rate = host.metrics.registry.get_sample_value("millrace_wal_rate_limit_bytes_per_second")
    assert rate == settings.flow_start_rate


@pytest.mark.slow
def test_a_disk_that_runs_full_is_flushed_and_the_log_truncated_before_anything_is_slowed(
    settings: Settings, engine: RocksMQ, host: AppendHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = settings.flow_disk_slow
    free_is(monkeypatch, [slow - 1, slow * 2])  # as if truncation had made that much room
    before = engine.open(P).describe()
    stop, metrics = threading.Event(), Metrics()

    def flusher() -> None:
        while not stop.wait(0.05):
            ingest_to_end(settings, engine)
            flush_to_end(settings)

    working = threading.Thread(target=flusher)
    working.start()
    try:
        monitor = FlowMonitor(settings, host, engine, metrics=metrics)
        monitor.sample()
        monitor.await_relief(timeout=30)
        mode = monitor.sample()
    finally:
        stop.set()
        working.join(30)
    assert not working.is_alive()
    after = engine.open(P).describe()
    assert after.begin > before.begin
    assert after.bytes < before.bytes
    assert metrics.registry.get_sample_value("millrace_truncated_bytes_total", {"pchannel": P})
    assert mode is Mode.RECOVERY
    assert monitor.control.describe()["readings"][DISK] == slow * 2
    assert read_arrow(settings, 1).num_rows == 20


@pytest.mark.slow
def test_a_disk_that_runs_full_keeps_the_log_while_quality_forbids_that_it_goes(
    settings: Settings, engine: RocksMQ, host: AppendHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest_to_end(settings, engine)
    flush_to_end(settings)
    failed = TableCheckResult("wal", {P: TickRange(0, 1 << 62)}, (CheckResult(CHECK, success=False, unexpected=1),))
    record_run(settings, "first", [failed])
    free_is(monkeypatch, [settings.flow_disk_slow - 1])
    before = engine.open(P).describe()
    monitor = FlowMonitor(settings, host, engine)
    assert monitor.sample() is Mode.SLOWDOWN
    monitor.await_relief(timeout=30)
    assert engine.open(P).describe() == before


def test_a_watermark_of_zero_is_not_looked_at() -> None:
    off = {"flow_memory_slow": 0.0, "flow_memory_reject": 0.0, "flow_disk_slow": 0, "flow_disk_reject": 0}
    assert limits_of(Settings(**off)).watermarks == ()  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_host_of_a_deployment_tells_its_flow_state(settings: Settings) -> None:
    with connect(settings=settings) as client:
        found = client.connection.call(calls.FLOW, {})
        client.connection.service.shutdown()
    assert found["mode"] == "normal"
    assert found["rate"] is None
