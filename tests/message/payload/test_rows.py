"""Rows in a payload: what was encoded comes back, one by one and many at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.model import Payload
from millrace.message.payload.rows import decode_many, decode_rows, encode_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField, apply_change
from tests.message.samples import batches, schemas


def joined(parts: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(parts, schema=schema).combine_chunks()


@given(st.data())
def test_rows_come_back_as_they_were(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    batch = data.draw(batches(schema))
    payload = encode_rows(batch)
    assert len(payload) % 8 == 0
    assert decode_rows(payload, schema.arrow()).equals(batch)
    assert decode_rows(payload, schema.arrow()).schema == schema.arrow()


@given(st.data())
def test_many_payloads_come_back_in_order_in_one_batch(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    few = data.draw(st.lists(batches(schema), min_size=1, max_size=6))
    parts = (few * 4)[: data.draw(st.integers(1, 4 * len(few)))]
    found = decode_many(pa.array([encode_rows(part) for part in parts], pa.large_binary()), schema.arrow())
    assert found.errors == {}
    assert found.counts.tolist() == [part.num_rows for part in parts]
    assert found.counts.dtype == np.int64
    found.rows.validate(full=True)
    assert found.rows.schema == schema.arrow()
    assert pa.Table.from_batches([found.rows]).equals(joined(parts, schema.arrow()))


@given(st.data())
def test_slices_of_batches_and_of_payload_arrays_carry_their_own_rows_alone(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    batch = data.draw(batches(schema))
    start = data.draw(st.integers(0, batch.num_rows - 1))
    part = batch.slice(start)
    payloads = pa.array([encode_rows(batch), *[encode_rows(part)] * 12], pa.large_binary())[1:]
    found = decode_many(payloads, schema.arrow())
    assert pa.Table.from_batches([found.rows]).equals(joined([part] * 12, schema.arrow()))


SMALL = CollectionSchema(
    (FieldSpec("id", "int64", False), FieldSpec("text", "string", True), FieldSpec("tags", "list<string>", True)), "id"
)


def small(first: int, count: int = 2) -> pa.RecordBatch:
    rows = [
        {"id": first + place, "text": None if place % 2 else f"é{first}", "tags": ["a", None, ""]}
        for place in range(count)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SMALL.arrow())


def test_bad_payloads_are_named_and_the_others_stay_in_order() -> None:
    payloads: list[Payload] = [encode_rows(small(place)) for place in range(40)]
    payloads[0] = b""
    payloads[7] = b"junk" * 100
    payloads[39] = payloads[39][:-8]
    found = decode_many(pa.array(payloads, pa.large_binary()), SMALL.arrow())
    assert sorted(found.errors) == [0, 7, 39]
    assert found.counts.tolist() == [0 if place in (0, 7, 39) else 2 for place in range(40)]
    good = [small(place) for place in range(40) if place not in (0, 7, 39)]
    assert pa.Table.from_batches([found.rows]).equals(joined(good, SMALL.arrow()))
    for place in found.errors:
        with pytest.raises(Malformed) as caught:
            decode_rows(payloads[place], SMALL.arrow())
        assert found.errors[place] == str(caught.value)


def test_large_and_small_payloads_give_the_same_rows() -> None:
    parts = [small(place, 900) for place in range(12)]
    found = decode_many(pa.array([encode_rows(part) for part in parts], pa.large_binary()), SMALL.arrow())
    assert pa.Table.from_batches([found.rows]).equals(joined(parts, SMALL.arrow()))


def test_no_payloads_and_only_bad_ones_give_an_empty_batch_of_the_schema() -> None:
    for payloads in ([], [b"x"] * 3, [b"x" * 200] * 30):
        found = decode_many(pa.array(payloads, pa.large_binary()), SMALL.arrow())
        assert found.rows.num_rows == 0
        assert found.rows.schema == SMALL.arrow()
        assert len(found.errors) == len(payloads)


def refused(payload: bytes, schema: pa.Schema, words: str) -> None:
    """Alone and among others, and in the same words."""
    with pytest.raises(Malformed, match=words) as caught:
        decode_rows(payload, schema)
    found = decode_many(pa.array([payload] * 20, pa.large_binary()), schema)
    assert found.errors == dict.fromkeys(range(20), str(caught.value))


def test_rows_of_another_schema_are_refused() -> None:
    payload = encode_rows(small(1))
    refused(payload, SMALL.key_arrow(), "nodes")
    refused(payload, apply_change(SMALL, AddField(FieldSpec("more", "int8", True))).arrow(), "nodes")
    strings = pa.schema([pa.field("id", pa.utf8(), nullable=False)])
    refused(encode_rows(pa.RecordBatch.from_arrays([pa.array([1])], names=["id"])), strings, "buffers")


def test_wider_columns_do_not_pass_for_narrower_ones_that_need_more_bytes() -> None:
    narrow = encode_rows(pa.RecordBatch.from_arrays([pa.array(range(100), pa.int8())], names=["id"]))
    refused(narrow, pa.schema([pa.field("id", pa.int64(), nullable=False)]), "Arrow")


def test_a_null_where_none_may_be_is_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1, None])], names=["id"])
    refused(encode_rows(batch), SMALL.key_arrow(), "not nullable")


def test_text_that_is_not_utf_8_is_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b"\xff"])], names=["id"])
    refused(encode_rows(batch), pa.schema([pa.field("id", pa.utf8(), nullable=False)]), "UTF8")


def test_compressed_buffers_are_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(range(1000), pa.int64())], names=["id"])
    for codec in ("lz4", "zstd"):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_batch(batch)
        message = list(pa.ipc.MessageReader.open_stream(sink.getvalue()))[1]
        refused(message.serialize().to_pybytes(), SMALL.key_arrow(), "compressed")


def test_bytes_before_behind_or_missing_are_refused() -> None:
    payload = bytes(encode_rows(small(1)))
    refused(payload + b"\0" * 8, SMALL.arrow(), "bytes behind")
    refused(payload * 2, SMALL.arrow(), "bytes behind")
    refused(payload[:-8], SMALL.arrow(), "not as long as it says")
    refused(b"\0" * 8 + payload, SMALL.arrow(), "encapsulated")


def test_other_arrow_messages_are_refused() -> None:
    refused(SMALL.arrow().serialize().to_pybytes(), SMALL.arrow(), "no Arrow record batch")


def test_a_batch_without_rows_is_neither_written_nor_read() -> None:
    empty = pa.RecordBatch.from_pylist([], schema=SMALL.arrow())
    with pytest.raises(InvalidArgument, match="at least one row"):
        encode_rows(empty)
    refused(empty.serialize().to_pybytes(), SMALL.arrow(), "without rows")


def test_columns_that_no_field_can_have_are_not_written() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["a"]).dictionary_encode()], names=["x"])
    with pytest.raises(InvalidArgument, match="cast"):
        encode_rows(batch)
