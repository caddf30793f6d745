"""Predicates over Arrow's columns: decimals of any digits compare as the numbers that they are."""

from __future__ import annotations

import operator
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.base.predicate.arrow import expression, matching
from millrace.base.predicate.language import condition

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
    assert matching(table, f"a {op} b").num_rows == hit
    assert matching(table, f"a {op} {other[1]:f}").num_rows == hit
    assert matching(table, f"{one[1]:f} {op} b").num_rows == hit
    assert matching(table, f"n {op} b").num_rows == int(COMPARE[op](3, other[1]))


def test_what_arrow_does_not_compare_is_the_predicates_fault() -> None:
    schema = pa.schema([("a", pa.decimal128(38, 0)), ("t", pa.timestamp("us"))])
    for text in (f"a > 0.{'0' * 45}1", "t > a"):
        with pytest.raises(InvalidArgument, match="does not fit the columns"):
            expression(condition(text), schema)
