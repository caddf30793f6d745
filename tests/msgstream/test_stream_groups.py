"""Consumer groups of streams: a group goes on behind what it acknowledged, exactly there after a clean end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.base.errors import InvalidArgument, LogUnavailable
from millrace.log.protocol import LogService
from millrace.message.ids import EARLIEST, LogId
from millrace.msgstream import group_record
from millrace.msgstream.group_record import GroupRecord
from millrace.msgstream.pack import MsgPosition, id_to_bytes
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.stream import LogMsgStream
from millrace.msgstream.tick_stream import LogTtMsgStream
from tests.msgstream.messages import append, consumed, ids, times

Make = Callable[[int], list[str]]
SETTINGS = StreamSettings(timeout=20.0)


def ticking(service: LogService, names: list[str], group: str = "g", *, auto_ack: bool = True) -> LogTtMsgStream:
    stream = LogTtMsgStream(service, settings=SETTINGS.with_({"auto_ack": auto_ack}))
    stream.as_consumer(names, group)
    stream.start()
    return stream


def test_a_group_goes_on_behind_the_pack_it_acknowledged(service: LogService, channels: Make) -> None:
    names = channels(2)
    for name in names:
        append(service, name, ["1", "t10", "11", "t20", "21", "t30"])
    with ticking(service, names, auto_ack=False) as stream:
        packs = consumed(stream, 3)
        stream.ack(packs[0])
        stream.ack(packs[1])
    with ticking(service, names) as stream:
        assert consumed(stream, 1) == packs[2:]


@pytest.mark.parametrize("acked", [0, 1, 2, 3])
def test_a_group_goes_on_exactly_where_channels_are_out_of_order_or_apart(
    service: LogService, channels: Make, acked: int
) -> None:
    names = channels(2)
    append(service, names[0], ["15#1", "5#2", "t10", "25#3", "12#4", "8#5", "t20", "t30", "t40"])
    append(service, names[1], ["35#6", "9#7", "?", "t20", "22#8", "t30", "21#9", "t40"])
    with ticking(service, names, auto_ack=False) as stream:
        packs = consumed(stream, 4)
        if acked:
            stream.ack(packs[acked - 1])
    with ticking(service, names) as stream:
        assert consumed(stream, 4 - acked) == packs[acked:]


def test_a_group_moves_only_behind_its_record(
    service: LogService, channels: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its positions alone do not say where it stands.

    Moved first, a crash would have it begin elsewhere than it ended.
    """
    names = channels(2)
    append(service, names[0], ["15#1", "5#2", "t10", "25#3", "12#4", "8#5", "t20", "t30"])
    append(service, names[1], ["35#6", "9#7", "?", "t20", "22#8", "t30"])
    with ticking(service, names, auto_ack=False) as stream:
        packs = consumed(stream, 3)
        before = [service.group_position("g", name) for name in names]

        def dies(record: GroupRecord, positions: object) -> None:
            raise LogUnavailable("the log went away")

        with monkeypatch.context() as patched:
            patched.setattr(GroupRecord, "store", dies)
            with pytest.raises(LogUnavailable):
                stream.ack(packs[0])
        assert [service.group_position("g", name) for name in names] == before
    with ticking(service, names) as stream:
        assert consumed(stream, 3) == packs


