"""The operations of expressions, each in two equivalent forms: over Arrow columns, and over Python values.

The latter are for conditions on captured rows. Both convert the arguments to the same types (:func:`wanted_kinds`) and
give the same value, null or failure (docs/patterns.md):

- Nulls are SQL's: a comparison or a sum with a null is null, AND and OR are three-valued.
- ``/`` is of floats; ``/`` and ``%`` by zero are null, as in Spark.
- A failure (an integer or decimal overflows its type, a cast's value does not fit) is :class:`Failed`. An operand that
  does not matter does not fail: an unused branch of CASE, arguments after the first value of COALESCE, the other side
  of a false in AND and of a true in OR.

Timestamps have no zone here: the caller converts them to UTC.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Context, Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.base.predicate.arrow import like
from millrace.streams.patterns.expressions import Call, Constant, Expression

Plain = Callable[..., Any]
Kinds = Callable[[Expression], pa.DataType]
"""The type of a leaf's values."""

KINDS: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "varchar": pa.utf8(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
}
COMPARED: Final[Mapping[str, tuple[str, Plain]]] = {
    "=": ("equal", operator.eq),
    "<>": ("not_equal", operator.ne),
    "<": ("less", operator.lt),
    "<=": ("less_equal", operator.le),
    ">": ("greater", operator.gt),
    ">=": ("greater_equal", operator.ge),
}
MOST_DIGITS: Final = 38
EXACT: Final = Context(prec=160)
"""A context with more digits than any operation of two decimals needs."""
SUMS: Final[Mapping[str, tuple[Plain, Plain]]] = {
    "+": (pc.add_checked, operator.add),
    "-": (pc.subtract_checked, operator.sub),
    "*": (pc.multiply_checked, operator.mul),
}
_ALIKE: Final = frozenset({*COMPARED, "in", "nullif", "greatest", "least", "coalesce"})
"""Operations whose arguments are converted to one type."""
_FLOATS: Final = frozenset({"/", "sqrt"})
_LAZY: Final = frozenset({"and", "or", "case", "coalesce"})


class Failed(InvalidArgument):
    """An operation has no value for a row's values."""

    code = InvalidArgument.code


# --- types -----------------------------------------------------------------------------------------------------------


def wanted_kinds(name: str, kinds: list[pa.DataType], constants: list[bool]) -> list[pa.DataType]:
    """Return the types to convert arguments of types `kinds` to. Constants adapt to a date or a timestamp."""
    if name in _FLOATS and all(_is_number(each) for each in kinds):
        return [pa.float64()] * len(kinds)
    if name in ("floor", "ceil"):
        return [pa.float64() if pa.types.is_integer(each) else each for each in kinds]
    if name in _ALIKE:
        common = _common(kinds, constants)
        return kinds if common is None else [common] * len(kinds)
    if name in SUMS or name == "%":
        known = [each for each in kinds if not pa.types.is_null(each)]
        kinds = [known[0] if pa.types.is_null(each) and known else each for each in kinds]
        if all(_is_number(each) for each in kinds) and not all(pa.types.is_integer(each) for each in kinds):
            if any(pa.types.is_floating(each) for each in kinds):
                return [_float(kinds)] * len(kinds)
            return [_as_decimal(each) for each in kinds]
        if name == "%":
            return [pa.int64()] * len(kinds) if len(set(kinds)) > 1 else kinds
        return kinds
    if name in ("and", "or", "not"):
        return [pa.bool_() if pa.types.is_null(each) else each for each in kinds]
    return kinds


def _common(kinds: list[pa.DataType], constants: list[bool]) -> pa.DataType | None:
    """Return the common type of values to compare or choose from; None leaves the conversion to Arrow."""
    known = [each for each in kinds if not pa.types.is_null(each)]
    if not known:
        return None
    if all(_is_number(each) for each in known):
        if any(pa.types.is_floating(each) for each in known):
            return _float(known)
        if any(pa.types.is_decimal(each) for each in known):
            decimals = [_as_decimal(each) for each in known]
            scale = max(each.scale for each in decimals)
            digits = max(each.precision - each.scale for each in decimals) + scale
            return pa.decimal128(digits, scale) if digits <= MOST_DIGITS else pa.decimal256(digits, scale)
        return known[0] if len(set(known)) == 1 else pa.int64()
    temporal = [each for each in known if pa.types.is_timestamp(each) or pa.types.is_date(each)]
    text = all(
        (_is_text(kind) and constant) or kind in temporal
        for kind, constant in zip(kinds, constants, strict=True)
        if kind in known
    )
    if temporal and text:
        return next((each for each in temporal if pa.types.is_timestamp(each)), temporal[0])
    return known[0] if len(set(known)) == 1 else None


