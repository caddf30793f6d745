"""The operations of expressions, each twice: over Arrow columns, and over Python values (conditions that look at captured rows).

Nulls are SQL's: a comparison or a sum with one is null, AND and OR are three-valued. ``/`` of whole numbers is a float and, by zero, null, as in
Spark and DuckDB. Timestamps have no zone in here: whoever calls brings them to UTC before.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.expressions import Call, Constant, Expression

Columnar = Callable[..., Any]
Plain = Callable[..., Any]

KINDS: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "varchar": pa.utf8(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
}


@dataclass(frozen=True, slots=True)
class Operation:
    """`columns` takes arrays and scalars and gives one; `values` takes Python values and gives one."""

    columns: Columnar
    values: Plain
    strict: bool = True
    """A null among the arguments makes it null, without `values` being asked."""


def _divide(left: Any, right: Any) -> Any:
    if pa.types.is_integer(left.type) and pa.types.is_integer(right.type):
        left, right = pc.cast(left, pa.float64()), pc.cast(right, pa.float64())
    zero = pa.scalar(0).cast(right.type) if not pa.types.is_decimal(right.type) else pa.scalar(Decimal(0), right.type)
    return pc.divide(left, pc.if_else(pc.equal(right, zero), pa.scalar(None, right.type), right))


def _modulo(left: Any, right: Any) -> Any:
    """The remainder with the sign of the dividend; null by zero."""
    zero = pa.scalar(0).cast(right.type)
    divisor = pc.if_else(pc.equal(right, zero), pa.scalar(None, right.type), right)
    quotient = pc.trunc(pc.divide(left, divisor)) if pa.types.is_floating(left.type) else pc.divide(left, divisor)
    return pc.subtract(left, pc.multiply(quotient, divisor))


def _like(text: Any, pattern: Any) -> Any:
    if not isinstance(pattern, pa.Scalar):
        raise InvalidArgument("LIKE takes a literal pattern")
    return pc.match_like(text, pattern.as_py())


def _like_value(text: str, pattern: str) -> bool:
    parts = (".*" if each == "%" else "." if each == "_" else re.escape(each) for each in pattern)
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def _and(left: Any, right: Any) -> Any:
    return False if left is False or right is False else None if left is None or right is None else True


def _or(left: Any, right: Any) -> Any:
    return True if left is True or right is True else None if left is None or right is None else False


def _case(*arguments: Any) -> Any:
    """``condition, value, condition, value, ..., otherwise``."""
    *pairs, otherwise = arguments
    result = otherwise
    for place in range(len(pairs) - 2, -1, -2):
        result = pc.if_else(pc.fill_null(pairs[place], False), pairs[place + 1], result)
    return result


def _case_value(*arguments: Any) -> Any:
    *pairs, otherwise = arguments
    return next((pairs[at + 1] for at in range(0, len(pairs), 2) if pairs[at] is True), otherwise)


def _in(subject: Any, *values: Any) -> Any:
    result = pc.equal(subject, values[0])
    for each in values[1:]:
        result = pc.or_kleene(result, pc.equal(subject, each))
    return result


def _in_value(subject: Any, *values: Any) -> Any:
    if subject is None:
        return None
    return True if subject in [each for each in values if each is not None] else None if None in values else False


def _nullif(left: Any, right: Any) -> Any:
    return pc.if_else(pc.fill_null(pc.equal(left, right), False), pa.scalar(None, left.type), left)


def _extreme(name: str) -> Columnar:
    return lambda *arguments: getattr(pc, name)(*arguments, skip_nulls=False)


OPERATIONS: Final[Mapping[str, Operation]] = {
    "+": Operation(pc.add_checked, operator.add),
    "-": Operation(pc.subtract_checked, operator.sub),
    "*": Operation(pc.multiply_checked, operator.mul),
    "/": Operation(_divide, lambda left, right: None if right == 0 else left / right),
    "%": Operation(
        _modulo,
        lambda left, right: (
            None
            if right == 0
            else math.fmod(left, right)
            if isinstance(left, float) or isinstance(right, float)
            else left - right * int(left / right if isinstance(left, Decimal) else _truncated(left, right))
        ),
    ),
    "=": Operation(pc.equal, operator.eq),
    "<>": Operation(pc.not_equal, operator.ne),
    "<": Operation(pc.less, operator.lt),
    "<=": Operation(pc.less_equal, operator.le),
    ">": Operation(pc.greater, operator.gt),
    ">=": Operation(pc.greater_equal, operator.ge),
    "and": Operation(pc.and_kleene, _and, strict=False),
    "or": Operation(pc.or_kleene, _or, strict=False),
    "not": Operation(pc.invert, operator.not_),
    "negative": Operation(pc.negate_checked, operator.neg),
    "is null": Operation(pc.is_null, lambda value: value is None, strict=False),
    "in": Operation(_in, _in_value, strict=False),
    "like": Operation(_like, _like_value),
    "case": Operation(_case, _case_value, strict=False),
    "coalesce": Operation(
        pc.coalesce, lambda *values: next((each for each in values if each is not None), None), strict=False
    ),
    "nullif": Operation(_nullif, lambda left, right: None if left == right else left, strict=False),
    "abs": Operation(pc.abs_checked, abs),
    "floor": Operation(pc.floor, math.floor),
    "ceil": Operation(pc.ceil, math.ceil),
    "sqrt": Operation(pc.sqrt, lambda value: math.sqrt(value) if value >= 0 else math.nan),
    "greatest": Operation(_extreme("max_element_wise"), max),
    "least": Operation(_extreme("min_element_wise"), min),
    "lower": Operation(pc.utf8_lower, str.lower),
    "upper": Operation(pc.utf8_upper, str.upper),
    "length": Operation(pc.utf8_length, len),
    "||": Operation(lambda left, right: pc.binary_join_element_wise(left, right, ""), operator.add),
}


def _truncated(left: int, right: int) -> int:
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def over_columns(expression: Expression, leaf: Callable[[Expression], Any]) -> Any:
    """The expression's value: an array where a leaf of it is one, otherwise a scalar. Raises InvalidArgument where the types do not fit."""
    match expression:
        case Constant(value):
            return constant(value)
        case Call(name, arguments, kind):
            values = [over_columns(each, leaf) for each in arguments]
            try:
                if name == "cast":
                    return pc.cast(values[0], KINDS[kind], safe=False)
                return OPERATIONS[name].columns(*(_typed_case(values) if name == "case" else _typed(values)))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                types = ", ".join(str(each.type) for each in values)
                raise InvalidArgument(f"{name.upper()} of ({types}) does not work: {error}") from error
        case _:
            return leaf(expression)


