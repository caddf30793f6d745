"""What a read of a collection takes from the append host: one call, which writes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import DeadlineExceeded
from millrace.client.append_client import AppendClient
from millrace.log.protocol import LogService
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.server.flight import LogServer
from millrace.message import builders
from millrace.message.ids import LogId, compose_tick
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost, HostSettings
from millrace.node.append.server import AppendExtension
from millrace.node.append.tail_buffer import TailLimits
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.tail import DecidedMessages
from millrace.wal.state import ChannelState
from tests.node.append.samples import SCHEMA, SMALL_FILES, insert, keys_of, open_log, opening, transaction

TOKEN = "token"
P0, P1 = "p0", "p1"
BYTES = 1 << 20


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LogService]:
    with open_log(tmp_path / "log", P0, P1) as opened:
        yield opened


@pytest.fixture
def host(service: LogService) -> Iterator[AppendHost]:
    with AppendHost(service, ChannelState.new, settings=HostSettings(tick_interval=3600.0)) as opened:
        for name in (P0, P1):
            opened.append(name, opening(name)).results()
        yield opened


def write(host: AppendHost, pchannel: str) -> int:
    """Insert a row. Returns its tick."""
    key = keys_of(f"{pchannel}_1v0", 1)[0]
    [result] = host.append(pchannel, encode_entry([insert(key, pchannel=pchannel)])).results()
    return result.time_tick


def ends(service: LogService) -> dict[str, LogId]:
    return {name: service.open(name).end() for name in (P0, P1)}


def ask(host: AppendHost | AppendClient, *, at: int | None = None, after: int = 0) -> DecidedMessages:
    return host.decided(1, {P0: after, P1: after}, at=at, max_bytes=BYTES)


def inserts(found: DecidedMessages) -> dict[str, list[int]]:
    """The ticks of the rows, by PChannel."""
    return {
        name: [row["time_tick"] for each in batches for row in each.to_pylist() if row["type"] == "INSERT"]
        for name, batches in found.messages.items()
    }


def test_an_idle_pchannel_that_is_behind_what_is_visible_needs_no_entry(host: AppendHost, service: LogService) -> None:
    first, second = write(host, P0), write(host, P1)
    before = ends(service)
    found = ask(host)
    assert min(found.ticks.values()) >= second > first
    assert inserts(found) == {P0: [first], P1: [second]}
    assert ask(host).ticks == found.ticks, "nothing became visible since"
    assert ends(service) == before


def test_a_log_that_promises_nothing_gets_a_tick_only_where_it_is_behind(tmp_path: Path) -> None:
    """As a broker's."""
    wall = lambda: int(time.time() * 1000)  # noqa: E731
    with RocksMQ(tmp_path / "log", settings=SMALL_FILES, now_ms=wall) as service:
        for name in (P0, P1):
            service.create(name)
        with AppendHost(service, ChannelState.new, settings=HostSettings(tick_interval=3600.0)) as host:
            for name in (P0, P1):
                host.append(name, opening(name)).results()
            write(host, P0)
            second = write(host, P1)
            before = ends(service)
            assert min(ask(host).ticks.values()) >= second
            after = ends(service)
            assert after[P0] > before[P0], "p0 was behind the row of p1"
            assert after[P1] == before[P1]
            ask(host)
            assert ends(service) == after


def test_an_open_transaction_shows_nothing_and_needs_no_tick(host: AppendHost, service: LogService) -> None:
    ask(host)
    begin, body, commit = transaction(1, keys_of("p0_1v0", 1), vchannel="p0_1v0")
    host.append(P0, encode_entry([begin, body])).results()
    before = ends(service)
    ask(host)
    assert ends(service) == before
    [committed] = host.append(P0, encode_entry([commit])).results()
    before = ends(service)
    assert min(ask(host).ticks.values()) >= committed.time_tick
    assert ends(service) == before


