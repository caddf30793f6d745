"""Evaluate expressions by column. Each row has a value, a null, or a failure.

A row *fails* if an integer overflows int64, on division by zero, if a cast cannot represent its value, or if a
concatenated text exceeds :data:`MAX_TEXT`. Whatever is computed from a failure fails. Not evaluated, and so unable to
fail, are a CASE branch that is not taken, arguments of COALESCE after the first value, operands of AND after a false
and of OR after a true. The chain's decisions depend on this: the results for a chain version never change
(docs/expression-vectors.json).

Never raises for the content of rows. Memory is a small multiple of the rows, plus MAX_TEXT for each row of a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.expression import decimals
from millrace.message.expression.tree import COMPARISONS, Node, common_decimal, literal_value
from millrace.message.field_types import FieldType, parse_type

MAX_TEXT: Final = 16 << 10
"""Maximum bytes of a concatenated text."""

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]

_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 63) - 1
_DAY: Final = 86_400_000_000


class ColumnValues(NamedTuple):
    """The values of an expression.

    Numbers (decimals unscaled), dates (days), timestamps (microseconds) and bools are numpy arrays, texts are Arrow
    arrays.
    """

    data: Any
    valid: Bools | None = None
    """Mask of the rows that have a value; None if all have one. `data` is undefined in the other rows."""
    failed: Bools | None = None
    """Mask of the rows whose evaluation failed; None if none failed."""


FieldLookup: TypeAlias = Callable[[tuple[str, ...]], ColumnValues]


def evaluate(node: Node, rows: int, field: FieldLookup) -> ColumnValues:
    """Evaluate `node` over `rows` rows; `field` returns a field's values by path (:func:`column_values`)."""
    return _Evaluation(rows, field).of(node)


def column_values(column: pa.Array, kind: FieldType) -> ColumnValues:
    """Convert a field's Arrow column for evaluation."""
    valid = None if not column.null_count else column.is_valid().to_numpy(zero_copy_only=False)
    match kind.kind:
        case "bool":
            data: Any = (column.fill_null(False) if column.null_count else column).to_numpy(zero_copy_only=False)
        case "int8" | "int16" | "int32" | "int64" | "float32" | "float64" | "date" | "timestamp" | "timestamp_ntz":
            data = _numbers(column, kind.kind)
        case "decimal":
            data = decimals.from_arrow(column)
        case _:
            data = column
    return ColumnValues(data, valid)


def to_array(values: ColumnValues, kind: FieldType, rows: int) -> tuple[pa.Array, Bools | None]:
    """Convert values to a field's Arrow column, with failures null.

    Returns the column and where a row failed or does not fit the field's type.
    """
    valid, failed, data = values.valid, values.failed, values.data
    arrow = kind.arrow
    if kind.kind in ("int8", "int16", "int32"):
        bounds = np.iinfo(arrow.to_pandas_dtype())
        beyond = (data < bounds.min) | (data > bounds.max)
        failed = _either(failed, beyond if valid is None else beyond & valid)
        data = np.where(beyond, 0, data)
    if kind.kind == "float32":
        with np.errstate(over="ignore"):
            data = data.astype(np.float32)
    keep = _and_not(valid, failed)
    if kind.kind in ("string", "uuid", "json", "binary"):
        return (data if keep is None else pc.if_else(pa.array(keep), data, pa.scalar(None, data.type))), failed
    mask = None if keep is None else ~keep
    if kind.kind == "decimal":
        return decimals.to_arrow(data if keep is None else np.where(keep, data, 0), kind, mask), failed
    if kind.kind == "date":
        beyond = (data < -(1 << 31)) | (data >= 1 << 31)
        return pa.array(np.where(beyond, 0, data).astype(np.int32), pa.int32(), mask=mask).cast(arrow), failed
    if kind.kind in ("timestamp", "timestamp_ntz"):
        return pa.array(data, pa.int64(), mask=mask).cast(arrow), failed
    return pa.array(data.astype(arrow.to_pandas_dtype(), copy=False), arrow, mask=mask), failed