def constant(value: Any) -> pa.Scalar:
    """A literal as Arrow has it."""
    return pa.scalar(value, pa.timestamp("us")) if isinstance(value, datetime) else pa.scalar(value)


def _typed_case(values: list[Any]) -> list[Any]:
    """As `_typed`, of the conditions and of the values, each for itself: what CASE gives has not the type of what it asks."""
    conditions, results = values[:-1:2], [*values[1::2], values[-1]]
    *chosen, otherwise = _typed(results)
    asked = [pc.cast(each, pa.bool_()) if pa.types.is_null(each.type) else each for each in conditions]
    return [*(each for pair in zip(asked, chosen, strict=True) for each in pair), otherwise]


def _typed(values: list[Any]) -> list[Any]:
    """Arguments that are null throughout take the type of another; text that a date or a timestamp is compared with is one."""
    known = [each.type for each in values if not pa.types.is_null(each.type)]
    if not known:
        return values
    temporal = next((each for each in known if pa.types.is_temporal(each) and not pa.types.is_duration(each)), None)
    found = []
    for each in values:
        if pa.types.is_null(each.type):
            each = pc.cast(each, known[0])
        elif temporal is not None and isinstance(each, pa.Scalar) and pa.types.is_string(each.type):
            each = pc.cast(each, temporal)
        found.append(each)
    return found


def over_values(expression: Expression, leaf: Callable[[Expression], Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """A function of a context that gives the expression's value as a Python value; `leaf` makes such functions of leaves."""
    match expression:
        case Constant(value):
            return lambda context: value
        case Call("cast", (inside,), kind):
            got, target = over_values(inside, leaf), KINDS[kind]
            return lambda context: pc.cast(constant(got(context)), target, safe=False).as_py()
        case Call("and", arguments, _):
            parts = [over_values(each, leaf) for each in arguments]
            return lambda context: _all(parts, context)
        case Call(name, arguments, _):
            operation = OPERATIONS[name]
            parts = [over_values(each, leaf) for each in arguments]
            values, strict = operation.values, operation.strict
            if len(parts) == 2 and strict:
                return _of_two(values, *parts)

            def call(context: Any) -> Any:
                found = [each(context) for each in parts]
                return None if strict and None in found else values(*_alike(found))

            return call
        case _:
            return leaf(expression)


def _all(parts: list[Callable[[Any], Any]], context: Any) -> Any:
    result: Any = True
    for each in parts:
        value = each(context)
        if value is False:
            return False
        if value is None:
            result = None
    return result


def _of_two(values: Plain, first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(context: Any) -> Any:
        left = first(context)
        if left is None:
            return None
        right = second(context)
        if right is None:
            return None
        if type(left) is not type(right):
            left, right = _alike([left, right])
        return values(left, right)

    return call


def _alike(found: list[Any]) -> list[Any]:
    """As `_typed`, of values; decimals and floats meet as floats."""
    if any(isinstance(each, date) for each in found) and any(isinstance(each, str) for each in found):
        exact = any(isinstance(each, datetime) for each in found)
        read = datetime.fromisoformat if exact else date.fromisoformat
        return [read(each) if isinstance(each, str) else each for each in found]
    if any(isinstance(each, float) for each in found) and any(isinstance(each, Decimal) for each in found):
        return [float(each) if isinstance(each, Decimal) else each for each in found]
    return found
