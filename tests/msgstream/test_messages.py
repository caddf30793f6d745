"""Messages and their wire form: inverse both ways, explicit about what is wrong, bounded for any bytes."""

from __future__ import annotations

import re
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, Malformed, MillraceError, UnsupportedMessageType, UnsupportedVersion
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.msgstream import wire
from millrace.msgstream.messages import (
    CLASSES,
    BaseMsg,
    CreateCollectionMsg,
    CreatePartitionMsg,
    DeleteMsg,
    DropCollectionMsg,
    DropPartitionMsg,
    FlushMsg,
    GenericMsg,
    InsertMsg,
    TimeTickMsg,
)
from millrace.msgstream.protocol import MsgType
from millrace.msgstream.unmarshal import MemUDFactory, ProtoUDFactory
from tests.docs.pages import text

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("name", "string", True)), "id")
ROWS = pa.record_batch(
    {"id": pa.array([1, 2, 3]), "name": pa.array(["a", None, "ccc"]), "tags": pa.array([["x"], [], None])},
    schema=pa.schema([pa.field("id", pa.int64(), False), ("name", pa.utf8()), ("tags", pa.list_(pa.utf8()))]),
)
STAMPS = pa.array([7, 5, 9], pa.uint64())
SAMPLES: list[BaseMsg] = [
    TimeTickMsg(id=1, begin_ts=1 << 60, source_id=-1),
    InsertMsg(collection_id=1, rows=ROWS, timestamps=STAMPS, row_ids=pa.array([1, -2, 3]), hash_keys=(1, 2, 3)),
    InsertMsg(collection_id=1, partition_id=2, segment_id=3, rows=ROWS, shard_name="ä", begin_ts=4),
    DeleteMsg(collection_id=1, primary_keys=pa.array([1, 2, 3]), timestamps=STAMPS, hash_keys=((1 << 32) - 1,)),
    DeleteMsg(collection_id=1, primary_keys=pa.array(["a", "ä"]), begin_ts=4, end_ts=5),
    CreateCollectionMsg(collection_id=7, name="users", vchannels=["c0_7v0"], schema=SCHEMA, partitions={"p": 1}),
    DropCollectionMsg(collection_id=-7),
    CreatePartitionMsg(collection_id=7, partition_id=1, name="p"),
    DropPartitionMsg(collection_id=7, partition_id=1),
    FlushMsg(collection_id=7, segment_id=(1 << 63) - 1),
    GenericMsg(msg_type=MsgType.LOAD_BALANCE_SEGMENTS, payload=b"\0anything\xff", trace_ctx={"traceparent": "00-ä-01"}),
]


@pytest.mark.parametrize("msg", SAMPLES, ids=lambda msg: type(msg).__name__)
def test_a_message_comes_out_as_it_went_in(msg: BaseMsg) -> None:
    data = msg.marshal()
    assert type(msg).unmarshal(data) == msg
    dispatched = ProtoUDFactory().new_unmarshal_dispatcher().unmarshal(data, msg.type)
    assert dispatched == msg
    assert type(dispatched) is type(msg)
    assert dispatched.marshal() == data


def test_every_type_of_the_chapter_can_be_sent() -> None:
    dispatcher = ProtoUDFactory().new_unmarshal_dispatcher()
    for kind in set(MsgType) - set(CLASSES):
        msg = GenericMsg(msg_type=kind, payload=b"x", id=kind.value)
        assert dispatcher.unmarshal(msg.marshal(), kind) == msg
    assert set(CLASSES.values()) == {type(msg) for msg in SAMPLES} - {GenericMsg}


def test_stamps_of_rows_give_the_messages_own() -> None:
    msg = InsertMsg(rows=ROWS, timestamps=STAMPS)
    assert (msg.begin_ts, msg.end_ts) == (5, 9)
    assert TimeTickMsg(begin_ts=3).end_ts == 3


envelopes = st.builds(
    GenericMsg,
    id=st.integers(-(1 << 63), (1 << 63) - 1),
    begin_ts=st.integers(0, (1 << 63)),
    end_ts=st.integers((1 << 63), (1 << 64) - 1),
    source_id=st.integers(-(1 << 63), (1 << 63) - 1),
    hash_keys=st.lists(st.integers(0, (1 << 32) - 1)).map(tuple),
    trace_ctx=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4),
    msg_type=st.sampled_from(MsgType),
    payload=st.binary(),
)


@given(msg=envelopes)
def test_every_value_of_an_envelope_crosses(msg: GenericMsg) -> None:
    assert GenericMsg.unmarshal(msg.marshal()) == msg


@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_typed_error(data: bytes) -> None:
    unmarshal_all(data)
    unmarshal_all(b"MS\1\0" + data)


@given(sample=st.sampled_from(SAMPLES), data=st.data())
def test_a_message_whose_bytes_changed_under_a_right_checksum_is_a_message_or_a_typed_error(
    sample: BaseMsg, data: st.DataObject
) -> None:
    body = bytearray(sample.marshal())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body
    unmarshal_all(bytes(cut))
    unmarshal_all(sealed(bytes(cut)))


