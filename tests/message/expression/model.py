"""Expressions row by row, in plain Python: written from docs/expressions.md, sharing nothing with the kernels."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_DOWN, ROUND_HALF_UP, Context, Decimal
from typing import Any

from millrace.message.expression.tree import Node, literal_value
from millrace.message.field_types import parse_type

EXACT = Context(prec=200)
DAY = 86_400_000_000
TEXT = 16 << 10


class Failed(Exception):
    """The row has no value: it failed."""


def row_value(node: Node, row: dict[str, Any]) -> Any:
    """The value in one row (integers, dates as days, timestamps as microseconds), None for null. Raises Failed."""
    op, args = node.op, node.args
    match op:
        case "field":
            found: Any = row
            for name in node.params:
                found = None if found is None else found[name]
            return found
        case "literal":
            return literal_value(*node.params)
        case "null":
            return None
        case "is_null":
            return row_value(args[0], row) is None
        case "and" | "or":
            ends, unknown = op == "or", False
            for each in args:
                value = row_value(each, row)
                if value is ends:
                    return ends
                unknown |= value is None
            return None if unknown else not ends
        case "coalesce":
            for each in args:
                value = row_value(each, row)
                if value is not None:
                    return widened(value, node.kind)
            return None
        case "case":
            for when, then in zip(args[:-1:2], args[1::2], strict=True):
                if row_value(when, row) is True:
                    return widened(row_value(then, row), node.kind)
            return widened(row_value(args[-1], row), node.kind)
    values = [row_value(each, row) for each in args]
    if any(value is None for value in (values[:1] if op == "in" else values)):
        return None
    return of_values(node, values)


def widened(value: Any, kind: str) -> Any:
    return (
        value.quantize(Decimal(1).scaleb(-parse_type(kind).scale), context=EXACT)
        if isinstance(value, Decimal)
        else value
    )


def integer(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise Failed
    return value


def of_values(node: Node, values: list[Any]) -> Any:  # noqa: C901 - one arm an operation
    one, other, kind = values[0], values[-1], node.args[0].kind
    match node.op:
        case "not":
            return not one
        case "=":
            return one == other
        case "!=":
            return one != other
        case "<":
            return one < other
        case "<=":
            return one <= other
        case ">":
            return one > other
        case ">=":
            return one >= other
        case "in":
            return one in values[1:] and one == one
        case "starts_with":
            return one.startswith(other)
        case "ends_with":
            return one.endswith(other)
        case "contains":
            return other in one
        case "||":
            joined = "".join(values)
            if len(joined.encode()) > TEXT:
                raise Failed
            return joined
        case "length":
            return len(one)
        case "substring":
            start, length = map(int, node.params)
            return one[start - 1 : start - 1 + length]
        case "ascii_lower":
            return "".join(c.lower() if c.isascii() else c for c in one)
        case "ascii_upper":
            return "".join(c.upper() if c.isascii() else c for c in one)
        case "round":
            return one.quantize(Decimal(1).scaleb(-int(node.params[0])), ROUND_HALF_UP, EXACT)
        case "cast":
            return cast(one, kind, node.kind)
        case "year" | "month" | "day" | "hour" | "minute" | "second":
            return part(node.op, one * DAY if kind == "date" else one)
    if kind == "int64":
        return of_integers(node.op, one, other)
    if kind == "float64":
        return of_floats(node.op, one, other)
    return {
        "+": lambda: EXACT.add(one, other),
        "-": lambda: EXACT.subtract(one, other),
        "*": lambda: EXACT.multiply(one, other),
        "neg": lambda: EXACT.minus(one),
        "abs": lambda: EXACT.abs(one),
    }[node.op]()


def of_integers(op: str, one: int, other: int) -> int:
    match op:
        case "+":
            return integer(one + other)
        case "-":
            return integer(one - other)
        case "*":
            return integer(one * other)
        case "neg":
            return integer(-one)
        case "abs":
            return integer(abs(one))
    if other == 0:
        raise Failed
    quotient = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
    return integer(quotient) if op == "div" else one - quotient * other


def of_floats(op: str, one: float, other: float) -> float:
    match op:
        case "+":
            return one + other
        case "-":
            return one - other
        case "*":
            return one * other
        case "neg":
            return -one
        case "abs":
            return abs(one)
    if other == 0:
        raise Failed
    return one / other


def cast(value: Any, kind: str, target: str) -> Any:
    if target.startswith("decimal("):
        tree = parse_type(target)
        exact = Decimal(value)
        found = exact.quantize(Decimal(1).scaleb(-tree.scale), ROUND_DOWN, EXACT)
        if found != exact or abs(found) >= Decimal(10) ** (tree.precision - tree.scale):
            raise Failed
        return found
    match kind, target:
        case "int64", "float64":
            return float(value)
        case "int64", "string":
            return str(value)
        case "float64", "int64":
            if math.isnan(value) or math.isinf(value):
                raise Failed
            return integer(math.trunc(value))
        case "date", _:
            return value * DAY
        case _, "date":
            return value // DAY
        case ("timestamp", _) | ("timestamp_ntz", _):
            return value
    return integer(int(value))


def part(name: str, micros: int) -> int:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)
    return int(getattr(moment, name))


def plain(value: Any) -> Any:
    """A Python value as expressions have it."""
    match value:
        case datetime():
            since = value.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)
            return since // timedelta(microseconds=1)
        case date():
            return (value - date(1970, 1, 1)).days
        case dict():
            return {name: plain(each) for name, each in value.items()}
    return value
