"""The time-tick stream: packs between two ticks over all channels, in order, and positions that seek takes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from millrace.base.errors import DeadlineExceeded, MessagesRefused, PackTooLarge, PositionTruncated, StreamClosed
from millrace.log.protocol import LogService
from millrace.msgstream.pack import MsgPosition
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.tick_stream import LogTtMsgStream
from tests.msgstream.messages import append, consumed, ids, message, times

Make = Callable[[int], list[str]]
DEADLINE = 20.0


def stream_of(service: LogService, names: list[str], group: str = "", **settings: object) -> LogTtMsgStream:
    stream = LogTtMsgStream(service, settings=StreamSettings(timeout=DEADLINE).with_(settings))
    stream.as_consumer(names, group)
    stream.start()
    return stream


def test_a_pack_is_what_lies_between_two_ticks_in_order_of_time(service: LogService, channels: Make) -> None:
    a, b = channels(2)
    append(service, a, ["7", "3", "t10", "12", "t20"])
    append(service, b, ["5", "15", "9", "t10", "11", "t20"])
    with stream_of(service, [a, b]) as stream:
        first, second = consumed(stream, 2)
    assert (first.begin_ts, first.end_ts, times(first)) == (0, 10, [3, 5, 7, 9])
    assert (second.begin_ts, second.end_ts, times(second)) == (10, 20, [11, 12, 15])
    assert first.end_positions == second.start_positions


def test_ticks_of_channels_that_differ_each_end_a_pack(service: LogService, channels: Make) -> None:
    a, b = channels(2)
    append(service, a, ["1", "t10", "11", "t20", "t30"])
    append(service, b, ["2", "12", "24", "t25", "t30"])
    with stream_of(service, [a, b]) as stream:
        packs = consumed(stream, 4)
    assert [(pack.end_ts, times(pack)) for pack in packs] == [(10, [1, 2]), (20, [11, 12]), (25, [24]), (30, [])]


def test_messages_of_one_time_keep_the_order_of_channels_and_of_the_log(service: LogService, channels: Make) -> None:
    a, b = channels(2)
    append(service, b, ["5#3", "5#4", "t10"])
    append(service, a, ["5#1", "5#2", "t10"])
    with stream_of(service, [a, b]) as stream:
        assert ids(consumed(stream, 1)) == [1, 2, 3, 4]


def test_a_channel_that_lags_holds_the_pack_back_until_its_tick_comes(service: LogService, channels: Make) -> None:
    a, b = channels(2)
    append(service, a, ["1", "t10"])
    append(service, b, ["2"])
    with stream_of(service, [a, b]) as stream:
        with pytest.raises(DeadlineExceeded, match=b):
            stream.consume(timeout=0.05)
        waiting = threading.Thread(target=lambda: append(service, b, ["t10"]))
        waiting.start()
        pack = stream.consume()
        waiting.join(DEADLINE)
    assert times(pack) == [1, 2]


def test_seeking_to_the_start_positions_gives_the_pack_again_and_to_the_end_positions_the_next(
    service: LogService, channels: Make
) -> None:
    a, b = channels(2)
    append(service, a, ["15#1", "5#2", "t10", "25#3", "12#4", "8#5", "?", "t20", "t30", "t40"])
    append(service, b, ["35#6", "9#7", "?", "t20", "22#8", "t30", "21#9", "t40"])
    with stream_of(service, [a, b]) as stream:
        packs = consumed(stream, 4)
        for number in (2, 0, 3, 1):
            stream.seek(packs[number].start_positions)
            assert consumed(stream, 4 - number) == packs[number:]
        for number in (1, 0, 2):
            stream.seek(packs[number].end_positions)
            assert consumed(stream, 1) == [packs[number + 1]]
    assert ids(packs) == [2, 7, 4, 1, 8, 3, 6]
    with stream_of(service, [a, b]) as other:
        other.seek([MsgPosition.from_json(each.to_json()) for each in packs[1].end_positions])
        assert consumed(other, 2) == packs[2:]


def test_late_and_malformed_messages_stand_in_the_pack_with_their_reason(service: LogService, channels: Make) -> None:
    (a,) = channels(1)
    append(service, a, ["5", "t10", "8#1", "?", "12", "t20"])
    with stream_of(service, [a]) as stream:
        first, second = consumed(stream, 2)
    assert not first.refused
    assert times(second) == [12]
    assert [each.reason for each in second.refused] == ["late", "malformed"]
    late, malformed = second.refused
    assert late.msg == message(8, 1)
    assert "10" in late.detail
    assert malformed.payload == b"no message at all"
    assert late.position.log_id < malformed.position.log_id


def test_refused_messages_can_be_an_error_that_has_the_pack_and_the_stream_goes_on(
    service: LogService, channels: Make
) -> None:
    (a,) = channels(1)
    append(service, a, ["t10", "8", "12", "t20", "t30"])
    with stream_of(service, [a], on_refused="raise") as stream:
        stream.consume()
        with pytest.raises(MessagesRefused, match="late") as raised:
            stream.consume()
        assert times(raised.value.pack) == [12]  # type: ignore[arg-type]
        assert stream.consume().end_ts == 30


def test_a_tick_that_goes_back_changes_nothing(service: LogService, channels: Make) -> None:
    (a,) = channels(1)
    append(service, a, ["1", "t20", "t10", "21", "t20", "t30"])
    with stream_of(service, [a]) as stream:
        assert [(pack.end_ts, times(pack)) for pack in consumed(stream, 2)] == [(20, [1]), (30, [21])]


def test_what_waits_for_a_tick_is_bounded_and_more_is_an_error(service: LogService, channels: Make) -> None:
    a, b = channels(2)
    append(service, a, [str(ts) for ts in range(1, 400)])
    append(service, b, ["t10"])
    with stream_of(service, [a, b], max_pack_bytes=10_000, read_bytes=1_000) as stream, pytest.raises(PackTooLarge):
        stream.consume()


def test_a_channel_that_runs_ahead_is_read_no_further_than_its_tick(service: LogService, channels: Make) -> None:
    a, b = channels(2)
    append(service, a, [item for tick in range(10, 2000, 10) for item in (str(tick - 1), f"t{tick}")])
    with stream_of(service, [a, b], max_pack_bytes=2_000, read_bytes=2_000) as stream:
        with pytest.raises(DeadlineExceeded):
            stream.consume(timeout=0.05)
        append(service, b, ["t1990"])
        assert [times(pack) for pack in consumed(stream, 199)] == [[tick - 1] for tick in range(10, 2000, 10)]


def test_a_position_that_was_truncated_is_an_error(service: LogService, channels: Make) -> None:
    (a,) = channels(1)
    append(service, a, ["1", "t10", "11", "t20"])
    with stream_of(service, [a]) as stream:
        first, second = consumed(stream, 2)
        log = service.open(a)
        log.truncate(second.end_positions[0].log_id)
        stream.seek(first.start_positions)
        with pytest.raises(PositionTruncated):
            stream.consume()
        stream.seek(second.end_positions)
        append(service, a, ["21", "t30"])
        assert times(stream.consume()) == [21]


def test_closing_wakes_a_consumer_that_waits(service: LogService, channels: Make) -> None:
    names = channels(2)
    stream = stream_of(service, names)
    errors: list[BaseException] = []
    waiting = threading.Event()

    def consume() -> None:
        waiting.set()
        try:
            stream.consume()
        except StreamClosed as error:
            errors.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    waiting.wait(DEADLINE)
    begun = time.monotonic()
    stream.close()
    thread.join(DEADLINE)
    assert len(errors) == 1
    assert time.monotonic() - begun < DEADLINE / 2
    with pytest.raises(StreamClosed):
        stream.consume()
