"""Up to where a VChannel is readable, and ticks with a source, kept or not: what the reference documents name."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import ChannelNotFound, DeadlineExceeded, InvalidArgument
from millrace.log.protocol import LogService
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.stamp_clock import StampClock
from millrace.message import builders
from millrace.message.ids import LOGICAL_BITS, MessageId, compose_tick
from millrace.message.model import MutableMessage
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.rpc.outcome import AppendResult
from millrace.rpc.tail import TailBatch
from millrace.wal.state import ChannelState
from tests.node.append.samples import (
    PCHANNEL,
    SMALL_FILES,
    VCHANNELS,
    insert,
    keys_of,
    open_log,
    opening,
    transaction,
)

V0, V1 = VCHANNELS


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LogService]:
    with open_log(tmp_path / "log", PCHANNEL) as opened:
        yield opened


@pytest.fixture
def host(service: LogService) -> Iterator[AppendHost]:
    with AppendHost(service, ChannelState.new) as opened:
        opened.append(PCHANNEL, opening()).results()
        yield opened


def test_a_vchannels_mvcc_is_the_tick_of_what_became_visible_there_last(host: AppendHost) -> None:
    [written] = host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
    other = host.mvcc(V1).time_tick
    assert host.mvcc(V0)[:3] == (V0, written.time_tick, True)
    assert other < written.time_tick
    begin, body, commit = transaction(1, keys_of(V1, 1), vchannel=V1)
    host.append(PCHANNEL, encode_entry([begin, body])).results()
    assert host.mvcc(V1).time_tick == other, "an open transaction shows nothing"
    [committed] = host.append(PCHANNEL, encode_entry([commit])).results()
    assert host.mvcc(V1)[:3] == (V1, committed.time_tick, True)
    host.tick(PCHANNEL)
    assert host.mvcc(V0).time_tick == written.time_tick, "time alone makes nothing visible"


def test_it_is_not_confirmed_while_the_log_holds_what_is_not_decided(host: AppendHost, service: LogService) -> None:
    before = host.mvcc(V0)
    assert before.confirmed
    follower = host._follower(PCHANNEL)
    follower.stop()  # the chain stands still, and the log goes on
    follower._thread.join(10.0)
    service.open(PCHANNEL).append([encode_entry([insert(keys_of(V0, 1)[0])])])
    assert host.mvcc(V0)[:3] == (V0, before.time_tick, False)
    host.restart(PCHANNEL)
    host.tick(PCHANNEL)
    found = host.mvcc(V0)
    assert found.confirmed
    assert found.time_tick > before.time_tick


@contextmanager
def standing(host: AppendHost) -> Iterator[None]:
    """The chain stands still inside, and the log goes on."""
    turn = host._follower(PCHANNEL)._turn
    with turn:
        yield
    host._follower(PCHANNEL)._awake.set()


def test_what_waits_on_one_vchannel_does_not_hold_up_another(host: AppendHost, service: LogService) -> None:
    host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
    log = service.open(PCHANNEL)
    with standing(host):
        [entry] = log.append([encode_entry([insert(keys_of(V1, 1)[0])])])
        stamp = entry.entry >> LOGICAL_BITS
        time.sleep(0.003)
        idle, busy = host.mvcc(V0), host.mvcc(V1)
        assert (idle.confirmed, busy.confirmed) == (True, False)
        assert busy.unconfirmed >> LOGICAL_BITS == stamp
        assert idle.unconfirmed >> LOGICAL_BITS > stamp
    host.tick(PCHANNEL, persist=False)
    decided = host.mvcc(V1)
    assert decided.confirmed
    assert decided.time_tick >= busy.unconfirmed


def test_the_updates_of_a_vchannel_are_counted_apart(host: AppendHost) -> None:
    assert (host.mvcc(V0).updates, host.mvcc(V1).updates) == (host.mvcc(V0).updates, host.mvcc(V1).updates)
    first, second = host.mvcc(V0).updates, host.mvcc(V1).updates
    for key in keys_of(V0, 3):
        host.append(PCHANNEL, encode_entry([insert(key)])).results()
        host.mvcc(V1)
    host.tick(PCHANNEL)
    assert (host.mvcc(V0).updates - first, host.mvcc(V1).updates - second) == (3, 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=4), max_size=4))
def test_nothing_that_is_undecided_has_a_tick_below_the_least_unconfirmed(
    backlog: list[list[tuple[int, bool]]],
) -> None:
    """Entries with messages of both VChannels, some in a transaction, some refused."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        service = stack.enter_context(open_log(Path(folder) / "log", PCHANNEL))
        with AppendHost(service, ChannelState.new) as host:
            host.append(PCHANNEL, opening()).results()
            log, numbers = service.open(PCHANNEL), itertools.count(1)
            with standing(host):
                for entry in backlog:
                    messages: list[MutableMessage] = []
                    for which, whole in entry:
                        key = keys_of(VCHANNELS[which], 1)[0]
                        messages += (
                            transaction(next(numbers), [key], vchannel=VCHANNELS[which]) if whole else [insert(key)]
                        )
                    log.append([encode_entry(messages)])
                before = host.tail(PCHANNEL, 0, timeout=0.0)
                found = {name: host.mvcc(name) for name in VCHANNELS}
            host.tick(PCHANNEL, persist=False)
            assert isinstance(before, TailBatch)
            after = host.tail(PCHANNEL, before.confirmed_tick, timeout=0.0)
            assert isinstance(after, TailBatch)
            rows = [row for batch in after.batches for row in batch.to_pylist() if row["type"] != "CREATE_SEGMENT"]
            for name, mvcc in found.items():
                ticks = [row["time_tick"] for row in rows if row["vchannel"] == name]
                assert mvcc.confirmed == (not ticks)
                assert min(ticks, default=mvcc.unconfirmed) >= mvcc.unconfirmed


