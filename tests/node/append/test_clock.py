"""The append host goes by the clock that the log stamps by: log time and leases go on, whatever the wall clock does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.base.errors import InvalidArgument
from millrace.base.metrics import Metrics
from millrace.log.clock import log_or_wall_time_ms
from millrace.log.generations.service import GenerationsService, open_deployment_log
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.stamp_clock import StampClock
from millrace.log.server.flight import LogServer
from millrace.message import builders
from millrace.message.ids import compose_tick
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.rpc.remote_log import RemoteLogService
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, SMALL_FILES, opening
from tests.node.append.test_host import V0, eventually, types_behind

DAY = 86_400


@dataclass
class WallClock:
    """A host's wall clock, and how far it is wrong in seconds."""

    error: float = 0.0

    def __call__(self) -> int:
        return time.time_ns() + round(self.error * 1e9)


@pytest.fixture
def wall() -> WallClock:
    return WallClock()


@pytest.fixture
def service(tmp_path: Path, wall: WallClock) -> Iterator[RocksMQ]:
    clock = StampClock(tmp_path / "clock.json", wall=wall)
    with RocksMQ(tmp_path / "log", settings=SMALL_FILES, clock=clock) as opened:
        opened.create(PCHANNEL)
        yield opened


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def host(service: RocksMQ, metrics: Metrics) -> Iterator[AppendHost]:
    with AppendHost(service, ChannelState.new, metrics=metrics) as opened:
        opened.append(PCHANNEL, opening()).results()
        yield opened


def begin(host: AppendHost, keepalive_ms: int) -> int:
    message = builders.begin_txn(5, vchannel=V0, collection_id=1, term=1, keepalive_ms=keepalive_ms)
    return host.append(PCHANNEL, encode_entry([message])).result().time_tick


def test_a_lease_runs_out_though_the_clock_ran_a_day_ahead_and_was_set_back(
    host: AppendHost, service: RocksMQ, wall: WallClock
) -> None:
    assert service.clock is not None
    wall.error = DAY
    service.clock.accept()
    host.tick(PCHANNEL)
    wall.error = 0.0
    opened = begin(host, 300)
    assert opened > compose_tick((time.time_ns() // 1_000_000) + DAY * 999)
    begun = time.monotonic()
    eventually(lambda: "ROLLBACK_TXN" in types_behind(host, opened))
    assert time.monotonic() - begun > 0.5, "log time goes on at half speed"


def test_while_a_leap_is_held_no_timer_falls_due_before_log_time_is_there(host: AppendHost, wall: WallClock) -> None:
    opened = begin(host, 60_000)
    wall.error = DAY
    threading.Event().wait(0.6)
    assert types_behind(host, opened) == [], "it would tick ten times a second for what is not due"


def test_the_clock_is_shown_by_metrics(
    host: AppendHost, service: RocksMQ, metrics: Metrics, wall: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"millrace_{name}", labels) or 0.0

    assert (told("log_clock_held"), told("log_clock_ahead_seconds")) == (0.0, 0.0)
    assert told("log_time_ahead_seconds", pchannel=PCHANNEL) == 0.0
    wall.error = DAY
    assert told("log_clock_held") == 1.0
    assert told("log_clock_ahead_seconds") == pytest.approx(-DAY, abs=5.0)
    assert service.clock is not None
    service.clock.accept()
    assert (told("log_clock_held"), told("log_clock_ahead_seconds")) == (0.0, 0.0)
    host.tick(PCHANNEL)
    wall.error = 0.0
    assert told("log_clock_ahead_seconds") == pytest.approx(DAY, abs=5.0)
    assert told("log_time_ahead_seconds", pchannel=PCHANNEL) == pytest.approx(DAY, abs=5.0)


def test_brokers_stamps_are_shown_and_not_judged(tmp_path: Path, metrics: Metrics) -> None:
    """A log whose stamps are not its host's: as a broker's whose clock is an hour ahead."""
    ahead = 3600
    service = RocksMQ(tmp_path, settings=SMALL_FILES, now_ms=lambda: time.time_ns() // 1_000_000 + ahead * 1000)
    with service, AppendHost(service, ChannelState.new, metrics=metrics) as host:
        service.create(PCHANNEL)
        host.append(PCHANNEL, opening()).results()
        shown = metrics.registry.get_sample_value("millrace_log_time_ahead_seconds", {"pchannel": PCHANNEL})
        assert shown == pytest.approx(ahead, abs=5.0)
        assert metrics.registry.get_sample_value("millrace_log_clock_held") == 0.0
        assert abs(log_or_wall_time_ms(service) - time.time_ns() // 1_000_000) < 5_000


def test_a_deployments_clock_is_that_of_its_newest_generation(tmp_path: Path) -> None:
    with open_deployment_log(tmp_path / "log") as opened:
        assert isinstance(opened, GenerationsService)
        assert opened.clock is not None
        assert (tmp_path / "log" / "clock.json").exists()


def test_the_servers_action_looks_and_accepts(service: RocksMQ, wall: WallClock, tmp_path: Path) -> None:
    server = LogServer(service, tokens=["secret" * 4])
    try:
        with RemoteLogService.at(server.address, token="secret" * 4) as remote:
            wall.error = DAY
            held = remote.clock()
            assert held.held_since_ms is not None
            assert held.ahead_seconds == pytest.approx(-DAY, abs=5.0)
            assert remote.clock().held_since_ms == held.held_since_ms, "looking accepts nothing"
            assert remote.clock(accept=True).held_since_ms is None
            assert remote.clock().ahead_seconds == pytest.approx(0.0, abs=1.0)
    finally:
        server.close()
    plain = RocksMQ(tmp_path / "plain", now_ms=lambda: 1)
    server = LogServer(plain, tokens=["secret" * 4])
    try:
        with (
            RemoteLogService.at(server.address, token="secret" * 4) as remote,
            pytest.raises(InvalidArgument, match="brokers"),
        ):
            remote.clock()
    finally:
        server.close()
