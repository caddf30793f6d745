"""Two streams of one group: the second is refused, or takes over from one that died; no message is doubled silently."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.base.errors import GroupBusy, InvalidArgument
from millrace.client.consume.membership import boot_clock
from millrace.log.protocol import LogService
from millrace.msgstream.factory import RmqMsgStreamFactory
from millrace.msgstream.group_hold import GroupHold
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.stream import LogMsgStream
from millrace.rpc.remote_log import RemoteLogService
from tests.docs.code_facts import ROOT
from tests.msgstream.messages import append, ids
from tests.msgstream.test_kill import environment

Make = Callable[[int], list[str]]
SETTINGS = StreamSettings(timeout=20.0, auto_ack=False, group_lease=0.4)


def stream(service: LogService, names: list[str], group: str = "g") -> LogMsgStream:
    found = LogMsgStream(service, settings=SETTINGS)
    try:
        found.as_consumer(names, group)
    except BaseException:
        found.close()
        raise
    found.start()
    return found


def test_a_second_stream_of_a_group_is_refused_while_the_first_lives(service: LogService, channels: Make) -> None:
    names = channels(2)
    append(service, names[0], ["1#1"])
    with stream(service, names[:1]) as first:
        with pytest.raises(GroupBusy, match=names[0]):
            stream(service, names)
        with stream(service, names[1:]), stream(service, names, "h") as other:
            assert ids([first.consume()]) == ids([other.consume()]) == [1]
    with stream(service, names) as second:
        assert ids([second.consume()]) == [1]


def test_a_stream_without_a_group_is_never_refused(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1#1"])
    with stream(service, names), stream(service, names, "") as other:
        assert ids([other.consume()]) == [1]


def test_a_stream_that_was_away_longer_than_its_lease_delivers_and_acknowledges_nothing(
    service: LogService, channels: Make
) -> None:
    names = channels(1)
    append(service, names[0], ["1#1", "2#2"])
    with stream(service, names) as paused:
        pack = paused.consume()
        paused._hold._closed.set()  # as if the whole process stood still: nothing renews its lease
        assert paused._hold._thread is not None
        paused._hold._thread.join()
        with stream(service, names) as next_:
            got = next_.consume()
            with pytest.raises(GroupBusy):
                paused.ack(pack)
            with pytest.raises(GroupBusy):
                paused.consume(timeout=5.0)
            assert ids([got]) == ids([pack])
            next_.ack(got)
    assert service.group_position("g", names[0]) == got.end_positions[0].log_id


def test_a_stream_that_was_away_goes_on_if_nobody_took_its_place(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1#1"])
    with stream(service, names) as paused:
        paused._hold._closed.set()
        assert paused._hold._thread is not None
        paused._hold._thread.join()
        threading.Event().wait(2 * SETTINGS.group_lease)
        pack = paused.consume()
        paused.ack(pack)
    assert ids([pack]) == [1]


def test_two_processes_of_a_group_never_both_consume_and_one_takes_over_from_the_killed_one(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with RmqMsgStreamFactory.served(str(folder)) as factory:
        factory.service.create("c")
        append(factory.service, "c", ["1#1", "t10"])
        command = [sys.executable, "-m", "tests.msgstream.consumer", str(folder), "g", "c"]

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
            )

        first = start()
        assert first.stdout is not None
        assert first.stdout.readline().split() == ["got", "10", "1"]
        assert first.stdout.readline().split() == ["done", "10"]
        refused = start()
        words = refused.communicate(timeout=60)
        assert refused.returncode
        assert words[0] == ""
        assert "GroupBusy" in words[1]
        third = start()
        first.kill()
        first.communicate(timeout=30)
        append(factory.service, "c", ["11#2", "t20"])
        try:
            assert third.stdout is not None
            assert third.stdout.readline().split() == ["got", "20", "2"]
        finally:
            third.kill()
            third.communicate(timeout=30)
        assert isinstance(factory.service, RemoteLogService)
        factory.service.shutdown()


def test_a_server_of_an_earlier_build_has_no_leases_and_its_streams_go_on() -> None:
    class Earlier:
        def hold_group(self, group: str, pchannel: str, holder: str, *, seconds: float) -> None:
            raise InvalidArgument("unknown call 'hold_group'")

    hold = GroupHold(Earlier(), seconds=1.0)  # type: ignore[arg-type]  # the one call that a hold makes
    hold.take("g", "c")
    hold.check()
    hold.close()


def test_a_stream_looks_whether_it_still_has_its_lease_before_another_may_have_it() -> None:
    """Clocks drift, and time in which the machine is suspended counts."""
    calls: list[str] = []

    class Service:
        def hold_group(self, group: str, pchannel: str, holder: str, *, seconds: float) -> None:
            calls.append(group)
            if len(calls) > 1:
                raise GroupBusy("another consumer has it")

    now = boot_clock()
    hold = GroupHold(Service(), seconds=100.0, clock=lambda: now)  # type: ignore[arg-type]
    hold.take("g", "c")
    now += 94.0
    hold.check()
    now += 2.0
    with pytest.raises(GroupBusy):
        hold.check()
    hold.close()
    assert inspect.signature(GroupHold).parameters["clock"].default is boot_clock