def test_a_vchannel_that_is_none_is_told_of(host: AppendHost) -> None:
    with pytest.raises(ChannelNotFound, match="p0_9v0"):
        host.mvcc("p0_9v0")
    for name in ("", "x", PCHANNEL, "p0_v0"):
        with pytest.raises(InvalidArgument, match="is not a VChannel"):
            host.mvcc(name)


def test_a_host_that_has_just_begun_reads_the_log_before_it_says_that_there_is_no_vchannel(
    host: AppendHost, service: LogService
) -> None:
    host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
    before = host.mvcc(V0)
    with AppendHost(service, ChannelState.new) as later:
        assert later.mvcc(V0)[:3] == before[:3]
        with pytest.raises(ChannelNotFound, match="p0_9v0"):
            later.mvcc("p0_9v0")


def test_a_tick_that_is_not_to_be_kept_appends_nothing(host: AppendHost, service: LogService) -> None:
    log = service.open(PCHANNEL)
    [written] = host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
    end = log.end()
    first = host.tick(PCHANNEL, persist=False)
    assert first >= written.time_tick
    # What another process appended without asking the host is decided first.
    log.append([encode_entry([insert(keys_of(V0, 2)[1])])])
    behind = log.end()
    tick = host.tick(PCHANNEL, persist=False)
    assert tick >= host.mvcc(V0).time_tick > first
    assert host.mvcc(V0).confirmed
    assert (log.end(), behind > end) == (behind, True), "nothing was appended"
    assert host.tick(PCHANNEL) > tick
    assert log.end() > behind


def test_a_tick_that_is_not_persisted_reaches_the_readers_that_wait(host: AppendHost, service: LogService) -> None:
    [written] = host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
    end, found = service.open(PCHANNEL).end(), []
    seen = host.tick(PCHANNEL, persist=False)
    reader = threading.Thread(target=lambda: found.append(host.tail(PCHANNEL, seen, timeout=20.0)))
    reader.start()
    while not host._follower(PCHANNEL).tail._readers:
        time.sleep(0.001)
    time.sleep(0.002)  # the clock goes on
    tick = host.time_tick(PCHANNEL, persist=False)
    reader.join(20.0)
    assert found == [TailBatch([], tick.time_tick)]
    assert tick.time_tick > seen >= written.time_tick
    assert (tick.persisted, tick.message().not_persisted, tick.id) == (False, True, tick.last_confirmed)
    assert service.open(PCHANNEL).end() == end, "nothing was written for it"


def test_last_confirmed_of_a_tick_is_the_first_open_begin(host: AppendHost, service: LogService) -> None:
    begin, body, commit = transaction(1, keys_of(V0, 1), vchannel=V0)
    [begun, _] = host.append(PCHANNEL, encode_entry([begin, body])).results()
    for persist in (False, True):
        assert host.time_tick(PCHANNEL, persist=persist).last_confirmed == begun.message_id
    host.append(PCHANNEL, encode_entry([commit])).results()
    end = service.open(PCHANNEL).end()
    assert host.time_tick(PCHANNEL, persist=False).last_confirmed == MessageId(*end, 0, 0)
    kept = host.time_tick(PCHANNEL)
    assert kept.persisted
    assert kept.last_confirmed == kept.id >= MessageId(*end, 0, 0)


@pytest.mark.parametrize("persist", [False, True])
def test_a_tick_that_the_clock_does_not_reach_in_time_moves_no_time(host: AppendHost, persist: bool) -> None:
    """Any role may ask for a tick, and time that is put forward ends the leases of transactions."""
    begin, body, commit = transaction(1, keys_of(V0, 1), vchannel=V0)
    host.append(PCHANNEL, encode_entry([begin, body])).results()
    day = compose_tick(int(time.time() * 1000) + 23 * 3_600_000)
    with pytest.raises(DeadlineExceeded):
        host.time_tick(PCHANNEL, tick=day, persist=persist, deadline=0.2)
    [committed] = host.append(PCHANNEL, encode_entry([commit])).results()
    assert committed.time_tick < compose_tick(int(time.time() * 1000) + 60_000)
    near = compose_tick(int(time.time() * 1000) + 1_500)
    assert host.time_tick(PCHANNEL, tick=near, persist=persist, deadline=30.0).time_tick == near