def values_equal(one: pa.Array, other: pa.Array) -> Bools:
    """Return where two columns of a field's type have equal values; null equals null, NaN equals NaN."""
    equal: Bools = pc.fill_null(pc.equal(one, other), False).to_numpy(zero_copy_only=False)
    if one.null_count and other.null_count:
        equal |= pc.and_(one.is_null(), other.is_null()).to_numpy(zero_copy_only=False)
    if pa.types.is_floating(one.type):
        equal |= pc.fill_null(pc.and_(pc.is_nan(one), pc.is_nan(other)), False).to_numpy(zero_copy_only=False)
    return equal


def _numbers(column: pa.Array, kind: str) -> Any:
    match kind:
        case "date":
            column = column.view(pa.int32())
        case "timestamp" | "timestamp_ntz":
            column = column.view(pa.int64())
    if column.null_count:
        column = column.fill_null(0)
    return column.to_numpy(zero_copy_only=False).astype(
        np.float64 if kind.startswith("float") else np.int64, copy=False
    )


def _either(one: Bools | None, other: Bools | None) -> Bools | None:
    if one is None or other is None:
        return one if other is None else other
    return one | other


def _both(one: Bools | None, other: Bools | None) -> Bools | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _and_not(valid: Bools | None, failed: Bools | None) -> Bools | None:
    return valid if failed is None else ~failed if valid is None else valid & ~failed


