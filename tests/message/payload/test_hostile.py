"""Hostile payloads: nothing crashes, both ways of decoding say the same, and memory stays bounded."""

from __future__ import annotations

import struct
import tracemalloc
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import Malformed
from millrace.message.payload.rows import decode_many, decode_rows, encode_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from tests.message.samples import batches, column, schemas

ALL = CollectionSchema(
    (
        FieldSpec("id", "string", False),
        FieldSpec("flag", "bool", True),
        FieldSpec("number", "int32", True),
        FieldSpec("tags", "list<string>", True),
        FieldSpec("flags", "list<bool>", False),
        FieldSpec("price", "decimal(10,2)", True),
        FieldSpec("address", "struct<street: string, floors: list<struct<number: int8>>>", True),
        FieldSpec("labels", "map<string, decimal(4,1)>", False),
    ),
    "id",
)


def rows(count: int) -> pa.RecordBatch:
    values: list[list[object]] = [
        [f"k{place}" for place in range(count)],
        [None if place % 3 == 0 else place % 2 == 0 for place in range(count)],
        [None if place % 5 == 0 else place for place in range(count)],
        [None if place % 4 == 0 else ["a", None, "bcd"][: place % 4] for place in range(count)],
        [[True, False, None][: place % 4] for place in range(count)],
        [None if place % 3 == 0 else Decimal(place) for place in range(count)],
        [None if place % 4 == 1 else {"street": "é", "floors": [{"number": place}, None]} for place in range(count)],
        [[("a", Decimal("99.9")), ("bc", None)][: place % 3] for place in range(count)],
    ]
    arrays = [column(field.parsed_type, part) for field, part in zip(ALL.fields, values, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ALL.arrow())


def same(left: pa.RecordBatch | pa.Table, right: pa.RecordBatch | pa.Table) -> bool:
    """Equal columns and values, as Arrow writes them.

    Mutated bytes make NaNs, which equal nothing, and moments that Python has none of.
    """
    return left.schema.equals(right.schema) and _written(left) == _written(right)


def _written(rows: pa.RecordBatch | pa.Table) -> list[str]:
    return [
        pa.concat_arrays(column.chunks).to_string(window=1 << 30)
        if isinstance(column, pa.ChunkedArray) and column.num_chunks
        else column.to_string(window=1 << 30) if len(column) else ""
        for column in rows.columns
    ]  # fmt: skip


def judge_both_ways(payloads: list[bytes], schema: pa.Schema) -> int:
    """How many are good; asserts that decoding many says of each what decoding it alone says,
    whatever columns are asked for.
    """
    found = decode_many(pa.array(payloads, pa.large_binary()), schema)
    for name in (schema.names[0], schema.names[-1]):
        part = decode_many(pa.array(payloads, pa.large_binary()), schema, columns=[name])
        assert (part.errors, part.counts.tolist()) == (found.errors, found.counts.tolist())
        assert same(part.rows, found.rows.select([name]))
    found.rows.validate(full=True)
    alone: list[pa.RecordBatch] = []
    errors: dict[int, str] = {}
    counts = [0] * len(payloads)
    for place, payload in enumerate(payloads):
        try:
            alone.append(decode_rows(payload, schema))
            counts[place] = alone[-1].num_rows
        except Malformed as error:
            errors[place] = str(error)
    assert found.errors == errors
    assert found.counts.tolist() == counts
    assert same(found.rows, pa.Table.from_batches(alone, schema=schema))
    for field in schema:
        assert field.nullable or found.rows.column(field.name).null_count == 0
    return len(alone)


@pytest.mark.slow
def test_every_flipped_bit_of_a_payload_is_judged_alike_both_ways() -> None:
    payload = bytes(encode_rows(rows(5)))
    flipped = []
    for place in range(len(payload)):
        for bit in range(8):
            changed = bytearray(payload)
            changed[place] ^= 1 << bit
            flipped.append(bytes(changed))
    good = judge_both_ways(flipped, ALL.arrow())
    # Flips in values and padding are other rows, or none; nearly all of those in the metadata are not.
    assert 0 < good < len(flipped)


def test_every_truncation_is_refused() -> None:
    payload = bytes(encode_rows(rows(3)))
    assert judge_both_ways([payload[:length] for length in range(len(payload))], ALL.arrow()) == 0


def test_every_word_set_to_an_extreme_is_judged_alike_both_ways() -> None:
    payload = bytes(encode_rows(rows(5)))
    changed = []
    for place in range(0, len(payload) - 7, 4):
        for value in (-1, 1 << 62, -(1 << 63), (1 << 63) - 1, 1 << 31, 0, 7):
            changed.append(payload[:place] + struct.pack("<q", value) + payload[place + 8 :])
    judge_both_ways(changed, ALL.arrow())


@pytest.mark.slow
def test_every_byte_of_the_metadata_of_empty_columns_is_judged_among_good_ones_as_alone() -> None:
    values: list[list[object]] = [[""], [None], [None], [[]], [[]], [None], [None], [[]]]
    arrays = [column(field.parsed_type, part) for field, part in zip(ALL.fields, values, strict=True)]
    good = bytes(encode_rows(pa.RecordBatch.from_arrays(arrays, schema=ALL.arrow())))
    (metadata,) = struct.unpack_from("<i", good, 4)
    changed = [
        good[:place] + bytes([value]) + good[place + 1 :] for place in range(8, 8 + metadata) for value in (1, 3)
    ]
    for first in range(0, len(changed), 6):
        # Of more layouts than eight at once, what has the next one would be decoded alone.
        judge_both_ways([*changed[first : first + 6], *[good] * 4], ALL.arrow())


@settings(max_examples=60)
@given(st.data())
def test_payloads_mutated_at_random_are_judged_alike_both_ways(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    base = [encode_rows(data.draw(batches(schema))) for _ in range(3)]
    random = data.draw(st.randoms(use_true_random=False))
    payloads = []
    for _ in range(40):
        changed = bytearray(random.choice(base))
        for _ in range(random.randint(0, 3)):
            place = random.randrange(len(changed))
            if random.random() < 0.5:
                changed[place] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)])
            else:
                source = random.choice(base)
                start = random.randrange(len(source))
                changed[place : place + 8] = source[start : start + 8]
        payloads.append(bytes(changed))
    judge_both_ways(payloads, schema.arrow())


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_random_bytes_are_refused(payloads: list[bytes]) -> None:
    marked = [b"\xff\xff\xff\xff" + payload for payload in payloads]
    assert judge_both_ways(payloads + marked, ALL.arrow()) == 0