def _float(kinds: list[pa.DataType]) -> pa.DataType:
    return pa.float32() if all(pa.types.is_float32(each) for each in kinds) else pa.float64()


def _as_decimal(kind: pa.DataType) -> pa.DataType:
    return kind if pa.types.is_decimal(kind) else pa.decimal128(len(str(1 << kind.bit_width)), 0)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _decimal_of(name: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type of an operation of two decimals, at most 38 digits. Raises InvalidArgument for a larger scale."""
    scale = one.scale + other.scale if name == "*" else max(one.scale, other.scale)
    whole = max(one.precision - one.scale, other.precision - other.scale)
    digits = one.precision + other.precision + 1 if name == "*" else whole + scale + (name != "%")
    if scale > MOST_DIGITS:
        raise InvalidArgument(
            f"{one} * {other} has {scale} digits after the point, more than {MOST_DIGITS}: CAST one to a double"
        )
    return pa.decimal128(min(digits, MOST_DIGITS), scale)


def aggregate_kind(function: str, kind: pa.DataType) -> pa.DataType:
    """Return the type of an aggregate of values of type `kind`."""
    match function:
        case "count":
            return pa.int64()
        case "avg":
            return pa.float64()
        case "array_agg":
            return pa.list_(kind)
        case "sum" if pa.types.is_decimal(kind):
            return pa.decimal128(MOST_DIGITS, kind.scale)
        case "sum":
            return pa.int64() if pa.types.is_integer(kind) else pa.float64()
    return kind


# --- values of both forms ---


def added(one: Any, other: Any) -> Any:
    """Add a value to a running sum of the same type. :func:`summed` checks the range."""
    return EXACT.add(one, other) if isinstance(one, Decimal) else one + other


def summed(total: Any) -> Any:
    """Return a running sum as a value. Raises Failed if it exceeds a bigint, or 38 digits."""
    whole = isinstance(total, int)
    if whole and not -(1 << 63) <= total < 1 << 63:
        raise Failed("SUM: the sum exceeds a bigint: sum a double, CAST(x AS DOUBLE)")
    if isinstance(total, Decimal) and len(total.as_tuple().digits) > MOST_DIGITS:
        raise Failed(f"SUM: the sum has more than {MOST_DIGITS} digits: sum a double, CAST(x AS DOUBLE)")
    return total


def bounded(name: str, values: Plain, limit: Any) -> Plain:
    """Mark values outside the result's type as Failed.

    The range begins at -`limit`; for whole numbers it excludes `limit`, for decimals both ends.
    """
    least = -limit if isinstance(limit, int) else -limit + Decimal((0, (1,), -MOST_DIGITS))

    def call(*given: Any) -> Any:
        found = values(*given)
        if not least <= found < limit:
            raise Failed(f"{name.upper()} of {', '.join(map(str, given))} failed: {found} exceeds the result's type")
        return found

    return call


def exactly(name: str, result: pa.DataType) -> Plain:
    """Return an operation over decimals that fails if its value exceeds the digits of `result`."""
    exact: Mapping[str, Plain] = {
        "+": EXACT.add,
        "-": EXACT.subtract,
        "*": EXACT.multiply,
        "negative": EXACT.minus,
        "abs": EXACT.abs,
    }
    return bounded(name, exact[name], Decimal(10) ** (result.precision - result.scale))


def _by_pairs(values: Plain, left: Any, right: Any, kind: pa.DataType) -> Any:
    """Apply an operation value by value, for columns without an Arrow kernel."""
    if isinstance(left, pa.Scalar) and isinstance(right, pa.Scalar):
        one, other = left.as_py(), right.as_py()
        return pa.scalar(None if one is None or other is None else values(one, other), kind)
    rows = len(left if isinstance(right, pa.Scalar) else right)
    given = ([each.as_py()] * rows if isinstance(each, pa.Scalar) else each.to_pylist() for each in (left, right))
    return pa.array([None if None in pair else values(*pair) for pair in zip(*given, strict=True)], kind)


def rest_of(kind: pa.DataType) -> Plain:
    """Return the function of the remainder, with the dividend's sign; its value is None for a divisor of zero."""
    if pa.types.is_floating(kind):
        return lambda left, right: None if right == 0 else math.nan if math.isinf(left) else math.fmod(left, right)
    if pa.types.is_decimal(kind):
        return lambda left, right: None if right == 0 else EXACT.remainder(left, right)
    return lambda left, right: None if right == 0 else abs(left) % abs(right) * (-1 if left < 0 else 1)


# --- over columns ----------------------------------------------------------------------------------------------------


def over_columns(expression: Expression, leaf: Callable[[Expression], Any]) -> Any:
    """Return the expression's value: an array if one of its leaves is an array, otherwise a scalar.

    Raises InvalidArgument if types do not fit, and Failed if an operation has no value in a row that is evaluated.
    """
    try:
        return _columns(expression, leaf, lazy=False)
    except Failed:
        return _columns(expression, leaf, lazy=True)


def _columns(expression: Expression, leaf: Callable[[Expression], Any], *, lazy: bool) -> Any:
    match expression:
        case Constant(value):
            return constant(value)
        case Call(name, arguments, _) if lazy and name in _LAZY:
            return _looked_at(name, list(arguments), leaf)
        case Call(name, arguments, kind):
            return called(name, kind, [_columns(each, leaf, lazy=lazy) for each in arguments])
        case _:
            return leaf(expression)


def called(name: str, kind: str, values: list[Any]) -> Any:
    try:
        if name == "cast":
            return cast(values[0], KINDS[kind])
        if name == "case":
            return _case(values)
        wanted = wanted_kinds(name, [each.type for each in values], [isinstance(each, pa.Scalar) for each in values])
        return _COLUMNS[name](*(cast(each, want) for each, want in zip(values, wanted, strict=True)))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        types = ", ".join(str(each.type) for each in values)
        failed = Failed if type(error) is pa.ArrowInvalid else InvalidArgument
        raise failed(f"{name.upper()} of ({types}) failed: {error}") from error


def _looked_at(name: str, arguments: list[Expression], leaf: Callable[[Expression], Any]) -> Any:
    """Evaluate an operation lazily: operands get nulls in rows where they do not matter, so that they do not fail
    there.
    """

    def value(expression: Expression, where: Any = None) -> Any:
        def seen(each: Expression) -> Any:
            found = leaf(each)
            return found if isinstance(found, pa.Scalar) else pc.if_else(where, found, pa.scalar(None, found.type))

        return _columns(expression, leaf if where is None else seen, lazy=True)

    if name in ("and", "or"):
        known, failing = [], []
        for each in arguments:
            try:
                known.append(value(each))
            except Failed:
                failing.append(each)
        for each in failing:
            decided = (
                functools.reduce(lambda one, other: called(name, "", [one, other]), known)
                if known
                else pa.scalar(None, pa.bool_())
            )
            open_ = pc.fill_null(decided if name == "and" else pc.invert(decided), True)
            known.append(value(each, open_))
        return functools.reduce(lambda one, other: called(name, "", [one, other]), known)
    left: Any = None
    if name == "coalesce":
        found = [value(arguments[0])]
        for each in arguments[1:]:
            missing = pc.is_null(found[-1])
            left = missing if left is None else pc.and_(left, missing)
            found.append(value(each, left))
        return called(name, "", found)
    found = []
    for place in range(0, len(arguments) - 1, 2):
        condition = value(arguments[place], left)
        holds = pc.fill_null(condition, False) if not pa.types.is_null(condition.type) else pa.scalar(False)
        taken = holds if left is None else pc.and_(left, holds)
        found += [condition, value(arguments[place + 1], taken)]
        left = pc.invert(holds) if left is None else pc.and_(left, pc.invert(holds))
    return called(name, "", [*found, value(arguments[-1], left)])


def constant(value: Any) -> pa.Scalar:
    """Return a literal as an Arrow scalar."""
    return pa.scalar(value, pa.timestamp("us")) if isinstance(value, datetime) else pa.scalar(value)


def cast(value: Any, kind: pa.DataType) -> Any:
    """Cast to another type: to integers towards zero, to the nearest float. Raises ArrowInvalid if it does not fit."""
    have = value.type
    if have == kind:
        return value
    if pa.types.is_integer(kind) and (pa.types.is_floating(have) or pa.types.is_decimal(have)):
        return pc.cast(pc.trunc(value), kind)
    if pa.types.is_decimal(have) and pa.types.is_floating(kind):
        return pc.cast(pc.cast(value, pa.utf8()), kind)  # the nearest one; Arrow's own cast may miss it
    return pc.cast(value, kind, safe=pa.types.is_decimal(kind))


def _case(values: list[Any]) -> Any:
    """Evaluate CASE over ``condition, value, condition, value, ..., otherwise``."""
    results = [*values[1::2], values[-1]]
    common = _common([each.type for each in results], [isinstance(each, pa.Scalar) for each in results])
    *chosen, found = results if common is None else [cast(each, common) for each in results]
    for condition, result in zip(reversed(values[:-1:2]), reversed(chosen), strict=True):
        asked = pc.cast(condition, pa.bool_()) if pa.types.is_null(condition.type) else condition
        found = pc.if_else(pc.fill_null(asked, False), result, found)
    return found


def _sum(name: str) -> Plain:
    def columns(left: Any, right: Any) -> Any:
        if pa.types.is_decimal(left.type) and pa.types.is_decimal(right.type):
            result = _decimal_of(name, left.type, right.type)
            if result.precision == MOST_DIGITS:
                return _by_pairs(exactly(name, result), left, right, result)
        return SUMS[name][0](left, right)

    return columns


def _divide(left: Any, right: Any) -> Any:
    return pc.divide(left, pc.if_else(pc.equal(right, 0.0), pa.scalar(None, right.type), right))


def _modulo(left: Any, right: Any) -> Any:
    """Return the remainder with the dividend's sign; null for a divisor of zero."""
    if pa.types.is_integer(left.type):
        divisor = pc.if_else(pc.equal(right, 0), pa.scalar(None, right.type), right)
        # By 1 instead of -1: the quotient of the least number and -1 would overflow.
        divisor = pc.if_else(pc.equal(divisor, -1), pa.scalar(1, right.type), divisor)
        return pc.subtract(left, pc.multiply(pc.divide(left, divisor), divisor))
    if pa.types.is_decimal(left.type):
        return _by_pairs(rest_of(left.type), left, right, _decimal_of("%", left.type, right.type))
    if isinstance(left, pa.Scalar) and isinstance(right, pa.Scalar):
        return _by_pairs(rest_of(left.type), left, right, left.type)
    known = pc.and_(pc.is_valid(left), pc.fill_null(pc.not_equal(right, 0.0), False))
    with np.errstate(invalid="ignore"):
        found = np.fmod(_numbers(left), _numbers(right))
    return pc.if_else(known, pa.array(found, left.type), pa.scalar(None, left.type))


def _numbers(value: Any) -> Any:
    """Return floats as numpy values, with NaN for null."""
    if isinstance(value, pa.Scalar):
        return math.nan if not value.is_valid else value.as_py()
    return value.to_numpy(zero_copy_only=False)


def _like(text: Any, pattern: Any) -> Any:
    if not isinstance(pattern, pa.Scalar):
        raise InvalidArgument("LIKE takes a literal pattern")
    if not pattern.is_valid:
        return pc.if_else(True, pa.scalar(None, pa.bool_()), pc.is_null(text))
    return like(text, pattern.as_py())


def _in(subject: Any, *values: Any) -> Any:
    return functools.reduce(pc.or_kleene, (pc.equal(subject, each) for each in values))


def _nullif(left: Any, right: Any) -> Any:
    return pc.if_else(pc.fill_null(pc.equal(left, right), False), pa.scalar(None, left.type), left)


def _extreme(name: str) -> Plain:
    def columns(*values: Any) -> Any:
        return functools.reduce(_greater if name == "greatest" else _smaller, values)

    return columns


def _greater(one: Any, other: Any) -> Any:
    """Return the greater of two values; null if one is null. NaN is greater than every number."""
    takes = pc.greater(other, one)
    return pc.if_else(pc.or_(takes, pc.is_nan(other)) if pa.types.is_floating(one.type) else takes, other, one)


def _smaller(one: Any, other: Any) -> Any:
    takes = pc.less(other, one)
    nan = pa.types.is_floating(one.type)
    return pc.if_else(pc.and_(pc.is_valid(other), pc.or_(takes, pc.is_nan(one))) if nan else takes, other, one)


_COLUMNS: Final[Mapping[str, Plain]] = {
    **{name: getattr(pc, kernel) for name, (kernel, _) in COMPARED.items()},
    **{name: _sum(name) for name in SUMS},
    "/": _divide,
    "%": _modulo,
    "and": pc.and_kleene,
    "or": pc.or_kleene,
    "not": pc.invert,
    "negative": pc.negate_checked,
    "is null": pc.is_null,
    "in": _in,
    "like": _like,
    "coalesce": pc.coalesce,
    "nullif": _nullif,
    "abs": pc.abs_checked,
    "floor": pc.floor,
    "ceil": pc.ceil,
    "sqrt": pc.sqrt,
    "greatest": _extreme("greatest"),
    "least": _extreme("least"),
    "lower": pc.utf8_lower,
    "upper": pc.utf8_upper,
    "length": pc.utf8_length,
    "||": lambda left, right: pc.binary_join_element_wise(left, right, ""),
}
