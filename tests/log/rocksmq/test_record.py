"""The record format: framed, found again, and never mistaken."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import EntryTooLarge, InvalidArgument
from millrace.log.rocksmq.record import HEADER_BYTES, frame_batch, parse_header

values = st.lists(st.binary(max_size=40), min_size=1, max_size=20)
LIMIT = 40


@given(values=values, base=st.integers(0, 1 << 62), durable=st.integers(0, 1 << 40), offset=st.integers(0, 1 << 40))
def test_a_header_says_what_was_framed_and_only_at_its_place_with_its_salt(
    values: list[bytes], base: int, durable: int, offset: int
) -> None:
    framed = frame_batch(values, max_entry_bytes=LIMIT)
    data = framed.header(salt=7, base=base, durable=durable, offset=offset) + b"".join(framed.parts)
    header = parse_header(data, 0, salt=7, offset=offset)
    assert header is not None
    assert (header.base, header.durable, header.entries) == (base, durable, len(values))
    assert (header.size, header.body, header.last) == (len(data), sum(map(len, values)), base + len(values) - 1)
    assert parse_header(data, 0, salt=8, offset=offset) is None
    assert parse_header(data, 0, salt=7, offset=offset + 1) is None
    assert parse_header(b"x" + data, 1, salt=7, offset=offset) == header


@given(values=values, flip=st.integers(0, 8 * HEADER_BYTES - 1))
def test_any_flipped_bit_of_a_header_is_noticed(values: list[bytes], flip: int) -> None:
    data = bytearray(frame_batch(values, max_entry_bytes=LIMIT).header(salt=7, base=1, durable=2, offset=3))
    data[flip // 8] ^= 1 << flip % 8
    assert parse_header(bytes(data), 0, salt=7, offset=3) is None


@given(data=st.binary(max_size=200), at=st.integers(0, 210))
def test_random_bytes_are_no_header(data: bytes, at: int) -> None:
    assert parse_header(data, at, salt=7, offset=0) is None


@given(values=values, cut=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_an_array_or_a_slice_of_it_is_framed_as_the_list_of_its_values(
    values: list[bytes], cut: tuple[int, int]
) -> None:
    piece = values[slice(*cut)]
    if piece:
        array = pa.array(values, pa.large_binary())[slice(*cut)]
        one, other = frame_batch(piece, max_entry_bytes=LIMIT), frame_batch(array, max_entry_bytes=LIMIT)
        assert b"".join(one.parts) == b"".join(other.parts)
        assert (one.payload_crc, one.size, one.count) == (other.payload_crc, other.size, other.count)


def test_many_large_values_are_framed_without_joining_them() -> None:
    large = [bytes([index]) * 5_000 for index in range(10)]
    assert all(any(part is value for part in frame_batch(large, max_entry_bytes=5_000).parts) for value in large)


@pytest.mark.parametrize("as_array", [False, True])
def test_a_value_above_the_limit_is_refused_wherever_it_stands(as_array: bool) -> None:
    for place in range(3):
        batch = [b"x" * LIMIT] * 3
        batch[place] += b"y"
        with pytest.raises(EntryTooLarge):
            frame_batch(pa.array(batch, pa.large_binary()) if as_array else batch, max_entry_bytes=LIMIT)
    with pytest.raises(EntryTooLarge):
        frame_batch([b"x" * LIMIT + b"y"], max_entry_bytes=LIMIT)


@pytest.mark.parametrize("wrong", [b"one value", "text", bytearray(b"x"), memoryview(b"x")])
def test_one_value_is_not_taken_for_a_sequence_of_them(wrong: object) -> None:
    with pytest.raises(InvalidArgument):
        frame_batch(wrong, max_entry_bytes=LIMIT)
