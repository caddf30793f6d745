"""Settings that change while Millrace runs: every host learns them, and what may not be used is never stored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from millrace.base.errors import InvalidSettings, UnsupportedVersion
from millrace.base.settings import LIVE, Settings
from millrace.base.settings.live import (
    LOOK_SECONDS,
    ChangedSettings,
    LiveSettings,
    live_settings_path,
    read_changed,
    write_changed,
)
from millrace.coord.clock import SystemClock
from millrace.coord.machine.settings import SETTINGS_KEY, SettingsCopy, change_settings
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import Put
from millrace.node.append.flow_control import Mode
from millrace.node.append.flow_monitor import MEMORY, FlowMonitor, limits_of
from millrace.node.flush.definition import FlushCadence, FlushLoop
from millrace.node.ingest.definition import IngestLoop


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "a", cache_dir=tmp_path / "cache")


@pytest.fixture
def cluster(settings: Settings, tmp_path: Path) -> Settings:
    return replace(settings, meta_store=f"sqlite:///{tmp_path}/meta.db")


def test_a_changed_setting_counts_in_a_running_process_within_a_second(settings: Settings) -> None:
    now = 0.0
    live = LiveSettings(settings, clock=lambda: now)
    assert live.current() is settings
    result = change_settings(settings, put={"flush_interval": "5", "flush_bytes": "2MiB"})
    assert live.current() is settings, "looked at once a second"
    now += LOOK_SECONDS
    assert live.current() == result == replace(settings, flush_interval=5.0, flush_bytes=2 << 20)
    assert live.current() is live.current()
    change_settings(settings, remove=["flush_interval"])
    now += LOOK_SECONDS
    assert live.current() == replace(settings, flush_bytes=2 << 20)


@pytest.mark.parametrize(
    ("put", "said"),
    [
        ({"flush_interval": "-1"}, "allowed is"),
        ({"flush_interval": "soon"}, "number"),
        ({"flush_bytes": "2 apples"}, "bytes"),
        ({"pchannels": "3"}, "restart"),
        ({"nothing": "3"}, "restart"),
        ({"flow_memory_slow": "0.99"}, "flow control"),
        ({"flow_disk_slow": "1MiB"}, "flow control"),
        ({"flush_interval": "5", "flow_memory_reject": "0.1"}, "flow control"),
    ],
)
@pytest.mark.parametrize("store", ["settings", "cluster"])
def test_what_may_not_be_used_is_refused_before_it_is_stored(
    put: dict[str, str], said: str, store: str, request: pytest.FixtureRequest
) -> None:
    settings: Settings = request.getfixturevalue(store)
    change_settings(settings, put={"balance_lag": "2"}, check=limits_of)
    path = live_settings_path(settings)
    before = path.read_bytes()
    with pytest.raises(InvalidSettings, match=said):
        change_settings(settings, put=put, check=limits_of)
    assert path.read_bytes() == before
    if settings.meta_store:
        with open_cluster_store(settings, SystemClock()) as meta:
            there = meta.get(SETTINGS_KEY)
            assert there is not None
            assert ChangedSettings.decode(there.value).values == {"balance_lag": "2"}


def test_every_host_of_a_cluster_learns_a_change_and_a_host_that_was_away_too(
    cluster: Settings, tmp_path: Path
) -> None:
    hosts = [replace(cluster, data_dir=tmp_path / name) for name in ("a", "b", "c")]
    with open_cluster_store(cluster, SystemClock()) as meta:
        copies = [SettingsCopy(each, meta) for each in hosts]
        change_settings(hosts[0], put={"flush_interval": "7"})
        for copy in copies[:2]:
            copy.run_once()
        assert [LiveSettings(each).current().flush_interval for each in hosts] == [7.0, 7.0, 60.0]
        change_settings(hosts[1], put={"balance_lag": "3"})
        for copy in copies:
            copy.run_once()
        found = [LiveSettings(each).current() for each in hosts]
        assert {(each.flush_interval, each.balance_lag) for each in found} == {(7.0, 3.0)}
        written = [live_settings_path(each).stat().st_mtime_ns for each in hosts]
        for copy in copies:
            copy.run_once()
        assert [live_settings_path(each).stat().st_mtime_ns for each in hosts] == written, (
            "nothing new: nothing written"
        )


@pytest.mark.parametrize("store", ["settings", "cluster"])
def test_changes_at_once_are_all_made(store: str, request: pytest.FixtureRequest) -> None:
    settings: Settings = request.getfixturevalue(store)
    names = sorted(name for name in LIVE if name.startswith(("flow_lag", "flush", "balance_", "publish_i")))

    def change(name: str) -> None:
        change_settings(settings, put={name: "9"})

    threads = [threading.Thread(target=change, args=(name,)) for name in names if name != "balance_policy"]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(read_changed(settings).values) == [name for name in names if name != "balance_policy"]


def test_a_value_that_a_process_does_not_accept_is_left_out_and_the_others_count(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    write_changed(settings, ChangedSettings({"a_later_builds": "1", "flush_interval": "5", "flush_bytes": "9" * 5000}))
    live = LiveSettings(settings)
    with caplog.at_level("INFO"):
        assert live.current() == replace(settings, flush_interval=5.0)
    assert "a_later_builds" in caplog.text
    assert "flush_interval is 5.0 now; it was 60.0" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b'{"form": 2, "at": 0, "values": {}}',
        b"\xff",
        b'{"form": "one", "at": 0, "values": {}}',
        b'{"form": null, "at": 0, "values": {}}',
        b'{"form": 1, "at": 1%s, "values": {}}' % (b"0" * 400),
        b"[" * 100_000,
    ],
    ids=["empty", "nothing", "later", "bytes", "version of text", "no version", "endless time", "deep"],
)
def test_a_damaged_or_later_file_leaves_the_settings_as_they_were(
    settings: Settings, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    live = LiveSettings(settings, clock=lambda: now)
    change_settings(settings, put={"flush_interval": "5"})
    assert live.current().flush_interval == 5.0
    live_settings_path(settings).write_bytes(damage)
    for _ in range(3):
        now += LOOK_SECONDS
        assert live.current().flush_interval == 5.0
    assert caplog.text.count("cannot be read") == 1, "once, not at each look"
    with pytest.raises((InvalidSettings, UnsupportedVersion)):
        change_settings(settings, put={"flush_interval": "6"})


def test_loops_use_a_changed_setting_from_the_next_look_on(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.base.settings.live.LOOK_SECONDS", 0.0)
    ingest, flush = IngestLoop(settings), FlushLoop(settings)
    assert ingest.max_bytes == 256 << 20
    change_settings(settings, put={"max_bytes_per_trigger": "1MiB", "flush_interval": "0.5"})
    assert ingest.max_bytes == 1 << 20
    assert flush.max_bytes == 4 << 20
    assert flush.interval == 0.5


def test_flow_control_and_the_flusher_follow_a_change(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.base.settings.live.LOOK_SECONDS", 0.0)
    monitor = FlowMonitor(settings, None, None)  # type: ignore[arg-type]
    cadence = FlushCadence(settings)
    monitor.control.observe({MEMORY: 0.5}, now=0.0)
    assert monitor.control.mode is Mode.NORMAL
    change_settings(settings, put={"flow_memory_slow": "0.1", "flow_memory_reject": "0.2", "publish_interval": "4"})
    monitor._follow_settings()
    assert monitor.control.observe({MEMORY: 0.5}, now=1.0) is Mode.REJECT
    cadence.due(None, [])  # type: ignore[arg-type]
    assert cadence._seconds == 2.0
    change_settings(settings, put={"flow_memory_slow": "0"})  # off: what passed it is calm at once
    monitor._follow_settings()
    assert monitor.control.observe({}, now=2.0) is Mode.RECOVERY
    write_changed(settings, ChangedSettings({"flow_memory_slow": "0.9", "flow_memory_reject": "0.1"}))
    monitor._follow_settings()  # by hand, or another host's: the former limits stay
    assert monitor.control.observe({MEMORY: 0.95}, now=3.0) is Mode.RECOVERY


NAMES = st.sampled_from(sorted(LIVE))
VALUES = st.one_of(st.sampled_from(["0", "1", "0.5", "1MiB", "64MiB", "", "x", "-1", "1e9"]), st.text(max_size=5))


@hypothesis(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NAMES, st.one_of(st.none(), VALUES)), max_size=8))
def test_whatever_is_tried_the_stored_settings_can_be_used(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, str | None]]
) -> None:
    settings = Settings(data_dir=tmp_path_factory.mktemp("live"))
    model: dict[str, str] = {}
    check: Callable[[Settings], object] = limits_of
    for name, value in changes:
        try:
            if value is None:
                change_settings(settings, remove=[name], check=check)
                model.pop(name, None)
            else:
                change_settings(settings, put={name: value}, check=check)
                model[name] = value
        except InvalidSettings:
            pass
        stored = read_changed(settings)
        assert stored.values == model
        limits_of(stored.applied_to(settings))


def test_a_store_with_a_later_version_is_not_overwritten(cluster: Settings) -> None:
    with open_cluster_store(cluster, SystemClock()) as meta:
        meta.commit([Put(SETTINGS_KEY, b'{"form": 2, "at": 0, "values": {}}')])
    with pytest.raises(UnsupportedVersion):
        change_settings(cluster, put={"balance_lag": "2"})
