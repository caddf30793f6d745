"""Dividing messages among channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.log.protocol import LogService
from millrace.msgstream.messages import DeleteMsg, InsertMsg
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.protocol import TsMsg
from millrace.msgstream.repack import channel_numbers, default_repack
from millrace.msgstream.settings import StreamSettings
from millrace.msgstream.stream import LogMsgStream
from tests.msgstream.messages import message

Make = Callable[[int], list[str]]


def repacked(msgs: Sequence[TsMsg], channels: int) -> Mapping[int, MsgPack]:
    return default_repack(msgs, channel_numbers(msgs, channels))


@given(keys=st.lists(st.integers(0, 1 << 32), max_size=20), channels=st.integers(1, 4))
def test_a_message_goes_to_the_channel_of_its_key_and_order_stays(keys: list[int], channels: int) -> None:
    packs = repacked([message(1, number, key=key) for number, key in enumerate(keys)], channels)
    for channel in range(channels):
        wanted = [number for number, key in enumerate(keys) if key % channels == channel]
        assert [msg.id for msg in packs.get(channel, MsgPack()).msgs] == wanted


@given(keys=st.lists(st.integers(0, 100), min_size=1, max_size=20), channels=st.integers(1, 4))
def test_rows_of_an_insert_and_keys_of_a_delete_go_each_to_the_channel_of_its_hash_key(
    keys: list[int], channels: int
) -> None:
    places = pa.array(range(len(keys)))
    stamps = pa.array([place + 5 for place in range(len(keys))], pa.uint64())
    rows = pa.record_batch({"id": places})
    insert = InsertMsg(
        id=1, collection_id=9, rows=rows, timestamps=stamps, row_ids=places, hash_keys=tuple(keys), shard_name="s"
    )
    delete = DeleteMsg(id=2, collection_id=9, primary_keys=places, timestamps=stamps, hash_keys=tuple(keys))
    packs = repacked([insert, delete], channels)
    assert packs.keys() == {key % channels for key in keys}
    for channel, pack in packs.items():
        wanted = [place for place, key in enumerate(keys) if key % channels == channel]
        first, second = pack.msgs
        assert isinstance(first, InsertMsg)
        assert isinstance(second, DeleteMsg)
        assert first.rows["id"].to_pylist() == second.primary_keys.to_pylist() == wanted
        assert first.row_ids is not None
        assert first.row_ids.to_pylist() == wanted
        assert first.hash_keys == second.hash_keys == tuple(keys[place] for place in wanted)
        assert (first.begin_ts, first.end_ts) == (wanted[0] + 5, wanted[-1] + 5)
        assert (first.collection_id, first.shard_name) == (9, "s")


def test_a_message_that_no_channel_can_be_told_for_is_refused() -> None:
    without = message(1)
    without.hash_keys = ()
    several = message(1)
    several.hash_keys = (0, 1)
    uneven = DeleteMsg(primary_keys=pa.array([1, 2, 3]), begin_ts=1, hash_keys=(0, 1))
    for msg in (without, several, uneven):
        with pytest.raises(InvalidArgument):
            repacked([msg], 2)


def test_a_stream_produces_by_the_repack_function_it_was_given(service: LogService, channels: Make) -> None:
    names = channels(3)
    with LogMsgStream(service, settings=StreamSettings(timeout=20.0)) as stream:
        stream.as_producer(names)
        stream.as_consumer(names)
        stream.set_repack_func(lambda msgs, keys: {2: MsgPack(msgs=list(msgs))})
        assert list(stream.produce(MsgPack(msgs=[message(1, 1), message(2, 2)]))) == [names[2]]
        stream.set_repack_func(lambda msgs, keys: {3: MsgPack(msgs=list(msgs))})
        with pytest.raises(InvalidArgument, match="3"):
            stream.produce(MsgPack(msgs=[message(1)]))
        stream.set_repack_func(None)
        assert list(stream.produce(MsgPack(msgs=[message(3, 3, key=1)]))) == [names[1]]
        pack = stream.consume()
    assert [(msg.id, msg.position.channel_name) for msg in pack.msgs if msg.position] == [
        (3, names[1]),
        (1, names[2]),
        (2, names[2]),
    ]