def unmarshal_all(data: bytes) -> None:
    dispatcher = ProtoUDFactory().new_unmarshal_dispatcher()
    try:
        kind = MsgType(wire.peek_type(data))
    except (MillraceError, ValueError):
        kind = MsgType.INSERT
    for each in {kind, MsgType.INSERT, MsgType.DELETE}:
        try:
            msg = dispatcher.unmarshal(data, each)
        except (Malformed, UnsupportedVersion, UnsupportedMessageType):
            continue
        assert type(msg).unmarshal(msg.marshal()) == msg


def sealed(data: bytes) -> bytes:
    """The bytes with a checksum that is right."""
    return b"MS\1\0" + struct.pack("<I", crc32c(data[8:])) + data[8:] if len(data) >= 8 else data


@given(sample=st.sampled_from(SAMPLES), place=st.integers(0, 10_000), value=st.integers(1, 255))
def test_a_byte_that_changed_on_the_way_is_found(sample: BaseMsg, place: int, value: int) -> None:
    data = bytearray(sample.marshal())
    data[place % len(data)] ^= value
    with pytest.raises((Malformed, UnsupportedVersion)):
        type(sample).unmarshal(bytes(data))


def test_sizes_that_lie_allocate_nothing() -> None:
    insert = sealed(SAMPLES[1].marshal())
    keys = bytearray(insert)
    struct.pack_into("<I", keys, 12, (1 << 32) - 1)  # hash keys
    rows = insert.replace(struct.pack("<IB", 3, 3), struct.pack("<IB", (1 << 32) - 1, 3))
    assert rows != insert
    tracemalloc.start()
    try:
        for data in (sealed(bytes(keys)), sealed(rows)):
            with pytest.raises(Malformed):
                InsertMsg.unmarshal(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_newer_version_says_so() -> None:
    with pytest.raises(UnsupportedVersion, match="2"):
        TimeTickMsg.unmarshal(sealed(SAMPLES[0].marshal()).replace(b"MS\1", b"MS\2", 1))


def test_a_message_of_another_type_or_of_none_is_refused() -> None:
    with pytest.raises(Malformed, match="DROP_COLLECTION"):
        DropCollectionMsg.unmarshal(SAMPLES[0].marshal())
    unknown = bytearray(SAMPLES[-1].marshal())
    struct.pack_into("<I", unknown, 8, 99)
    with pytest.raises(UnsupportedMessageType, match="99"):
        GenericMsg.unmarshal(sealed(bytes(unknown)))


@pytest.mark.parametrize(
    "change",
    [
        {"id": 1 << 63},
        {"begin_ts": -1},
        {"begin_ts": 2, "end_ts": 1},
        {"hash_keys": (1 << 32,)},
        {"collection_id": 1 << 63},
        {"trace_ctx": {"a": "x" * 9000}},
        {"rows": ROWS.slice(0, 0), "timestamps": None, "row_ids": None},
        {"timestamps": STAMPS.slice(1)},
        {"timestamps": STAMPS.cast(pa.int64())},
        {"rows": pa.record_batch({"_x": [1, 2, 3]})},
        {"rows": pa.record_batch({"x": [pa.MonthDayNano([1, 1, 1])] * 3})},
        {"shard_name": "x" * 70_000},
    ],
)
def test_what_the_wire_form_cannot_hold_is_refused_before_it_is_sent(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        replace(SAMPLES[1], **change).marshal()  # type: ignore[arg-type]


def test_a_template_of_ones_own_replaces_that_of_its_type_in_one_dispatcher_only() -> None:
    factory = ProtoUDFactory()
    mine, other = factory.new_unmarshal_dispatcher(), factory.new_unmarshal_dispatcher()
    mine.add_msg_template(MsgType.TIME_TICK, lambda data: GenericMsg(msg_type=MsgType.TIME_TICK, payload=data))
    data = SAMPLES[0].marshal()
    assert isinstance(mine.unmarshal(data, MsgType.TIME_TICK), GenericMsg)
    assert isinstance(other.unmarshal(data, MsgType.TIME_TICK), TimeTickMsg)


def test_messages_in_memory_are_handed_out_without_a_copy() -> None:
    dispatcher = MemUDFactory().new_unmarshal_dispatcher()
    for msg in SAMPLES:
        assert dispatcher.unmarshal(msg, msg.type) is msg
    with pytest.raises(Malformed):
        dispatcher.unmarshal(SAMPLES[0], MsgType.INSERT)
    with pytest.raises(InvalidArgument):
        dispatcher.unmarshal(b"bytes", MsgType.INSERT)


def test_the_page_has_the_header_as_it_is() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", text("docs/msgstream.md"), re.MULTILINE)
    sizes = {"bytes2": 2, "u8": 1, "u32": 4, "i64": 8, "u64": 8}
    place = 0
    for offset, kind in rows:
        assert int(offset) == place
        place += sizes[kind]
    assert place == wire.HEADER_BYTES
