"""Compile predicates to Arrow expressions: exact ones, and weaker ones for pruning by file statistics."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.base.predicate.language import (
    SYNTAX_HELP,
    And,
    ColumnRef,
    Compare,
    Condition,
    In,
    IsNull,
    Like,
    Literal,
    Not,
    Or,
    leaves,
    like_regex,
    like_text,
    parse_condition,
)

_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


_ZONED: Final = re.compile(r"(Z|:.*[+-]\d{2}(:?\d{2})?(?P<seconds>:\d{2})?)$", re.IGNORECASE)
_DECIMAL_DIGITS: Final = 38
"""Digits of a decimal128, to which Arrow widens both sides of a comparison."""
_WHOLE: Final = pa.decimal128(20, 0)
"""A type that holds every int64 and uint64."""


def filter_table(table: pa.Table, predicate: str | pc.Expression) -> pa.Table:
    """Return the rows of `table` that match the predicate.

    Raises InvalidArgument if `predicate` is not a predicate, or does not fit the columns.
    """
    expression = parse_predicate(predicate, table.schema) if isinstance(predicate, str) else predicate
    try:
        return table.filter(expression)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidArgument(f"the predicate does not fit the columns: {error}") from None


def parse_predicate(text: str, schema: pa.Schema) -> pc.Expression:
    """Parse `text` into an expression over the columns of `schema`.

    Raises InvalidArgument with the problem.
    """
    return compile_condition(parse_condition(text), schema)


def compile_condition(found: Condition, schema: pa.Schema) -> pc.Expression:
    """Compile `found` into an expression over the columns of `schema`.

    Raises InvalidArgument if a column is missing or has another type.
    """
    try:
        made = _Compiler(schema).truth(found)
        schema.empty_table().filter(made)  # an error here is the predicate's, not a file's
        return made
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"the predicate does not fit the columns: {error}") from None


def pruning_expression(found: Condition, schema: pa.Schema) -> pc.Expression | None:
    """Return a condition that holds for every row matching `found`, for use with file statistics; None if there is
    none.

    Statistics ignore NaN. A NaN row matches a negated comparison although the statistics say that no row can, so
    negated comparisons of floats are left out.
    """
    weak = _coarse(found, _Compiler(schema))
    return None if weak is None else _Compiler(schema, denied=False).truth(weak)


def _coarse(found: Condition, compiler: _Compiler) -> Condition | None:
    match found:
        case And(parts):
            known = tuple(each for part in parts if (each := _coarse(part, compiler)) is not None)
            return And(known) if known else None
        case Or(parts):
            some = [_coarse(part, compiler) for part in parts]
            return None if any(each is None for each in some) else Or(tuple(each for each in some if each is not None))
        case Not(_) | Compare("!=", _, _) if compiler.has_floats(found):
            return None
    return found


class _Compiler:
    def __init__(self, schema: pa.Schema, *, denied: bool = True) -> None:
        """Create a compiler. With `denied` False, unknown may become false: nothing negates the result."""
        self._schema = schema
        self._denied = denied

    def has_floats(self, found: Condition) -> bool:
        return any(pa.types.is_floating(self._type(each)) for each in leaves(found) if isinstance(each, ColumnRef))

    def truth(self, found: Condition) -> pc.Expression:
        match found:
            case And(parts):
                return self._joined(operator.and_, parts)
            case Or(parts):
                return self._joined(operator.or_, parts)
            case Not(part):
                return ~_Compiler(self._schema).truth(part)
            case IsNull(subject):
                return self._value(subject, None).is_null()
            case Like(subject, pattern):
                if not _is_text(self._type(subject)):
                    raise InvalidArgument(f"LIKE needs text, and {'.'.join(subject.path)!r} is not text")
                return like(self._value(subject, None), pattern)
            case In(subject, values):
                kind = self._kind(subject)
                given = [each.as_py() for each in _members(values, kind)]
                if 0.0 in given and pa.types.is_floating(kind):
                    given += [-0.0, 0.0]  # equal as numbers, but distinct for Arrow's isin
                wanted = pa.array(given, kind)
                value = self._value(subject, kind)
                if not self._denied:
                    return value.isin(wanted)
                # isin(null) is false in Arrow; here, as in SQL, it is unknown.
                return pc.if_else(value.is_valid(), value.isin(wanted), pa.scalar(None, pa.bool_()))
            case Compare(op, left, right):
                kind = self._kind(left) or self._kind(right)
                compared = _COMPARE[op](*self._alike(left, right, kind))
                assert isinstance(compared, pc.Expression)
                return compared
            case ColumnRef() if pa.types.is_boolean(self._type(found)):
                return self._value(found, None)
            case Literal(bool() as value):
                return pc.scalar(value)
            case ColumnRef(path):
                raise InvalidArgument(f"the column {'.'.join(path)!r} is not a condition by itself: it is not boolean")
        raise InvalidArgument(f"{found.value!r} is not a condition; {SYNTAX_HELP}")

    def _joined(self, join: Callable[[Any, Any], Any], parts: tuple[Condition, ...]) -> pc.Expression:
        # A balanced tree: Arrow recurses over it, and a chain would be too deep.
        if len(parts) == 1:
            return self.truth(parts[0])
        middle = len(parts) // 2
        joined = join(self._joined(join, parts[:middle]), self._joined(join, parts[middle:]))
        assert isinstance(joined, pc.Expression)
        return joined

    def _alike(
        self, left: ColumnRef | Literal, right: ColumnRef | Literal, kind: pa.DataType | None
    ) -> tuple[pc.Expression, pc.Expression]:
        """Return both sides; decimals that need more digits than Arrow's comparison supports are cast to a wider
        type.
        """
        sides = self._value(left, kind), self._value(right, kind)
        one, other = (
            literal_scalar(each, kind).type if isinstance(each, Literal) else self._type(each) for each in (left, right)
        )
        if pa.types.is_decimal(one) or pa.types.is_decimal(other):
            one, other = (_WHOLE if pa.types.is_integer(each) else each for each in (one, other))
        if pa.types.is_decimal(one) and pa.types.is_decimal(other):
            scale = max(one.scale, other.scale)
            digits = max(one.precision - one.scale, other.precision - other.scale) + scale
            if digits > _DECIMAL_DIGITS:
                return sides[0].cast(pa.decimal256(digits, scale)), sides[1].cast(pa.decimal256(digits, scale))
        return sides

    def _kind(self, operand: ColumnRef | Literal) -> pa.DataType | None:
        return self._type(operand) if isinstance(operand, ColumnRef) else None

    def _type(self, column: ColumnRef) -> pa.DataType:
        return column_type(column, self._schema)

    def _value(self, operand: ColumnRef | Literal, kind: pa.DataType | None) -> pc.Expression:
        if isinstance(operand, ColumnRef):
            self._type(operand)
            return pc.field(operand.path) if len(operand.path) > 1 else pc.field(operand.path[0])
        return pc.scalar(literal_scalar(operand, kind))


def like(values: Any, pattern: str) -> Any:
    """Match texts (a column or an expression) against a LIKE pattern. Arrow's match_like mishandles backslashes
    (26.0).
    """
    found = like_text(pattern)
    if found is None:
        return pc.match_substring_regex(values, rf"\A(?s:{like_regex(pattern)})\z")
    match found:
        case text, True, True:
            return pc.match_substring(values, text)
        case text, True, False:
            return pc.ends_with(values, text)
        case text, False, True:
            return pc.starts_with(values, text)
    return pc.equal(values, pc.scalar(found[0])) if isinstance(values, pc.Expression) else pc.equal(values, found[0])


def column_type(column: ColumnRef, schema: pa.Schema) -> pa.DataType:
    """Return the type of a column or of a field inside it. Raises InvalidArgument if it does not exist."""
    name, *inner = column.path
    if name not in schema.names:
        raise InvalidArgument(f"no column {name!r}; the columns are {', '.join(schema.names)}")
    kind = schema.field(name).type
    for each in inner:
        if not pa.types.is_struct(kind) or kind.get_field_index(each) < 0:
            raise InvalidArgument(f"{'.'.join(column.path)!r}: it has no field {each!r}")
        kind = kind.field(each).type
    return kind


def _members(values: tuple[Literal, ...], kind: pa.DataType) -> Iterator[pa.Scalar]:
    """Yield literals of a list as values of a column's type; a number with too many digits for the type matches
    none.
    """
    for each in values:
        found = literal_scalar(each, kind)
        try:
            yield found.cast(kind) if pa.types.is_decimal(kind) else found
        except pa.ArrowInvalid:
            continue


def literal_scalar(literal: Literal, kind: pa.DataType | None) -> pa.Scalar:
    """Convert a literal to a scalar comparable with a column of `kind`.

    Raises InvalidArgument, or Arrow's own error, if it has no such value.
    """
    value = literal.value
    if isinstance(value, str) and kind is not None and not _is_text(kind):
        zoned = _ZONED.search(value)
        if pa.types.is_timestamp(kind) and zoned is not None and zoned["seconds"]:
            value = (
                datetime.fromisoformat(value).astimezone(UTC).isoformat()
            )  # Arrow does not parse offsets with seconds
        if pa.types.is_integer(kind) and not value.removeprefix("-").isdecimal():
            raise InvalidArgument(f"{value!r:.40} is not a whole number in digits")  # Arrow reads 0x10 as 16
        if pa.types.is_timestamp(kind) and kind.tz is not None and zoned is None:
            raise InvalidArgument(f"{value!r:.40} has no time zone but the column does: write 2026-11-25T10:00:00Z")
        return pa.scalar(value).cast(kind)
    if isinstance(value, int | Decimal) and kind is not None and pa.types.is_temporal(kind):
        raise InvalidArgument(
            f"{value} is not a date or timestamp: write one as text, '2026-11-25' or '2026-11-25T10:00:00Z'"
        )
    if isinstance(value, Decimal):
        if kind is not None and pa.types.is_decimal(kind):
            return pa.scalar(value)
        if kind is None or not pa.types.is_floating(kind):
            return pa.scalar(float(value))  # id > 1.5 compares as numbers do
        return pa.scalar(float(value), kind)
    if isinstance(value, int) and kind is not None and pa.types.is_decimal(kind):
        return pa.scalar(Decimal(value))
    return pa.scalar(value) if kind is None else pa.scalar(value, kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