@pytest.mark.parametrize("persist", [False, True])
def test_a_time_tick_is_exactly_the_one_that_is_asked_for(host: AppendHost, persist: bool) -> None:
    wanted = compose_tick(int(time.time() * 1000) + 150) + 7
    assert host.time_tick(PCHANNEL, tick=wanted, persist=persist).time_tick == wanted
    assert host.time_tick(PCHANNEL, persist=False).time_tick >= wanted
    with pytest.raises(InvalidArgument, match="has passed the tick"):
        host.time_tick(PCHANNEL, tick=wanted - 1, persist=persist)


def test_a_log_that_promises_nothing_has_ticks_of_its_entries_alone(tmp_path: Path) -> None:
    """As a broker's: its clock is not here."""
    with RocksMQ(tmp_path / "log", settings=SMALL_FILES, now_ms=lambda: int(time.time() * 1000)) as service:
        service.create(PCHANNEL)
        with AppendHost(service, ChannelState.new) as host:
            host.append(PCHANNEL, opening()).results()
            [written] = host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
            end = service.open(PCHANNEL).end()
            assert {host.tick(PCHANNEL, persist=False) for _ in range(3)} == {written.time_tick}
            assert service.open(PCHANNEL).end() == end
            assert host.confirm(PCHANNEL, written.time_tick + 1) > written.time_tick
            assert service.open(PCHANNEL).end() > end, "somebody waited for it"


# --- the law: whoever has seen tick T has seen every message up to T --------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 1)),
        st.tuples(st.just("begin"), st.integers(0, 1)),
        st.tuples(st.just("commit"), st.integers(0, 1)),
        st.tuples(st.just("tick"), st.booleans()),
        st.tuples(st.just("time passes"), st.sampled_from([0.0004, 0.002, 1.0])),
        st.tuples(st.just("the clock is set"), st.sampled_from([-3600.0, -0.003, 0.5])),
        st.tuples(st.just("the host starts anew"), st.booleans()),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_nothing_becomes_visible_at_or_below_a_tick_that_a_reader_has_seen(steps: list[tuple[str, Any]]) -> None:
    now, off, begun, numbers = 1_800_000_000.0, 0.0, dict[int, int](), itertools.count(1)
    seen, visible = 0, list[int]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def start() -> tuple[RocksMQ, AppendHost]:
            clock = StampClock(
                Path(folder) / "clock.json",
                wall=lambda: round((now + off) * 1e9),
                steady=lambda: round((now - 1_700_000_000.0) * 1e9),
                boot="one",
            )
            service = stack.enter_context(RocksMQ(Path(folder) / "log", settings=SMALL_FILES, clock=clock))
            return service, stack.enter_context(AppendHost(service, ChannelState.new))

        service, host = start()
        service.create(PCHANNEL)
        host.append(PCHANNEL, opening()).results()
        for what, value in steps:
            match what:
                case "append":
                    [row] = host.append(PCHANNEL, encode_entry([insert(keys_of(VCHANNELS[value], 1)[0])])).results()
                    visible.append(row.time_tick)
                    assert row.time_tick > seen
                case "begin" if value not in begun:
                    begun[value] = next(numbers)
                    messages = transaction(begun[value], keys_of(VCHANNELS[value], 1), vchannel=VCHANNELS[value])
                    host.append(PCHANNEL, encode_entry(messages[:2])).results()
                case "commit" if value in begun:
                    messages = transaction(begun.pop(value), [], vchannel=VCHANNELS[value])
                    [end] = host.append(PCHANNEL, encode_entry(messages[1:])).message_outcomes()
                    if isinstance(end, AppendResult):  # it may be past its lease
                        visible.append(end.time_tick)
                        assert end.time_tick > seen
                case "tick":
                    tick = host.time_tick(PCHANNEL, persist=value)
                    assert tick.time_tick >= seen
                    seen = tick.time_tick
                    first_row = tick.last_confirmed
                    assert all(each <= seen for each in visible)
                    assert begun or value or first_row == MessageId(*service.open(PCHANNEL).end(), 0, 0)
                case "time passes":
                    now += value
                case "the clock is set":
                    off += value
                case "the host starts anew":
                    host.close()
                    if value:  # the process, too
                        service.close()
                        service, host = start()
                    else:
                        host = stack.enter_context(AppendHost(service, ChannelState.new))


def test_a_time_tick_says_who_wanted_it_and_how_far_it_goes(host: AppendHost) -> None:
    [written] = host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
    barrier = written.time_tick + compose_tick(60_000)
    message = builders.time_tick(term=1, barrier_tick=barrier, source_id=77)
    host.append(PCHANNEL, encode_entry([message]))
    host.confirm(PCHANNEL, barrier + 1)
    found = host.tail(PCHANNEL, written.time_tick, timeout=0)
    assert isinstance(found, TailBatch)
    [row] = [row for batch in found.batches for row in batch.to_pylist()]
    assert (row["type"], row["producer_id"], row["time_tick"]) == ("TIME_TICK", 77, barrier + 1)