class _Evaluation:
    def __init__(self, rows: int, field: FieldLookup) -> None:
        self._rows = rows
        self._field = field

    def of(self, node: Node) -> ColumnValues:
        """Return the values of a node; failed rows are never valid."""
        found = self._evaluate(node)
        if found.failed is None or not found.failed.any():
            return found._replace(failed=None)
        return found._replace(valid=_and_not(found.valid, found.failed))

    def _evaluate(self, node: Node) -> ColumnValues:
        match node.op:
            case "field":
                return self._field(node.params)
            case "literal":
                return ColumnValues(self._constant(node.kind, literal_value(*node.params)))
            case "null":
                return ColumnValues(self._constant(node.kind, None), np.zeros(self._rows, dtype=bool))
            case "and" | "or":
                return self._joined(node)
            case "coalesce":
                return self._coalesced(node)
            case "case":
                return self._case(node)
        args = [self.of(each) for each in node.args]
        kinds = [each.kind for each in node.args]
        failed = args[0].failed
        for each in args[1:]:
            failed = _either(failed, each.failed)
        if node.op == "is_null":
            return ColumnValues(
                np.zeros(self._rows, dtype=bool) if args[0].valid is None else ~args[0].valid, None, failed
            )
        if node.op == "in":
            return self._is_in(args, kinds, failed)
        valid = args[0].valid
        for each in args[1:]:
            valid = _both(valid, each.valid)
        data, wrong = self._computed(node, [each.data for each in args], kinds)
        if wrong is not None and valid is not None:
            wrong = wrong & valid
        return ColumnValues(data, valid, _either(failed, wrong))

    # -- operands that are not evaluated do not fail --

    def _joined(self, node: Node) -> ColumnValues:
        """Evaluate AND or OR in three-valued logic, from left to right."""
        ends = node.op == "or"  # the value that decides
        decided = np.zeros(self._rows, dtype=bool)
        unknown = np.zeros(self._rows, dtype=bool)
        failed: Bools | None = None
        for each in node.args:
            part = self.of(each)
            open_still = ~decided if failed is None else ~(decided | failed)
            known = part.data == ends if part.valid is None else (part.data == ends) & part.valid
            if part.failed is not None:
                failed = _either(failed, part.failed & open_still)
                known = known & ~part.failed
            if part.valid is not None:
                unknown |= ~part.valid & open_still
            decided |= known & open_still
        return ColumnValues(decided == ends, decided | ~unknown, failed)

    def _coalesced(self, node: Node) -> ColumnValues:
        taken = np.zeros(self._rows, dtype=np.int64)
        left = np.ones(self._rows, dtype=bool)
        parts: list[ColumnValues] = []
        for place, each in enumerate(node.args):
            part = self.of(each)
            parts.append(part)
            taken[left] = place
            here = np.ones(self._rows, dtype=bool) if part.valid is None else part.valid
            left &= ~(here if part.failed is None else here | part.failed)
            if not left.any():
                break
        return self._chosen(taken, parts, [each.kind for each in node.args], node.kind)

    def _case(self, node: Node) -> ColumnValues:
        arms = len(node.args) // 2
        taken = np.full(self._rows, arms, dtype=np.int64)
        left = np.ones(self._rows, dtype=bool)
        failed: Bools | None = None
        for place, when in enumerate(node.args[:-1:2]):
            part = self.of(when)
            hit = part.data & left if part.valid is None else part.data & part.valid & left
            if part.failed is not None:
                failed = _either(failed, part.failed & left)
                left &= ~part.failed
                hit &= ~part.failed
            taken[hit] = place
            left &= ~hit
        thens = [*node.args[1::2], node.args[-1]]
        found = self._chosen(taken, [self.of(each) for each in thens], [each.kind for each in thens], node.kind)
        return found._replace(failed=_either(found.failed, failed))

    def _chosen(self, taken: Int64s, parts: list[ColumnValues], kinds: list[str], kind: str) -> ColumnValues:
        """Return, for each row, the value of the part with that index."""
        valid = np.ones(self._rows, dtype=bool)
        failed = np.zeros(self._rows, dtype=bool)
        for place, part in enumerate(parts):
            mine = taken == place
            if part.valid is not None:
                valid[mine] = part.valid[mine]
            if part.failed is not None:
                failed[mine] = part.failed[mine]
        data = [part.data for part in parts]
        if kind.startswith("decimal("):
            wide = parse_type(kind)
            data = [decimals.rescale(each, parse_type(have), wide)[0] for each, have in zip(data, kinds, strict=False)]
        if isinstance(data[0], np.ndarray):
            return ColumnValues(np.choose(taken, data) if len(data) <= 32 else self._picked(taken, data), valid, failed)
        return ColumnValues(pc.choose(pa.array(taken), *data), valid, failed)

    def _picked(self, taken: Int64s, data: list[Any]) -> Any:
        found = data[0].copy()
        for place, each in enumerate(data):
            found[taken == place] = each[taken == place]
        return found

    def _is_in(self, args: list[ColumnValues], kinds: list[str], failed: Bools | None) -> ColumnValues:
        hit = np.zeros(self._rows, dtype=bool)
        for each, kind in zip(args[1:], kinds[1:], strict=True):
            hit |= _compared("=", args[0].data, each.data, kinds[0], kind)
        return ColumnValues(hit, args[0].valid, failed)

    # -- operations on whole columns --

    def _constant(self, kind: str, value: Any) -> Any:
        plain = "decimal" if kind.startswith("decimal(") else kind
        if plain in ("bool", "int64", "float64", "date", "timestamp", "timestamp_ntz"):
            dtype = {"bool": np.bool_, "float64": np.float64}.get(plain, np.int64)
            return np.full(self._rows, 0 if value is None else value, dtype=dtype)
        if plain == "decimal":
            return decimals.constant(0 if value is None else _unscaled(value), self._rows)
        return pa.repeat(pa.scalar(value, parse_type(kind).arrow), self._rows)

    def _computed(self, node: Node, data: list[Any], kinds: list[str]) -> tuple[Any, Bools | None]:
        """Compute an operation for rows whose arguments all have values; also return where it fails."""
        first = data[0]
        match node.op:
            case "not":
                return ~first, None
            case _ if node.op in COMPARISONS:
                return _compared(node.op, first, data[1], *kinds), None
            case "starts_with":
                return _bools(pc.starts_with(first, node.args[1].params[1])), None
            case "ends_with":
                return _bools(pc.ends_with(first, node.args[1].params[1])), None
            case "contains":
                return _bools(pc.match_substring(first, node.args[1].params[1])), None
            case "+" | "-" | "*" | "/" | "div" | "%" | "neg" | "abs":
                return self._arithmetic(node, data, kinds)
            case "round":
                digits = parse_type(kinds[0]).scale - node.parsed_type.scale
                return decimals.lower_scale(first, digits, halves_up=True), None
            case "cast":
                return _cast(first, kinds[0], node.kind)
            case "||":
                return self._text_of(data)
            case "length":
                return _lengths(first, characters=kinds[0] == "string"), None
            case "substring":
                start, length = (int(each) for each in node.params)
                return pc.utf8_slice_codeunits(first, start - 1, start - 1 + length), None
            case "ascii_lower":
                return pc.ascii_lower(first), None
            case "ascii_upper":
                return pc.ascii_upper(first), None
        return _part_of_time(node.op, first if kinds[0] != "date" else first * _DAY), None

    def _arithmetic(self, node: Node, data: list[Any], kinds: list[str]) -> tuple[Any, Bools | None]:
        if kinds[0].startswith("decimal("):
            return _decimals(node, data, kinds), None
        if kinds[0] == "int64":
            return _integers(node.op, data)
        one, other = data[0], data[-1]
        with np.errstate(all="ignore"):
            match node.op:
                case "+":
                    return one + other, None
                case "-":
                    return one - other, None
                case "*":
                    return one * other, None
                case "neg":
                    return -one, None
                case "abs":
                    return np.abs(one), None
            zero = other == 0
            return one / np.where(zero, 1.0, other), zero

    def _text_of(self, data: list[Any]) -> tuple[Any, Bools | None]:
        sizes = np.sum([_lengths(each, characters=False) for each in data], axis=0)
        long: Bools = sizes > MAX_TEXT
        if long.any():
            keep = pa.array(~long)
            data = [pc.if_else(keep, each, pa.scalar(None, pa.utf8())) for each in data]
        return pc.binary_join_element_wise(*data, pa.scalar("", pa.utf8())), long


