"""Small messages that are decoded together give what each gives alone, in whatever order they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import Malformed
from millrace.client.consume import batch_decoder
from millrace.client.consume.batch_decoder import MAX_BATCHED_PAYLOAD_BYTES, BatchDecoder
from millrace.message.ids import MessageId
from millrace.message.model import ImmutableMessage
from millrace.message.payload.rows import decode_many, decode_rows, encode_rows
from millrace.message.types import MessageType

KEYS = pa.schema([pa.field("id", pa.int64(), nullable=False)])
OLDER = pa.schema([*KEYS, pa.field("name", pa.utf8())])
NEWER = pa.schema([*OLDER, pa.field("more", pa.float64())])
SCHEMAS = {1: OLDER, 2: NEWER}

ONE = st.tuples(
    st.sampled_from([MessageType.INSERT, MessageType.UPSERT, MessageType.DELETE]),
    st.sampled_from([1, 2]),  # collection
    st.sampled_from([1, 2]),  # version
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.sampled_from(["good", "good", "good", "cut", "large"]),
)


def schema_of(message: ImmutableMessage) -> pa.Schema:
    return KEYS if message.type == MessageType.DELETE else SCHEMAS[message.schema_version]


def made(tick: int, kind: MessageType, collection: int, version: int, keys: list[int], flaw: str) -> ImmutableMessage:
    schema = KEYS if kind == MessageType.DELETE else SCHEMAS[version]
    if flaw == "large":
        keys = keys * (MAX_BATCHED_PAYLOAD_BYTES // 8)
    columns = {"id": keys, "name": [str(key) for key in keys], "more": [key / 2 for key in keys]}
    rows = pa.RecordBatch.from_arrays([pa.array(columns[each.name], each.type) for each in schema], schema=schema)
    payload = bytes(encode_rows(rows))
    return ImmutableMessage(
        id=MessageId(0, tick, 0, 0),
        time_tick=tick,
        last_confirmed=MessageId(0, 0, 0, 0),
        physical_ms=0,
        type=kind,
        collection_id=collection,
        schema_version=version,
        payload=payload[:-8] if flaw == "cut" else payload,
    )


def said(rows: Callable[[], pa.RecordBatch]) -> object:
    """The rows, or the words of why there are none."""
    try:
        return rows()
    except Malformed as error:
        return str(error)


@given(st.lists(ONE, min_size=1, max_size=40), st.randoms(use_true_random=False), st.sampled_from([1, 600, 1 << 20]))
def test_rows_are_those_of_each_message_alone(
    given: list[tuple[MessageType, int, int, list[int], str]], chance: object, most: int
) -> None:
    messages = [made(tick, *each) for tick, each in enumerate(given, 1)]
    asked = [*messages, *messages]
    chance.shuffle(asked)  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_decoder, "DECODE_BYTES", most)
        found = BatchDecoder()
        for message in messages:
            found.add(message)
        for message in asked:
            schema = schema_of(message)
            assert said(partial(found.rows, message, schema)) == said(partial(decode_rows, message.payload, schema))


def test_messages_of_one_shape_are_decoded_by_one_call() -> None:
    calls: list[int] = []
    messages = [made(tick, MessageType.INSERT, 1, 1, [tick], "good") for tick in range(1, 101)]
    with pytest.MonkeyPatch.context() as patch:

        def counted(payloads: pa.LargeBinaryArray, schema: pa.Schema) -> object:
            calls.append(len(payloads))
            return decode_many(payloads, schema)

        patch.setattr(batch_decoder, "decode_many", counted)
        found = BatchDecoder()
        for message in messages:
            found.add(message)
        assert [found.rows(each, OLDER)["id"].to_pylist() for each in messages] == [[n] for n in range(1, 101)]
    assert calls == [100]