def test_the_next_consume_acknowledges_and_the_last_pack_comes_again(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1#1", "t10", "11#2", "t20", "21#3", "t30"])
    with ticking(service, names) as stream:
        assert ids(consumed(stream, 2)) == [1, 2]
    with ticking(service, names) as stream:
        assert ids(consumed(stream, 2)) == [2, 3]


def test_a_plain_stream_of_a_group_goes_on_too(service: LogService, channels: Make) -> None:
    names = channels(2)
    for number, name in enumerate(names):
        append(service, name, [f"{ts}#{10 * number + ts}" for ts in range(1, 5)])
    with LogMsgStream(service, settings=SETTINGS) as stream:
        stream.as_consumer(names, "g")
        first = stream.consume()
        stream.ack(first)
    append(service, names[1], ["9#99"])
    with LogMsgStream(service, settings=SETTINGS) as stream:
        stream.as_consumer(names, "g")
        assert ids([stream.consume()]) == [99]
    assert sorted(ids([first])) == [1, 2, 3, 4, 11, 12, 13, 14]


def test_groups_go_their_own_way_and_no_group_leaves_no_trace(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1", "t10", "11", "t20"])
    with ticking(service, names, "g") as g, ticking(service, names, "h") as h, ticking(service, names, "") as none:
        assert [times(pack) for pack in consumed(g, 2)] == [[1], [11]]
        assert [times(pack) for pack in consumed(h, 1)] == [[1]]
        assert [times(pack) for pack in consumed(none, 2)] == [[1], [11]]
    assert service.groups() == ["g", "h"]


def test_a_group_that_starts_at_the_latest_has_what_came_while_it_was_down(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1", "t10"])
    stream = LogTtMsgStream(service, settings=SETTINGS)
    stream.as_consumer(names, "g", start="latest")
    stream.close()
    append(service, names[0], ["11", "t20"])
    with ticking(service, names) as stream:
        assert times(stream.consume()) == [11]


def test_seeking_back_moves_the_group_only_with_the_next_acknowledgement(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1", "t10", "11", "t20", "21", "t30"])
    with ticking(service, names, auto_ack=False) as stream:
        packs = consumed(stream, 3)
        stream.ack(packs[2])
        end = service.group_position("g", names[0])
        stream.seek(packs[1].start_positions)
        assert service.group_position("g", names[0]) == end
        assert stream.consume() == packs[1]
        stream.ack(packs[1])
    with ticking(service, names) as stream:
        assert stream.consume() == packs[2]


def test_an_older_pack_acknowledged_after_a_newer_one_moves_nothing(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1", "t10", "11", "t20", "21", "t30"])
    with ticking(service, names, auto_ack=False) as stream:
        packs = consumed(stream, 3)
        stream.ack(packs[1])
        stream.ack(packs[0])
    with ticking(service, names) as stream:
        assert stream.consume() == packs[2]


def test_a_group_that_somebody_moved_begins_where_it_was_put(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["15#1", "5#2", "t10", "25#3", "t20", "t30"])
    with ticking(service, names, auto_ack=False) as stream:
        packs = consumed(stream, 2)
        stream.ack(packs[1])
    service.move_group("g", names[0], EARLIEST)
    with ticking(service, names) as stream:
        assert [pack.msgs for pack in consumed(stream, 2)] == [pack.msgs for pack in packs]


def test_a_group_that_was_dropped_and_made_again_begins_at_the_beginning(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["15#1", "5#2", "t10", "t20"])
    with ticking(service, names, auto_ack=False) as stream:
        packs = consumed(stream, 2)
        stream.ack(packs[0])
    service.drop_group("g")
    with ticking(service, names) as stream:
        assert consumed(stream, 2) == packs


def test_a_pack_of_another_group_is_not_acknowledged(service: LogService, channels: Make) -> None:
    names = channels(1)
    append(service, names[0], ["1", "t10"])
    with ticking(service, names, "g") as g, ticking(service, names, "h") as h:
        pack = g.consume()
        with pytest.raises(InvalidArgument):
            h.ack(pack)


def test_what_a_group_remembers_is_bounded_though_its_consumer_is_started_often(
    service: LogService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_record, "_TRUNCATE_EVERY", 8)
    for number in range(1, 40):
        record = GroupRecord(service, "g")
        record.store([MsgPosition("c", id_to_bytes(LogId(0, number)), "", number)])
        record.close()
    log = service.open("_group.g")
    kept = log.read(log.describe().begin).batch.num_rows
    log.close()
    assert kept <= 8 + 1
    again = GroupRecord(service, "g")
    assert again.time_at("c", LogId(0, 39)) == 39
    again.close()