def _unscaled(value: Decimal) -> int:
    sign, digits, _ = value.as_tuple()
    found = int("".join(map(str, digits)))
    return -found if sign else found


def _bools(found: Any) -> Bools:
    return pc.fill_null(found, False).to_numpy(zero_copy_only=False)


def _lengths(texts: Any, *, characters: bool) -> Int64s:
    found = pc.utf8_length(texts) if characters else pc.binary_length(texts)
    return pc.fill_null(found, 0).to_numpy(zero_copy_only=False).astype(np.int64)


_NUMPY: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
_ARROW: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


def _compared(op: str, one: Any, other: Any, kind: str, other_kind: str) -> Bools:
    """Compare numbers numerically (NaN differs from everything), texts by bytes, false before true."""
    if not isinstance(one, np.ndarray):
        return _bools(_ARROW[op](one, other))
    if kind != other_kind:
        wide = common_decimal([kind, other_kind])
        assert wide is not None
        one, other = (
            decimals.rescale(each, parse_type(have), wide)[0] for each, have in ((one, kind), (other, other_kind))
        )
    found: Bools = _NUMPY[op](one, other).astype(bool, copy=False)
    return found


def _integers(op: str, data: list[Any]) -> tuple[Int64s, Bools | None]:
    one, other = data[0], data[-1]
    with np.errstate(all="ignore"):
        match op:
            case "+":
                found = one + other
                return found, ((one ^ found) & (other ^ found)) < 0
            case "-":
                found = one - other
                return found, ((one ^ other) & (one ^ found)) < 0
            case "*":
                return _product(one, other)
            case "neg":
                return -one, one == _LEAST
            case "abs":
                return np.abs(one), one == _LEAST
        zero = other == 0
        divisor = np.where(zero, 1, other)
        least = (one == _LEAST) & (divisor == -1)
        if op == "%":  # with the dividend's sign, as in SQL
            return np.where(divisor == -1, 0, np.fmod(one, np.where(divisor == -1, 1, divisor))), zero
        divisor = np.where(least, 1, divisor)
        quotient = one // divisor  # towards zero
        quotient += ((one % divisor) != 0) & ((one < 0) != (divisor < 0))
        return quotient, zero | least


