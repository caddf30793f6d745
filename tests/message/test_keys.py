"""Which VChannel a key goes to."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.message.keys import key_hash, key_hashes, vchannel_index

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


def test_the_hash_is_folded_fnv_1a_of_the_keys_bytes() -> None:
    # The published FNV-1a 64 values of "", "a" and "foobar".
    for text, plain in {"": 0xCBF29CE484222325, "a": 0xAF63DC4C8601EC8C, "foobar": 0x85944171F73967E8}.items():
        assert key_hash(text) == plain ^ (plain >> 32)
    assert key_hash(1) == key_hash("\x01" + "\x00" * 7)
    assert key_hash(-2) != key_hash(2)


@given(st.lists(TEXT, max_size=150), st.integers(0, 5))
def test_strings_hash_as_the_reference_does_one_by_one(keys: list[str], skipped: int) -> None:
    for kind in (pa.utf8(), pa.large_utf8()):
        array = pa.array(keys, kind)[skipped:]
        assert key_hashes(array).tolist() == [key_hash(key) for key in keys[skipped:]]


@given(st.lists(INT64, max_size=50), st.integers(1, 1000))
def test_integers_hash_as_the_reference_does_one_by_one(keys: list[int], count: int) -> None:
    assert vchannel_index(pa.array(keys, pa.int64()), count).tolist() == [key_hash(key) % count for key in keys]


@given(st.lists(TEXT, min_size=1, max_size=20), st.data())
def test_dictionary_and_chunked_keys_hash_as_plain_ones(keys: list[str], data: st.DataObject) -> None:
    plain = pa.array(keys, pa.utf8())
    cut = data.draw(st.integers(0, len(keys)))
    expected = vchannel_index(plain, 7).tolist()
    assert vchannel_index(plain.dictionary_encode(), 7).tolist() == expected
    assert vchannel_index(pa.chunked_array([plain[:cut], plain[cut:]]), 7).tolist() == expected
    assert vchannel_index(plain.dictionary_encode()[cut:], 7).tolist() == expected[cut:]


def test_many_short_and_few_long_keys_hash_as_the_reference_does() -> None:
    keys = [str(place) * (place % 9) for place in range(500)] + ["long" * 700, "longer" * 700]
    assert key_hashes(pa.array(keys)).tolist() == [key_hash(key) for key in keys]


def test_a_very_long_key_takes_time_in_proportion_to_its_bytes() -> None:
    started = time.process_time()
    assert int(key_hashes(pa.array(["x" * (1 << 20)]))[0]) == key_hash("x" * (1 << 20))
    assert time.process_time() - started < 5


def test_an_index_is_one_int32_a_key() -> None:
    found = vchannel_index(pa.array([], pa.int64()), 4)
    assert found.dtype == np.int32
    assert found.shape == (0,)


@pytest.mark.parametrize(
    "keys",
    [
        pa.array([1, None], pa.int64()),
        pa.array([1], pa.int32()),
        pa.array([1.0]),
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None])),
        pa.DictionaryArray.from_arrays(pa.array([0, None]), pa.array(["a", "b"])),
    ],
    ids=["null", "int32", "float", "null in the dictionary", "null index"],
)
def test_what_is_no_key_is_refused(keys: pa.Array) -> None:
    with pytest.raises(InvalidArgument):
        vchannel_index(keys, 4)


def test_an_unused_null_in_a_dictionary_does_no_harm() -> None:
    keys = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["a", None]))
    assert key_hashes(keys).tolist() == [key_hash("a")] * 2


@pytest.mark.parametrize("count", [0, -1, 1 << 31])
def test_a_collection_has_one_vchannel_or_more(count: int) -> None:
    with pytest.raises(InvalidArgument):
        vchannel_index(pa.array([1], pa.int64()), count)


@pytest.mark.parametrize("key", [1 << 63, True, 1.5, "\ud800", None])
def test_the_reference_refuses_what_is_no_key(key: object) -> None:
    with pytest.raises(InvalidArgument):
        key_hash(key)  # type: ignore[arg-type]
