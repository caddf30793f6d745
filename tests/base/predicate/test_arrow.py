"""Predicates over Arrow's columns: decimals of any digits compare as the numbers that they are."""

from __future__ import annotations

import operator
from datetime import date
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.base.predicate.arrow import compile_condition, filter_table
from millrace.base.predicate.language import parse_condition

COMPARE: dict[str, Any] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
EXACT = Context(prec=80)


@st.composite
def decimals(draw: st.DrawFn) -> tuple[pa.Decimal128Type, Decimal]:
    """A type and a value of it."""
    digits = draw(st.sampled_from([1, 5, 19, 37, 38]))
    scale = draw(st.integers(0, digits))
    most = 10**digits - 1
    whole = draw(st.one_of(st.sampled_from([0, 1, -1, most, -most]), st.integers(-most, most)))
    return pa.decimal128(digits, scale), Decimal(whole).scaleb(-scale, EXACT)


@given(decimals(), decimals(), st.sampled_from(sorted(COMPARE)))
def test_decimals_compare_as_the_numbers_that_they_are(
    one: tuple[pa.Decimal128Type, Decimal], other: tuple[pa.Decimal128Type, Decimal], op: str
) -> None:
    columns = {name: pa.array([value, None], kind) for name, (kind, value) in (("a", one), ("b", other))}
    table = pa.table(columns | {"n": [3, 3]})
    hit = int(COMPARE[op](one[1], other[1]))
    assert filter_table(table, f"a {op} b").num_rows == hit
    assert filter_table(table, f"a {op} {other[1]:f}").num_rows == hit
    assert filter_table(table, f"{one[1]:f} {op} b").num_rows == hit
    assert filter_table(table, f"n {op} b").num_rows == int(COMPARE[op](3, other[1]))


def test_a_list_of_decimals_may_have_some_that_are_none_of_the_column() -> None:
    table = pa.table({"d": pa.array([Decimal("0.25"), None], pa.decimal128(10, 2))})
    assert [
        filter_table(table, text).num_rows for text in ("d in (0.25, 0.255, 1e20)", "d in (0.255)", "d not in (0.255)")
    ] == [1, 0, 1]


def test_dates_and_moments_are_compared_with_text_that_says_them() -> None:
    table = pa.table(
        {
            "day": [date(2026, 1, 2)],
            "at": pa.array([0], pa.timestamp("us", "UTC")),
            "wall": pa.array([0], pa.timestamp("us")),
        }
    )
    for text in ("day > 5", "at > 0", "wall in (1)", "day = 1.5"):
        with pytest.raises(InvalidArgument, match="not a date or timestamp"):
            filter_table(table, text)
    with pytest.raises(InvalidArgument, match="has no time zone"):
        filter_table(table, "at > '2026-01-01'")
    for text in (
        "day = '2026-01-02'",
        "at = '1970-01-01T00:00:00Z'",
        "at = '1970-01-01 01:00:00+01'",
        "wall = '1970-01-01'",
    ):
        assert filter_table(table, text).num_rows == 1


def test_what_arrow_does_not_compare_is_the_predicates_fault() -> None:
    schema = pa.schema([("a", pa.decimal128(38, 0)), ("t", pa.timestamp("us"))])
    for text in (f"a > 0.{'0' * 45}1", "t > a"):
        with pytest.raises(InvalidArgument, match="does not fit the columns"):
            compile_condition(parse_condition(text), schema)


def test_zero_is_in_a_list_with_either_sign() -> None:
    table = pa.table({"f": [0.0, -0.0, 1.0, None]})
    for text in ("f in (0)", "f in (-0.0, 7)", "f = 0", "f between -0.0 and 0"):
        assert filter_table(table, text).num_rows == 2
    assert filter_table(table, "f not in (0.0)").num_rows == 1


def test_text_beside_a_whole_number_is_its_digits_and_an_offset_may_have_seconds() -> None:
    table = pa.table({"id": [16], "at": pa.array([0], pa.timestamp("us", "UTC"))})
    assert filter_table(table, "id = '16'").num_rows == 1
    with pytest.raises(InvalidArgument, match="not a whole number in digits"):
        filter_table(table, "id = '0x10'")
    assert filter_table(table, "at = '1970-01-01T00:19:32+00:19:32'").num_rows == 1
