"""The operations of expressions over Python values, for conditions on captured rows: compiled once, called per row.

They are equivalent to those of :mod:`millrace.streams.patterns.operations` and use its types. A property test compares
the two with each other, and both with DuckDB.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.predicate.language import like_regex
from millrace.streams.patterns.expressions import Call, Constant, Expression
from millrace.streams.patterns.operations import (
    COMPARED,
    SUMS,
    Failed,
    Kinds,
    Plain,
    bounded,
    called,
    cast,
    constant,
    exactly,
    rest_of,
    wanted_kinds,
)

_UNFAILING: Final = frozenset({"is null", "in", "nullif"})
"""Operations that take nulls, and evaluate all of their arguments."""


def over_values(
    expression: Expression, leaf: Callable[[Expression], Callable[[Any], Any]], kinds: Kinds
) -> Callable[[Any], Any]:
    """Return a function from a context to the expression's Python value; the function may raise Failed.

    `leaf` makes such functions of leaves, whose values are of `kinds`.
    """
    return _compiled(expression, leaf, kinds)[0]


def _compiled(
    expression: Expression, leaf: Callable[[Expression], Callable[[Any], Any]], kinds: Kinds
) -> tuple[Callable[[Any], Any], Any]:
    """Return the function, and a sample of its Arrow type: a scalar for a constant, otherwise an empty array."""
    if isinstance(expression, Constant):
        value = expression.value
        return (lambda context: value), constant(value)
    if not isinstance(expression, Call):
        return leaf(expression), pa.array([], kinds(expression))
    name = expression.name
    parts, types = zip(*(_compiled(each, leaf, kinds) for each in expression.arguments), strict=True)
    found = called(name, expression.kind, list(types))
    if name == "cast":
        return _casting(parts[0], types[0].type, found.type), found
    if name == "case":
        results = [
            _brought(part, kind, found.type)
            for part, kind in zip([*parts[1::2], parts[-1]], [*types[1::2], types[-1]], strict=True)
        ]
        return _cases(list(parts[:-1:2]), results), found
    wanted = wanted_kinds(name, [each.type for each in types], [isinstance(each, pa.Scalar) for each in types])
    brought = [_brought(part, kind, want) for part, kind, want in zip(parts, types, wanted, strict=True)]
    if name in ("and", "or"):
        return _all(brought, name == "or"), found
    if name == "coalesce":
        return _first(brought), found
    values = _values(name, wanted, found.type)
    if len(brought) == 2 and name not in _UNFAILING:
        return _of_two(values, *brought), found

    def call(context: Any) -> Any:
        given = [each(context) for each in brought]
        return None if None in given and name not in _UNFAILING else values(*given)

    return call, found


def _brought(part: Callable[[Any], Any], have: Any, kind: pa.DataType) -> Callable[[Any], Any]:
    """Return a function for the part's values converted to another type, by the rules of :func:`cast`."""
    if isinstance(have, pa.Scalar):
        value = cast(have, kind).as_py()
        return lambda context: value
    convert = _conversion(have.type, kind)
    if convert is None:
        return part

    def call(context: Any) -> Any:
        value = part(context)
        return None if value is None else convert(value)

    return call


def _conversion(have: pa.DataType, kind: pa.DataType) -> Callable[[Any], Any] | None:
    if have == kind or pa.types.is_null(have) or (pa.types.is_integer(kind) and pa.types.is_integer(have)):
        return None
    if pa.types.is_floating(kind):
        return None if pa.types.is_floating(have) else float
    if pa.types.is_decimal(kind):
        return Decimal if pa.types.is_integer(have) else None
    if pa.types.is_date(have) and pa.types.is_timestamp(kind):
        return lambda value: datetime.combine(value, datetime.min.time())
    return lambda value: cast(pa.scalar(value, have), kind).as_py()


