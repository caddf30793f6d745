"""The clock that stamps come from: it judges the wall clock by the steady one, and never goes back."""

from __future__ import annotations

import errno
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millrace.log.clock import log_clock, log_or_wall_time_ms, log_time_ms
from millrace.log.rocksmq.disk import OsDisk
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.stamp_clock import MAX_LEAP_SECONDS, PERSIST_SECONDS, PROMISE_SECONDS, StampClock
from millrace.log.server.flight import LogServer
from millrace.message.ids import LOGICAL_BITS
from millrace.rpc.remote_log import RemoteLogService
from tests.log.crash_images import SETTINGS

SECOND = 1_000_000_000
HOUR = 3600.0
DAY = 24 * HOUR
BEGIN = 1_800_000_000.0


@dataclass
class Host:
    """A machine: true time goes on, its wall clock is wrong by `error`, its steady clock began at the boot."""

    folder: Path
    true: float = BEGIN
    error: float = 0.0
    boot: str = "first"
    booted: float = BEGIN - 50.0
    opened: list[StampClock] = field(default_factory=list)

    def wall(self) -> int:
        return round((self.true + self.error) * SECOND)

    def steady(self) -> int:
        return round((self.true - self.booted) * SECOND)

    def open(self, *, leap_seconds: float = MAX_LEAP_SECONDS) -> StampClock:
        path = self.folder / "clock.json"
        return StampClock(path, max_leap_seconds=leap_seconds, wall=self.wall, steady=self.steady, boot=self.boot)

    def reboot(self, *, off: float = 60.0, boot: str = "second") -> None:
        self.true += off
        self.booted, self.boot = self.true, boot


def seconds(clock: StampClock) -> float:
    return clock.now_ms() / 1000


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_stamps_are_the_wall_clock_while_that_is_right_and_an_idle_day_is_no_leap(host: Host) -> None:
    clock = host.open()
    for passed in (0.0, 0.5, HOUR, 30 * DAY):
        host.true += passed
        assert seconds(clock) == host.true
        assert clock.view().held_since_ms is None


def test_a_leap_within_the_bound_is_believed_and_one_beyond_is_not(host: Host) -> None:
    clock = host.open()
    host.error = MAX_LEAP_SECONDS
    assert seconds(clock) == host.true + MAX_LEAP_SECONDS
    host.error += MAX_LEAP_SECONDS + 0.001
    assert seconds(clock) == host.true + MAX_LEAP_SECONDS
    assert clock.view().ahead_seconds == pytest.approx(-MAX_LEAP_SECONDS - 0.001, abs=0.002)


