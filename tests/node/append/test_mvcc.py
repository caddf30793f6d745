"""Up to where a VChannel is readable, and ticks with a source, kept or not: what the reference documents name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.errors import ChannelNotFound
from millrace.log.protocol import LogService
from millrace.message import builders
from millrace.message.ids import compose_tick
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.rpc.tail import TailBatch
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, VCHANNELS, insert, keys_of, open_log, opening, transaction

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
    assert host.mvcc(V0) == (V0, written.time_tick, True)
    assert other < written.time_tick
    begin, body, commit = transaction(1, keys_of(V1, 1), vchannel=V1)
    host.append(PCHANNEL, encode_entry([begin, body])).results()
    assert host.mvcc(V1).time_tick == other, "an open transaction shows nothing"
    [committed] = host.append(PCHANNEL, encode_entry([commit])).results()
    assert host.mvcc(V1) == (V1, committed.time_tick, True)
    host.tick(PCHANNEL)
    assert host.mvcc(V0).time_tick == written.time_tick, "time alone makes nothing visible"


def test_it_is_not_confirmed_while_the_log_holds_what_is_not_decided(host: AppendHost, service: LogService) -> None:
    before = host.mvcc(V0)
    assert before.confirmed
    follower = host._follower(PCHANNEL)
    follower.stop()  # the chain stands still, and the log goes on
    follower._thread.join(10.0)
    service.open(PCHANNEL).append([encode_entry([insert(keys_of(V0, 1)[0])])])
    assert host.mvcc(V0) == (V0, before.time_tick, False)
    host.restart(PCHANNEL)
    host.tick(PCHANNEL)
    found = host.mvcc(V0)
    assert found.confirmed
    assert found.time_tick > before.time_tick


def test_a_vchannel_that_is_none_is_told_of(host: AppendHost) -> None:
    with pytest.raises(ChannelNotFound, match="p0_9v0"):
        host.mvcc("p0_9v0")


def test_a_tick_that_is_not_to_be_kept_appends_nothing(host: AppendHost, service: LogService) -> None:
    log = service.open(PCHANNEL)
    [written] = host.append(PCHANNEL, encode_entry([insert(keys_of(V0, 1)[0])])).results()
    end = log.end()
    assert host.tick(PCHANNEL, persist=False) == written.time_tick
    # What another process appended without asking the host is decided first.
    log.append([encode_entry([insert(keys_of(V0, 2)[1])])])
    behind = log.end()
    tick = host.tick(PCHANNEL, persist=False)
    assert tick > written.time_tick
    assert host.mvcc(V0) == (V0, tick, True)
    assert (log.end(), behind > end) == (behind, True), "nothing was appended"
    assert host.tick(PCHANNEL) > tick
    assert log.end() > behind


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
