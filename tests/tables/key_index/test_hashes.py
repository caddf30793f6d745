"""The hash of keys is XXH3-128 of their bytes, whichever way it is computed."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from millrace.message.keys import key_column
from millrace.tables.key_index.hashes import hash_keys, identifies_keys


def reference(values: list[bytes]) -> list[int]:
    return [xxhash.xxh3_128_intdigest(each) for each in values]


def as_numbers(keys: Any) -> list[int]:
    found = hash_keys(keys)
    return [int(high) << 64 | int(low) for high, low in zip(found.high, found.low, strict=True)]


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)), st.integers(0, 3))
def test_numbers_are_hashed_as_their_bytes(keys: list[int], skipped: int) -> None:
    array = pa.array(keys, pa.int64()).slice(skipped)
    assert as_numbers(array) == reference([each.to_bytes(8, "little", signed=True) for each in keys[skipped:]])
    assert as_numbers(pa.chunked_array([array, array])) == 2 * as_numbers(array)


@given(st.lists(st.text()), st.integers(0, 3))
def test_texts_are_hashed_as_their_bytes(keys: list[str], skipped: int) -> None:
    for kind in (pa.utf8(), pa.large_utf8()):
        array = pa.array(keys, kind).slice(skipped)
        assert as_numbers(array) == reference([each.encode() for each in keys[skipped:]])
    assert as_numbers(pa.array(keys, pa.utf8()).dictionary_encode()) == reference([each.encode() for each in keys])


def _bytes(key: int | str | bytes) -> bytes:
    """The bytes of a key: an int64 and a string are their own columns, others are bytes already."""
    if isinstance(key, int):
        return key.to_bytes(8, "little", signed=True)
    return key.encode() if isinstance(key, str) else key


@pytest.mark.parametrize(
    ("kinds", "keys", "exact"),
    [
        ([pa.int64()], [(1,), (-1,)], True),
        ([pa.int16()], [(1,), (-1,)], True),
        ([pa.date32()], [(date(2026, 11, 26),), (date(1960, 1, 1),)], True),
        ([pa.timestamp("us", "UTC")], [(0,), (-5,)], True),
        ([pa.utf8()], [("12345678",), ("a",)], False),
        ([pa.decimal128(20, 2)], [(Decimal("1.25"),), (Decimal("-1.25"),)], False),
        ([pa.int32(), pa.utf8()], [(1, "a"), (1, "")], False),
    ],
)
def test_a_key_of_another_type_is_hashed_as_its_canonical_bytes(
    kinds: list[pa.DataType], keys: list[tuple[Any, ...]], exact: bool
) -> None:
    schema = pa.schema([pa.field(f"k{number}", kind) for number, kind in enumerate(kinds)])
    rows = pa.table(
        [pa.array(list(each), kind) for each, kind in zip(zip(*keys, strict=True), kinds, strict=True)], schema
    )
    column = key_column(rows, schema.names)
    assert as_numbers(column) == reference([_bytes(each) for each in column.to_pylist()])
    assert identifies_keys(schema) is exact