def test_while_a_leap_is_held_stamps_go_on_by_the_steady_clock_until_the_wall_clock_is_back(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    clock = host.open()
    host.true += 10
    host.error = DAY
    for passed in (0.0, 1.0, HOUR):
        host.true += passed
        assert seconds(clock) == host.true
    held = clock.view()
    assert held.held_since_ms == (BEGIN + 10) * 1000
    assert held.ahead_seconds == -DAY
    assert [each.levelno for each in caplog.records] == [logging.WARNING], "said once, not at each append"
    host.error = 2.0
    assert seconds(clock) == host.true + 2.0
    assert clock.view().held_since_ms is None


def test_an_operator_accepts_the_new_time_and_only_it(host: Host) -> None:
    clock = host.open()
    host.error = DAY
    assert seconds(clock) == host.true
    accepted = clock.accept()
    assert (accepted.held_since_ms, accepted.stamp_ms) == (None, accepted.wall_ms)
    assert seconds(clock) == host.true + DAY
    host.error += DAY
    assert seconds(clock) == host.true + DAY, "the next leap is judged again"


def test_where_stamps_are_ahead_they_go_on_at_half_speed_until_the_wall_clock_has_caught_up(host: Host) -> None:
    clock = host.open()
    host.error = DAY
    clock.accept()
    host.error = 0.0
    before = seconds(clock)
    for _ in range(10):
        host.true += 60.0
        seconds(clock)
    assert seconds(clock) == before + 300.0
    assert clock.view().ahead_seconds == DAY - 300.0
    host.true += 2 * DAY - 600.0
    assert seconds(clock) == pytest.approx(host.true, abs=0.002)
    host.true += 1.0
    assert seconds(clock) == host.true


def test_a_clock_that_was_set_back_by_mistake_and_then_right_again_needs_nobody(host: Host) -> None:
    clock = host.open()
    host.error = -DAY
    seconds(clock)
    host.true += 3 * HOUR
    assert seconds(clock) == host.true - 1.5 * HOUR
    host.error = 0.0
    assert seconds(clock) == host.true
    assert clock.view().held_since_ms is None


@pytest.mark.parametrize("closed", [True, False])
def test_the_next_process_of_the_same_boot_goes_on_with_what_was_believed(host: Host, closed: bool) -> None:
    clock = host.open()
    host.true += PERSIST_SECONDS
    seconds(clock)
    if closed:
        host.true += 1.0
        clock.close()
    host.true += DAY
    host.error = DAY
    clock = host.open()
    assert seconds(clock) == host.true, "it leapt while nobody looked"
    since = clock.view().held_since_ms
    host.true += DAY
    clock = host.open()
    assert (seconds(clock), clock.view().held_since_ms) == (host.true, since)
    clock.accept()
    assert seconds(host.open()) == host.true + DAY


def test_after_another_boot_the_wall_clock_is_believed_but_no_stamp_comes_before_a_kept_one(host: Host) -> None:
    last = seconds(host.open())
    host.reboot(off=DAY)
    assert seconds(host.open()) == host.true
    last = host.true
    host.reboot(off=60.0, boot="third")
    host.error = -HOUR
    clock = host.open()
    assert seconds(clock) == last
    host.true += 10.0
    assert seconds(clock) == last + 5.0


def test_a_leap_that_was_held_is_held_across_a_boot_unless_the_clock_was_set_back(host: Host) -> None:
    clock = host.open()
    host.error = DAY
    seconds(clock)
    host.reboot(off=HOUR)
    clock = host.open()
    assert seconds(clock) == host.true
    assert clock.view().held_since_ms is not None
    host.reboot(off=HOUR, boot="third")
    host.error = 5.0
    clock = host.open()
    assert seconds(clock) == host.true + 5.0
    assert clock.view().held_since_ms is None


@pytest.mark.parametrize(
    "damage", [lambda _: b"", lambda data: data[:-20], lambda data: data.replace(b"1800000000", b"1900000000", 1)]
)
def test_what_was_kept_and_does_not_read_is_as_if_it_were_lost(host: Host, damage: object) -> None:
    host.open().close()
    path = host.folder / "clock.json"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    host.error = DAY
    assert seconds(host.open()) == host.true + DAY


def test_a_disk_that_takes_nothing_stops_no_stamp(host: Host) -> None:
    clock = host.open()
    (host.folder / "clock.json").unlink()
    host.folder.rmdir()
    host.true += 2 * PERSIST_SECONDS
    assert seconds(clock) == host.true
    host.folder.mkdir()
    assert not (host.folder / "clock.json").exists()
    host.true += 2 * PERSIST_SECONDS
    seconds(clock)
    assert (host.folder / "clock.json").exists()


def test_what_is_believed_is_kept_once_in_a_while_and_when_a_leap_begins_or_ends(host: Host) -> None:
    clock = host.open()
    path = host.folder / "clock.json"
    kept = [path.read_bytes()]
    for _ in range(105):
        host.true += PERSIST_SECONDS / 50
        seconds(clock)
        if path.read_bytes() != kept[-1]:
            kept.append(path.read_bytes())
    assert len(kept) == 3
    for host.error in (DAY, 0.0):
        host.true += 0.01
        seconds(clock)
        assert path.read_bytes() != kept[-1]
        kept.append(path.read_bytes())


def test_no_machines_end_undoes_that_a_leap_is_held_or_is_not_any_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    full = False

    def sync(disk: OsDisk, fd: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "full")
        synced.append(fd)

    monkeypatch.setattr(OsDisk, "sync", sync)

    def syncs(passed: float) -> int:
        synced.clear()
        host.true += passed
        seconds(clock)
        return len(synced)

    clock = host.open()
    assert syncs(2 * PERSIST_SECONDS) == 0, "no append waits for more than its own sync while all is well"
    host.error = DAY
    assert syncs(0.1) == 1
    assert syncs(2 * PERSIST_SECONDS) == 1, "the time that went on while it is held"
    host.error, full = 0.0, True
    assert syncs(0.1) == 0
    full = False
    assert syncs(2 * PERSIST_SECONDS) == 1, "what the disk did not take is kept once it does"
    assert syncs(2 * PERSIST_SECONDS) == 0
    host.error = DAY
    seconds(clock)
    synced.clear()
    clock.accept()
    assert len(synced) == 1


def test_a_process_that_is_killed_again_and_again_takes_log_time_ahead_by_little(host: Host) -> None:
    """Each life of 0.2 s promises, and dies without a word."""
    for _ in range(200):
        clock = host.open()
        for _ in range(4):
            clock.floor_ms()
            host.true += 0.05
    assert clock.now_ms() <= host.wall() // 1_000_000 + 1100


def test_a_steady_clock_that_went_back_is_another_boots_whatever_its_name(host: Host) -> None:
    """As in a container that begins its own count."""
    host.true += DAY
    last = seconds(host.open())
    host.reboot(off=1.0, boot=host.boot)
    host.error = -HOUR
    clock = host.open()
    assert seconds(clock) == last
    host.true += 10.0
    assert seconds(clock) == last + 5.0


def test_a_stamp_that_is_seen_counts_from_when_it_is_seen(host: Host) -> None:
    clock = host.open()
    ahead = host.true + DAY
    for more in (0, 100):
        clock.observe(round(ahead + more) * 1000)
        assert seconds(clock) == ahead + more
        host.true += 60.0
    assert seconds(clock) == ahead + 130.0


def test_without_a_bound_every_leap_is_believed(host: Host) -> None:
    clock = host.open(leap_seconds=0)
    host.error = 1000 * DAY
    assert seconds(clock) == host.true + 1000 * DAY


# --- in the log -------------------------------------------------------------------------------------------------------


def stamps(service: RocksMQ, channel: str, count: int = 1) -> list[int]:
    return [entry >> LOGICAL_BITS for entry in service.produce(channel, [b"x"] * count)]


def test_log_time_goes_on_at_half_speed_after_a_clock_that_ran_ahead_was_set_back(host: Host) -> None:
    host.error = DAY
    with RocksMQ(host.folder / "log", settings=SETTINGS, clock=host.open()) as service:
        service.create("c")
        (first,) = stamps(service, "c")
        host.error = 0.0
        host.true += 60.0
        (second,) = stamps(service, "c")
    assert second - first == 30_000, "it stood still for a day before"


def test_the_last_stamp_of_a_channel_feeds_the_clock_where_nothing_was_kept(host: Host) -> None:
    host.error = DAY
    with RocksMQ(host.folder / "log", settings=SETTINGS, clock=host.open()) as service:
        service.create("c")
        (first,) = stamps(service, "c")
        service.create("d")
    (host.folder / "clock.json").unlink()
    host.error = 0.0
    with RocksMQ(host.folder / "log", settings=SETTINGS, clock=host.open()) as service:
        service.open("c")
        host.true += 60.0
        assert stamps(service, "c") == [first + 30_000]
        assert stamps(service, "d") == [first + 30_000], "one log, one time"
        assert log_or_wall_time_ms(service) == first + 30_000


def test_the_embedded_log_stamps_by_a_judged_clock_unless_it_is_given_another(tmp_path: Path) -> None:
    with RocksMQ(tmp_path / "a", settings=SETTINGS) as service:
        assert service.clock is log_clock(service) is not None
        assert (tmp_path / "a" / "clock.json").exists()
    with RocksMQ(tmp_path / "b", settings=SETTINGS, now_ms=lambda: 7) as service:
        assert log_clock(service) is None
    assert log_clock(object()) is None


def test_who_asks_a_server_for_the_time_hears_what_it_stamps_by(host: Host) -> None:
    host.error = DAY
    with RocksMQ(host.folder / "log", settings=SETTINGS, clock=host.open()) as service:
        server = LogServer(service, tokens=["a-token"])
        try:
            with RemoteLogService.at(server.address, token="a-token") as elsewhere:
                assert log_time_ms(elsewhere) == log_or_wall_time_ms(elsewhere) == log_time_ms(service)
        finally:
            server.close()
    with RocksMQ(host.folder / "other", settings=SETTINGS, now_ms=lambda: 7) as service:
        server = LogServer(service, tokens=["a-token"])
        try:
            with RemoteLogService.at(server.address, token="a-token") as elsewhere:
                assert log_time_ms(elsewhere) is log_time_ms(service) is None, "somebody else stamps"
        finally:
            server.close()


# --- the law ----------------------------------------------------------------------------------------------------------

_JUMPS = st.sampled_from([-400 * DAY, -HOUR, -MAX_LEAP_SECONDS, -1.0, 1.0, 299.0, 301.0, HOUR, DAY, 3000 * DAY])
_PASSED = st.sampled_from([0.0, 0.001, 1.0, 4.0, 6.0, 200.0, HOUR, DAY])


class StampsUnderAnyClock(RuleBasedStateMachine):
    """Any wall clock, any sleeps, restarts, boots, losses and accepts.

    Stamps never decrease; they move on at half of the steady clock's speed at the least, while the process
    lives and from one process of a boot to the next (but for what the last one did not keep); they are the wall
    clock unless a leap is held or they are ahead; and they are never further ahead of true time than the wall
    clock was when it was believed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.host = Host(Path(self._folder.name))
        self.believed = 0.0  # the greatest error of the wall clock that was, or may have been, believed
        self.grown = 0.0  # how far it leapt ahead since a leap is held
        self.set_back = False  # since then

    def teardown(self) -> None:
        self._folder.cleanup()

    @initialize()
    def begin(self) -> None:
        self._open()
        self.last, self.at = self.clock.now_ms(), self.host.true
        self.slack = 0.0

    def _open(self) -> None:
        self.clock = self.host.open()

    def _believes(self) -> None:
        self.believed = max(self.believed, self.host.error)

    @rule(passed=_PASSED)
    def time_passes(self, passed: float) -> None:
        self.host.true += passed

    @rule(jump=_JUMPS)
    def the_wall_clock_is_set(self, jump: float) -> None:
        self.host.error = max(-1000 * DAY, self.host.error + jump)
        self.grown += max(0.0, jump)
        self.set_back |= jump < 0
        if self.host.error <= self.believed + MAX_LEAP_SECONDS:
            self._believes()

    @rule()
    def an_operator_accepts(self) -> None:
        self._believes()
        self.clock.accept()
        assert self.clock.view().held_since_ms is None

    @rule(passed=_PASSED, closed=st.booleans())
    def the_process_starts_anew(self, passed: float, closed: bool) -> None:
        if closed:
            self.clock.close()
        self.host.true += passed
        self._open()
        self.clock.observe(self.last)
        self.slack = PERSIST_SECONDS / 2 + 0.002

    @rule(passed=_PASSED)
    def the_machine_starts_anew(self, passed: float) -> None:
        held = self.clock.view().held_since_ms is not None
        self.host.reboot(off=passed, boot=self.host.boot + "'")
        self._open()
        self.clock.observe(self.last)
        if self.clock.view().held_since_ms is None:
            assert not held or self.set_back
            self._believes()
        else:
            assert held
            self.believed += self.grown  # what no steady clock has seen
        self.at, self.slack = self.host.true, 0.0

    @rule(passed=_PASSED)
    def what_was_kept_is_lost(self, passed: float) -> None:
        (self.host.folder / "clock.json").unlink(missing_ok=True)
        self.host.true += passed
        self._open()
        self.clock.observe(self.last)
        self._believes()
        self.at = self.host.true

    @precondition(lambda self: hasattr(self, "last"))
    @invariant()
    def stamps_keep_the_law(self) -> None:
        view = self.clock.view()
        assert view.stamp_ms >= self.last
        half = (self.host.true - self.at) / 2 - self.slack
        assert view.stamp_ms - self.last >= half * 1000 - 2
        if view.held_since_ms is None:
            assert view.stamp_ms >= view.wall_ms
            self.grown, self.set_back = 0.0, False
        else:
            assert view.wall_ms - view.stamp_ms > MAX_LEAP_SECONDS * 1000 - 2
        assert view.stamp_ms / 1000 <= self.host.true + self.believed + 0.002
        self.last, self.at, self.slack = self.clock.now_ms(), self.host.true, 0.0


StampsUnderAnyClock.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
test_stamps_keep_the_law_under_any_clock = StampsUnderAnyClock.TestCase


# --- promises ---------------------------------------------------------------------------------------------------------


def test_a_promise_is_stored_before_it_is_given_and_once_for_many(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(OsDisk, "sync", lambda disk, fd: synced.append(fd))
    clock = host.open()
    assert synced == []
    floors = [clock.floor_ms() for _ in range(100)]
    assert (set(floors), len(synced)) == ({round(host.true * 1000)}, 1)
    host.true += PROMISE_SECONDS / 2
    clock.floor_ms()
    assert len(synced) == 1
    host.true += PROMISE_SECONDS
    clock.floor_ms()
    assert len(synced) == 2


def test_no_floor_is_given_whose_promise_the_disk_did_not_take(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = host.open()

    def full(disk: OsDisk, fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(OsDisk, "sync", full)
        with pytest.raises(OSError, match="full"):
            clock.floor_ms()
    assert clock.floor_ms() == round(host.true * 1000)


def test_a_state_without_a_promise_is_that_of_earlier_builds(host: Host) -> None:
    host.open().close()
    assert b'"version": 1' in (host.folder / "clock.json").read_bytes()
    clock = host.open()
    clock.floor_ms()
    assert b'"version": 2' in (host.folder / "clock.json").read_bytes()
    clock.close()
    assert host.open().now_ms() == round(host.true * 1000), "closed in order, it leaves nothing ahead of the clock"


_ENDS = ("kill", "boot", "power loss")


class FloorsUnderAnyClock(RuleBasedStateMachine):
    """Any wall clock, kills, boots and power losses: no stamp is before a floor that was given.

    A power loss leaves the last state that was written durably.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.host = Host(Path(self._folder.name))
        self.path = self.host.folder / "clock.json"
        self.durable: bytes | None = None
        self.patch = pytest.MonkeyPatch()

        def sync_directory(disk: OsDisk, path: Path) -> None:
            self.durable = self.path.read_bytes()

        self.patch.setattr(OsDisk, "sync", lambda disk, fd: None)
        self.patch.setattr(OsDisk, "sync_directory", sync_directory)
        self.clock = self.host.open()
        self.floor = 0

    def teardown(self) -> None:
        self.patch.undo()
        self._folder.cleanup()

    @rule(passed=_PASSED)
    def time_passes(self, passed: float) -> None:
        self.host.true += passed

    @rule(jump=_JUMPS)
    def the_wall_clock_is_set(self, jump: float) -> None:
        self.host.error = max(-1000 * DAY, self.host.error + jump)

    @rule()
    def a_floor_is_given(self) -> None:
        self.floor = max(self.floor, self.clock.floor_ms())

    @rule()
    def the_clock_is_read(self) -> None:
        self.clock.now_ms()

    @rule(closed=st.booleans())
    def the_process_starts_anew(self, closed: bool) -> None:
        if closed:
            self.clock.close()
        self.clock = self.host.open()

    @rule(passed=_PASSED, lost=st.booleans())
    def the_machine_starts_anew(self, passed: float, lost: bool) -> None:
        self.host.reboot(off=passed, boot=self.host.boot + "'")
        if lost:
            self.path.unlink()
            if self.durable is not None:
                self.path.write_bytes(self.durable)
        self.clock = self.host.open()

    @rule(passed=st.sampled_from([0.0, 0.001, 0.4, 0.9]), back=st.sampled_from([0.2, HOUR]), how=st.sampled_from(_ENDS))
    def it_ends_right_after_a_floor_and_the_wall_clock_is_set_back(self, passed: float, back: float, how: str) -> None:
        self.host.true += passed
        self.a_floor_is_given()
        self.host.error -= back
        if how == "kill":
            self.the_process_starts_anew(closed=False)
        else:
            self.the_machine_starts_anew(passed=0.0, lost=how == "power loss")

    @invariant()
    def no_stamp_is_before_a_floor(self) -> None:
        with self.clock._lock:  # a look that stores nothing
            assert self.clock._look() // 1_000_000 >= self.floor


def test_no_stamp_is_before_a_floor_under_any_clock() -> None:
    limits = settings(max_examples=150, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(FloorsUnderAnyClock, settings=limits)