def _casting(part: Callable[[Any], Any], have: pa.DataType, kind: pa.DataType) -> Callable[[Any], Any]:
    def call(context: Any) -> Any:
        value = part(context)
        try:
            return cast(pa.scalar(value, have), kind).as_py()
        except pa.ArrowInvalid as error:
            raise Failed(f"CAST of {value!r} to {kind} failed: {error}") from error

    return call


def _all(parts: list[Callable[[Any], Any]], ends: bool) -> Callable[[Any], Any]:
    """Return AND or OR, which the value `ends` decides even if another operand fails."""

    def call(context: Any) -> Any:
        result: Any = not ends
        failed: Failed | None = None
        for each in parts:
            try:
                value = each(context)
            except Failed as error:
                failed = error
                continue
            if value is ends:
                return ends
            if value is None:
                result = None
        if failed is not None:
            raise failed
        return result

    return call


def _first(parts: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def call(context: Any) -> Any:
        for each in parts:
            if (value := each(context)) is not None:
                return value
        return None

    return call


def _cases(conditions: list[Callable[[Any], Any]], results: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def call(context: Any) -> Any:
        for condition, result in zip(conditions, results, strict=False):
            if condition(context) is True:
                return result(context)
        return results[-1](context)

    return call


def _of_two(values: Plain, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(context: Any) -> Any:
        left = first(context)
        if left is None:
            return None
        right = second(context)
        return None if right is None else values(left, right)

    return call


def _values(name: str, kinds: list[pa.DataType], result: pa.DataType) -> Plain:
    """Return an operation over values of `kinds`. None of them is null, except for `_UNFAILING`."""
    kind = kinds[0]
    if name in COMPARED:
        return COMPARED[name][1]
    if name in (*SUMS, "negative", "abs"):
        if pa.types.is_decimal(kind):
            return exactly(name, result)
        signs: Mapping[str, Plain] = {"negative": operator.neg, "abs": abs}
        plain = signs[name] if name in signs else SUMS[name][1]
        if pa.types.is_integer(result):
            return bounded(name, plain, 1 << (result.bit_width - 1))
        return plain if not pa.types.is_float32(result) else lambda *given: float(np.float32(plain(*given)))
    match name:
        case "/":
            return lambda left, right: None if right == 0 else left / right
        case "%":
            return rest_of(kind)
        case "floor" | "ceil":
            return _rounded(name, kind)
        case "greatest" | "least":
            sign = operator.gt if name == "greatest" else operator.lt
            return lambda *given: functools.reduce(
                lambda one, other: other if _takes(name, sign, one, other) else one, given
            )
    return _VALUES[name]


def _takes(name: str, sign: Plain, one: Any, other: Any) -> bool:
    """Return whether `other` is greater (for "greatest") or smaller than `one`. NaN is greater than every number."""
    return bool(sign(other, one) or (other != other if name == "greatest" else one != one))


def _rounded(name: str, kind: pa.DataType) -> Plain:
    if pa.types.is_decimal(kind):
        way = ROUND_FLOOR if name == "floor" else ROUND_CEILING
        return lambda value: value.to_integral_value(way)
    whole = math.floor if name == "floor" else math.ceil
    return lambda value: float(whole(value)) if math.isfinite(value) else value


def _in_value(subject: Any, *values: Any) -> Any:
    if subject is None:
        return None
    if any(subject == each for each in values if each is not None):
        return True
    return None if None in values else False


@functools.lru_cache(maxsize=256)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(like_regex(text), re.DOTALL)


_VALUES: Final[Mapping[str, Plain]] = {
    "not": operator.not_,
    "is null": lambda value: value is None,
    "in": _in_value,
    "like": lambda text, pattern: _pattern(pattern).fullmatch(text) is not None,
    "nullif": lambda left, right: None if left is not None and right is not None and left == right else left,
    "sqrt": lambda value: math.sqrt(value) if value >= 0 or math.isnan(value) else math.nan,
    "lower": lambda text: text.lower() if text.isascii() else pc.utf8_lower(text).as_py(),
    "upper": lambda text: text.upper() if text.isascii() else pc.utf8_upper(text).as_py(),
    "length": len,
    "||": operator.add,
}