def _product(one: Int64s, other: Int64s) -> tuple[Int64s, Bools | None]:
    found = one * other
    if not len(one):
        return found, None
    most = max(abs(int(one.min())), abs(int(one.max()))) * max(abs(int(other.min())), abs(int(other.max())))
    if most <= _MOST:
        return found, None
    safe = np.where((one == 0) | (one == -1), 1, one)
    wrong = (one != 0) & (one != -1) & (found // safe != other)
    wrong |= (one != 0) & (one != -1) & (found % safe != 0)
    return found, wrong | ((one == -1) & (other == _LEAST))


def _decimals(node: Node, data: list[Any], kinds: list[str]) -> Any:
    """Add, subtract or multiply decimals; the node's type has room for every result, so nothing overflows."""
    match node.op:
        case "neg":
            return -data[0]
        case "abs":
            return np.abs(data[0])
        case "*":
            return decimals.apply_operator("*", *data)
    scale = node.parsed_type.scale
    return decimals.apply_operator(
        node.op,
        *(decimals.raise_scale(each, scale - parse_type(have).scale) for each, have in zip(data, kinds, strict=True)),
    )


def _cast(data: Any, kind: str, target: str) -> tuple[Any, Bools | None]:
    plain = "decimal" if target.startswith("decimal(") else target
    match "decimal" if kind.startswith("decimal(") else kind, plain:
        case "int64", "float64":
            return data.astype(np.float64), None
        case "bool", "int64":
            return data.astype(np.int64), None
        case "int64", "string":
            return pa.array(data).cast(pa.utf8()), None
        case "int64", "decimal":
            return decimals.rescale(
                decimals.from_integers(data), FieldType("decimal", precision=19), parse_type(target)
            )
        case "decimal", "decimal":
            return decimals.rescale(data, parse_type(kind), parse_type(target))
        case "decimal", "int64":
            whole = decimals.lower_scale(data, parse_type(kind).scale)
            wrong = ((whole < _LEAST) | (whole > _MOST)).astype(bool)
            return np.where(wrong, 0, whole).astype(np.int64), wrong
        case "float64", "int64":
            cut = np.trunc(data)
            wrong = ~((cut >= -(2.0**63)) & (cut < 2.0**63))
            return np.where(wrong, 0.0, cut).astype(np.int64), wrong
        case "date", _:
            wrong = (data < -(_MOST // _DAY)) | (data > _MOST // _DAY)
            return np.where(wrong, 0, data) * _DAY, wrong
        case _, "date":
            return data // _DAY, None
    return data, None  # timestamps with and without a zone: the same instant, read as UTC


def _part_of_time(op: str, micros: Int64s) -> Int64s:
    """Extract a part of a UTC timestamp in the proleptic Gregorian calendar (days to civil: H. Hinnant)."""
    if op in ("hour", "minute", "second"):
        second = micros % _DAY // 1_000_000
        return {"hour": second // 3600, "minute": second // 60 % 60, "second": second % 60}[op]
    days = micros // _DAY + 719_468
    era = days // 146_097
    day_of_era = days - era * 146_097
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    month = np.where(shifted < 10, shifted + 3, shifted - 9)
    match op:
        case "day":
            return day_of_year - (153 * shifted + 2) // 5 + 1
        case "month":
            return month
    return year_of_era + era * 400 + (month <= 2)
