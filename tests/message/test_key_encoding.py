"""The canonical bytes of keys: one to one, in the keys' order, as an independent encoder has them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.message.field_types import parse_type
from millrace.message.keys import encode_keys, key_column, key_hash, vchannel_index

EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - as the numbers of both kinds of timestamps have it
TEXT = st.text(st.one_of(st.sampled_from("\0\x01aé"), st.characters(exclude_categories=["Cs"])), max_size=6)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{f"int{bits}": st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)},
    "string": TEXT,
    "uuid": st.uuids().map(str),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(UTC)),
    "timestamp_ntz": st.datetimes(),
    "decimal(38,4)": st.integers(-(10**38) + 1, 10**38 - 1).map(lambda value: Decimal(f"{value}E-4")),
    "decimal(5,0)": st.integers(-99_999, 99_999).map(Decimal),
}


def expected(value: Any) -> bytes:
    """The bytes of a field, from the text of docs/wire-form.md."""
    match value:
        case str():
            return value.encode().replace(b"\0", b"\0\xff") + b"\0\x01"
        case Decimal():
            sign, digits, _ = value.as_tuple()
            number = int("".join(map(str, digits))) * (-1 if sign else 1)
            return (number + (1 << 127)).to_bytes(16, "big")
        case datetime():
            number = (value.replace(tzinfo=None) - EPOCH) // timedelta(microseconds=1)
        case date():
            number = (value - date(1970, 1, 1)).days
        case _:
            number = value
    return bytes((int(number) + (1 << 63)).to_bytes(8, "big"))


@st.composite
def keys(draw: st.DrawFn) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    kinds = tuple(draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=3)))
    return kinds, draw(st.lists(st.tuples(*(VALUES[kind] for kind in kinds)), max_size=8))


def rows_of(kinds: Sequence[str], found: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = [pa.array([key[place] for key in found], parse_type(kind).arrow) for place, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(columns, names=[f"k{place}" for place in range(len(kinds))])


@given(keys())
def test_the_bytes_are_those_of_the_text_and_compare_as_the_keys_do(
    drawn: tuple[tuple[str, ...], list[tuple[Any, ...]]],
) -> None:
    kinds, found = drawn
    encoded = encode_keys(rows_of(kinds, found).columns).to_pylist()
    assert encoded == [b"".join(map(expected, key)) for key in found]
    comparable = [tuple(value.encode() if isinstance(value, str) else value for value in key) for key in found]
    for one, left in zip(encoded, comparable, strict=True):
        for other, right in zip(encoded, comparable, strict=True):
            assert (one < other) == (left < right)
            assert (one == other) == (left == right)


@given(keys(), st.integers(0, 8), st.integers(1, 9))
def test_slices_and_chunks_have_the_keys_of_their_rows(
    drawn: tuple[tuple[str, ...], list[tuple[Any, ...]]], start: int, count: int
) -> None:
    rows = rows_of(*drawn)
    names = rows.schema.names
    whole = key_column(rows, names)
    assert key_column(rows.slice(start), names).to_pylist() == whole.to_pylist()[start:]
    table = pa.Table.from_batches([rows.slice(0, start), rows.slice(start)], schema=rows.schema)
    chunked = key_column(table, names)
    assert chunked.to_pylist() == whole.to_pylist()
    wanted = [key_hash(key) % count for key in whole.to_pylist()]
    assert vchannel_index(whole, count).tolist() == vchannel_index(chunked, count).tolist() == wanted


def test_one_int64_or_string_is_its_own_column_as_it_always_was() -> None:
    for values in (pa.array([3, -1]), pa.array(["a", "\0"]), pa.array(["a", "b"]).dictionary_encode()):
        rows = pa.RecordBatch.from_arrays([values], names=["id"])
        assert key_column(rows, ["id"]).equals(values)


@pytest.mark.parametrize(
    "column",
    [pa.array([1, None]), pa.array([1.0]), pa.array([True]), pa.array([[1]]), pa.array([1], pa.timestamp("ns"))],
)
def test_what_is_no_field_of_a_key_is_refused(column: pa.Array) -> None:
    with pytest.raises(InvalidArgument):
        encode_keys([column, column])
