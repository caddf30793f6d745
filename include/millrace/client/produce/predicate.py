"""Predicates over a collection's rows, as text: a small language that can do nothing but compare.

    origin == "JFK" and (delay > 60 or cancelled) and tail is not None and carrier in ("AA", "UA")

Columns by name; literals: numbers, strings, True, False, None; ``== != < <= > >=`` (chained too), ``in`` and ``not in`` a list
of literals, ``is None`` and ``is not None``, ``and``, ``or``, ``not``, a boolean column by itself. Dates and timestamps are
compared with ISO 8601 text. A comparison with a null is unknown, and a row of which the whole is unknown is not hit.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument

MAX_LENGTH: Final = 10_000

_COMPARE: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SQL: Final = (
    (re.compile(r"(?<![=!<>])=(?!=)"), "write == to compare"),
    (re.compile(r"<>"), "write != for unequal"),
    (re.compile(r"\b(AND|OR|NOT|IN|IS)\b"), "write and, or, not, in, is in small letters"),
    (re.compile(r"\b(is\s+(not\s+)?null|null)\b", re.IGNORECASE), "write `is None` or `is not None`"),
    (re.compile(r"\b(like|between)\b", re.IGNORECASE), "there is no LIKE and no BETWEEN: write 1 <= price <= 9"),
)
"""What people write who know SQL, outside of quotes, and what stands for it here."""
_QUOTED: Final = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_LANGUAGE: Final = "columns, literals, comparisons, in, is None, and, or, not"

_ACCEPTED: Final = f"""a predicate has {_LANGUAGE}, such as city == "Oslo" and age >= 18"""


def matching(table: pa.Table, predicate: str | pc.Expression) -> pa.Table:
    """The rows of `table` that the predicate hits. Raises InvalidArgument for one that is none, or fits no column."""
    expression = parse(predicate, table.schema) if isinstance(predicate, str) else predicate
    try:
        return table.filter(expression)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidArgument(f"the predicate does not fit the columns: {error}") from None


def parse(text: str, schema: pa.Schema) -> pc.Expression:
    """The expression that `text` stands for, over the columns of `schema`. Raises InvalidArgument that says what is wrong."""
    if len(text) > MAX_LENGTH:
        raise InvalidArgument(f"a predicate has at most {MAX_LENGTH} characters")
    try:
        return _Parser(schema).truth(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise InvalidArgument(_what_is_wrong(text.strip(), error)) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgument(f"{text[:200]!r} is no predicate: {error}; {_ACCEPTED}") from None
    except (pa.ArrowException, TypeError) as error:
        raise InvalidArgument(f"{text[:200]!r} does not fit the columns: {error}") from None


def _what_is_wrong(text: str, error: SyntaxError) -> str:
    """Words for text that is no expression: where it stops being one, and what is meant where that can be told."""
    bare = _QUOTED.sub(lambda found: " " * len(found[0]), text)
    hints = [words for pattern, words in _SQL if pattern.search(bare)]
    where = f" (character {error.offset})" if error.offset else ""
    return f"{text[:200]!r} is no predicate{where}: {'; '.join([*hints, _ACCEPTED])}"


class _Parser:
    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def truth(self, node: ast.expr) -> pc.Expression:
        match node:
            case ast.BoolOp(ast.And(), values):
                return self._joined(operator.and_, values)
            case ast.BoolOp(ast.Or(), values):
                return self._joined(operator.or_, values)
            case ast.UnaryOp(ast.Not(), operand):
                return ~self.truth(operand)
            case ast.Compare(left, ops, comparators):
                found = None
                for operation, right in zip(ops, comparators, strict=True):
                    each = self._comparison(left, operation, right)
                    found = each if found is None else found & each
                    left = right
                assert found is not None
                return found
            case ast.Name(name) if pa.types.is_boolean(self._type(name)):
                return pc.field(name)
            case ast.Constant(bool() as value):
                return pc.scalar(value)
        raise InvalidArgument(f"{ast.unparse(node)!r} is no condition; a predicate has {_LANGUAGE}")

    def _joined(self, join: Callable[[Any, Any], Any], values: list[ast.expr]) -> pc.Expression:
        found = self.truth(values[0])
        for value in values[1:]:
            found = join(found, self.truth(value))
        return found

    def _comparison(self, left: ast.expr, operation: ast.cmpop, right: ast.expr) -> pc.Expression:
        kind = self._kind(left) or self._kind(right)
        match operation, right:
            case ast.Is() | ast.IsNot(), ast.Constant(None):
                null = self._value(left, kind).is_null()
                return null if isinstance(operation, ast.Is) else ~null
            case ast.In() | ast.NotIn(), ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
                values = pa.array([self._literal(each, kind).as_py() for each in elements], kind)
                subject = self._value(left, kind)
                found = subject.isin(values)
                return found if isinstance(operation, ast.In) else ~found & subject.is_valid()
        compare = _COMPARE.get(type(operation))
        if isinstance(operation, ast.Is | ast.IsNot):
            raise InvalidArgument("`is` asks for None alone: write `is None` or `is not None`")
        if compare is None:
            raise InvalidArgument(f"{type(operation).__name__} is no comparison here; a predicate has {_LANGUAGE}")
        if any(isinstance(each, ast.Constant) and each.value is None for each in (left, right)):
            raise InvalidArgument("nothing compares with None: write `is None` or `is not None`")
        found = compare(self._value(left, kind), self._value(right, kind))
        assert isinstance(found, pc.Expression)
        return found

    def _kind(self, node: ast.expr) -> pa.DataType | None:
        return self._type(node.id) if isinstance(node, ast.Name) else None

    def _type(self, name: str) -> pa.DataType:
        if name not in self._schema.names:
            raise InvalidArgument(f"no column {name!r}; there are {', '.join(self._schema.names)}")
        return self._schema.field(name).type

    def _value(self, node: ast.expr, kind: pa.DataType | None) -> pc.Expression:
        if isinstance(node, ast.Name):
            self._type(node.id)
            return pc.field(node.id)
        return pc.scalar(self._literal(node, kind))

    def _literal(self, node: ast.expr, kind: pa.DataType | None) -> pa.Scalar:
        value = ast.literal_eval(node) if isinstance(node, ast.Constant | ast.UnaryOp) else None
        if not isinstance(value, bool | int | float | str | bytes):
            raise InvalidArgument(f"{ast.unparse(node)!r} is no literal: numbers, strings, True and False are")
        if isinstance(value, str) and kind is not None and pa.types.is_temporal(kind):
            return pa.scalar(value).cast(kind)
        if isinstance(value, float) and kind is not None and pa.types.is_integer(kind):
            return pa.scalar(value)  # id > 1.5 compares as numbers do
        return pa.scalar(value) if kind is None else pa.scalar(value, kind)