def test_a_read_at_a_tick_needs_one_only_beyond_what_is_decided(host: AppendHost, service: LogService) -> None:
    now = write(host, P0)
    ask(host)
    before = ends(service)
    assert min(ask(host, at=now).ticks.values()) >= now
    assert ends(service) == before
    began = time.monotonic()
    ahead = compose_tick(int(time.time() * 1000) + 3_600_000)
    assert min(ask(host, at=ahead).ticks.values()) < ahead
    assert ends(service) == before, "the clock has not reached it, so a tick does not help"
    assert time.monotonic() - began < 60, "and waiting does not, either"


def test_undecided_entries_of_another_collection_delay_no_read(host: AppendHost, service: LogService) -> None:
    made = builders.create_collection(
        "others", SCHEMA, vchannel=f"{P0}_2v0", vchannels=[f"{P0}_2v0"], collection_id=2, partitions={"all": 1}, term=1
    )
    host.append(P0, encode_entry([made])).results()
    first, second = write(host, P0), write(host, P1)
    busy = replace(insert(1, vchannel=f"{P0}_2v0"), collection_id=2)
    with host._follower(P0)._turn:  # the chain of p0 stands still
        service.open(P0).append([encode_entry([busy])] * 100)
        found = host.decided(1, {P0: 0, P1: 0}, at=None, max_bytes=BYTES, deadline=5.0)
        assert inserts(found) == {P0: [first], P1: [second]}
        assert min(found.ticks.values()) >= second > first
        with pytest.raises(DeadlineExceeded):
            host.decided(2, {P0: 0}, at=None, max_bytes=BYTES, deadline=0.05)
    host._follower(P0)._awake.set()
    assert host.decided(2, {P0: 0}, at=None, max_bytes=BYTES).ticks[P0] > second


def test_what_another_process_appended_is_decided_first(host: AppendHost, service: LogService) -> None:
    seen = ask(host)
    key = keys_of("p1_1v0", 1)[0]
    service.open(P1).append([encode_entry([insert(key, pchannel=P1)])])
    found = ask(host, after=max(seen.ticks.values()))
    assert len(inserts(found)[P1]) == 1
    assert min(found.ticks.values()) >= inserts(found)[P1][0]


def test_a_buffer_that_lacks_messages_or_has_too_many_is_told_of(service: LogService) -> None:
    small = HostSettings(tail=TailLimits(max_bytes=1, keep_bytes=0))
    with AppendHost(service, ChannelState.new, settings=small) as host:
        for name in (P0, P1):
            host.append(name, opening(name)).results()
        write(host, P0)
        last = write(host, P0)
        assert not ask(host).complete, "evicted"
        found = host.decided(1, {P0: last - 1, P1: last}, at=None, max_bytes=BYTES)
        assert (found.complete, inserts(found)[P0]) == (True, [last])
        assert ask(host, after=last).complete


def test_a_client_gets_what_the_host_gives_in_one_request(
    host: AppendHost, service: LogService, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(host, P0)
    write(host, P1)
    server = LogServer(service, tokens=[TOKEN], extensions=[AppendExtension(host)])
    requests: list[object] = []
    call = RemoteLogService.call_with_retry
    monkeypatch.setattr(
        RemoteLogService, "call_with_retry", lambda *args, **named: requests.append(args) or call(*args, **named)
    )
    with AppendClient(RemoteLogService.at(server.address, token=TOKEN)) as client:
        try:
            mine, theirs = ask(client), ask(host)
            nothing = ask(client, after=max(theirs.ticks.values()))
        finally:
            server.close()
    assert len(requests) == 2
    assert (mine.ticks, mine.complete, inserts(mine)) == (theirs.ticks, True, inserts(theirs))
    for name in (P0, P1):
        ours, wanted = mine.messages[name], theirs.messages[name]
        assert [row for each in ours for row in each.to_pylist()] == [
            row for each in wanted for row in each.to_pylist()
        ]
    assert (dict(nothing.messages), nothing.complete) == ({P0: [], P1: []}, True)