def find(payload: bytes, *values: int) -> int:
    """Where these consecutive int64 values stand in a payload."""
    return payload.index(struct.pack(f"<{len(values)}q", *values))


def test_buffers_that_share_bytes_are_refused_so_that_few_bytes_cannot_become_many_columns() -> None:
    schema = CollectionSchema(
        (FieldSpec("id", "int64", False), *(FieldSpec(f"f{place}", "int64", True) for place in range(200))), "id"
    ).arrow()
    count = 1000
    one = pa.array(np.arange(count))
    payload = bytes(encode_rows(pa.RecordBatch.from_arrays([one] * 201, schema=schema)))
    size = 8 + struct.unpack_from("<i", payload, 4)[0]
    metadata, body = bytearray(payload[:size]), payload[size : size + count * 8]
    place = find(payload, len(payload) - size)
    struct.pack_into("<q", metadata, place, len(body))
    vector = find(payload, 0, 0, 0, count * 8)
    for number in range(201):
        struct.pack_into("<4q", metadata, vector + 32 * number, 0, 0, 0, count * 8)
    shared = bytes(metadata) + body
    assert judge_both_ways([shared] * 10, schema) == 0
    assert "over each other" in decode_many(pa.array([shared], pa.large_binary()), schema).errors[0]


def test_a_batch_that_claims_billions_of_rows_allocates_next_to_nothing() -> None:
    payload = encode_rows(
        pa.RecordBatch.from_arrays([pa.array([1], pa.int64())], schema=pa.schema([pa.field("id", pa.int64(), False)]))
    )
    schema = pa.schema([pa.field("id", pa.int64(), False)])
    claims = []
    for count in (1 << 31, (1 << 31) - 1, 1 << 60, 1 << 20):
        changed = bytearray(payload)
        size = 8 + struct.unpack_from("<i", payload, 4)[0]
        for place in range(8, size - 7, 8):
            if struct.unpack_from("<q", payload, place)[0] == 1:
                struct.pack_into("<q", changed, place, count)
        claims += [bytes(changed)] * 10
    before = pa.total_allocated_bytes()
    assert judge_both_ways(claims, schema) == 0
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_payloads_of_many_bits_take_memory_in_proportion_to_their_bytes() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("bits", pa.list_(pa.bool_()), False)])
    bits = pa.ListArray.from_arrays(pa.array([0, 100_000], pa.int32()), pa.array([True, None] * 50_000))
    payload = bytes(encode_rows(pa.RecordBatch.from_arrays([pa.array([1]), bits], schema=schema)))
    small = pa.RecordBatch.from_arrays(
        [pa.array([1]), pa.ListArray.from_arrays([0, 1], pa.array([True]))], schema=schema
    )
    payloads = pa.array(([payload] + [encode_rows(small)] * 10) * 40, pa.large_binary())
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        found = decode_many(payloads, schema)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.errors == {}
    assert found.counts.sum() == 440
    assert peak + pa.total_allocated_bytes() - before < 12 * payloads.nbytes


def test_many_layouts_of_metadata_in_one_run_are_judged_alike_both_ways() -> None:
    payload = bytes(encode_rows(rows(2)))
    padded = []
    for number in range(40):
        # Bytes that no table refers to, of another content each: as many layouts.
        size = struct.unpack_from("<i", payload, 4)[0]
        extra = bytes([number + 1]) * 8
        padded.append(payload[:4] + struct.pack("<i", size + 8) + payload[8 : 8 + size] + extra + payload[8 + size :])
    assert judge_both_ways(padded, ALL.arrow()) == 40


def test_metadata_whose_values_are_no_words_of_their_own_is_judged_alike_both_ways() -> None:
    payload = bytes(encode_rows(rows(2)))
    size, root = struct.unpack_from("<iI", payload, 4)
    # Everything behind the root's offset moves by 4: what refers to each other keeps its distance.
    shifted = struct.pack("<iI4x", size + 8, root + 4) + payload[12 : 8 + size] + b"\0" * 4
    judge_both_ways([payload[:4] + shifted + payload[8 + size :]] * 20 + [payload] * 20, ALL.arrow())


def test_a_bad_text_is_found_in_a_column_that_nobody_asked_for() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("tags", pa.list_(pa.utf8()), True)])
    good = bytes(encode_rows(pa.RecordBatch.from_arrays([pa.array([1]), pa.array([["abc"]])], schema=schema)))
    payloads = [good] * 50
    payloads[17] = good.replace(b"abc", b"\xffbc")
    assert list(decode_many(pa.array(payloads, pa.large_binary()), schema, columns=["id"]).errors) == [17]
    assert judge_both_ways(payloads, schema) == 49


def test_one_bad_text_among_many_payloads_costs_the_others_nothing() -> None:
    schema = pa.schema([pa.field("id", pa.utf8(), nullable=False)])
    good = bytes(encode_rows(pa.RecordBatch.from_arrays([pa.array(["abc"])], schema=schema)))
    payloads = [good] * 3000
    payloads[1234] = good.replace(b"abc", b"\xffbc")
    found = decode_many(pa.array(payloads, pa.large_binary()), schema)
    assert list(found.errors) == [1234]
    assert found.rows.num_rows == 2999
