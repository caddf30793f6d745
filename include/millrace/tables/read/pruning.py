"""Pruning: the files of a table that may match a predicate, by the bounds in its log, and the row groups, by file
footers.

Bounds of integers, strings, dates and timestamps with a zone are used. A bound may be wider than the file's values (a
truncated string) but never narrower; only timestamps may be, since other writers truncate them to milliseconds. A file
without bounds may hold anything. Conditions other than comparisons of a column with a literal exclude nothing.

A widened field has several columns, each with some of its values. Arrow checks the bounds of one column at a time and
knows nothing of a column that a file lacks. Here a row group may match if one of its columns may match; a column that
is missing or null throughout matches nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.base.errors import InvalidArgument
from millrace.base.predicate.arrow import literal_scalar
from millrace.base.predicate.language import ColumnRef, Compare, Condition, In, Literal
from millrace.message.schema import CollectionSchema

MOST_KEYS: Final = 10_000
"""Combinations of a key's values that are looked up. With more, files are read."""

_MOMENT: Final = pa.timestamp("us", tz="UTC")
_MILLISECOND: Final = pa.scalar(timedelta(milliseconds=1), pa.duration("us"))
_TURNED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "="}


def may_match(actions: pa.Table, schema: pa.Schema, conjuncts: Iterable[Condition]) -> pa.Array:
    """Return for each file in `actions` (TableHandle.actions) whether a row of it may satisfy all `conjuncts`."""
    mask = pa.repeat(True, actions.num_rows)
    for found in conjuncts:
        match found:
            case Compare(op, ColumnRef((name,)), Literal(value)) if op in _TURNED:
                mask = pc.and_(mask, _within(actions, schema, name, op, [value]))
            case Compare(op, Literal(value), ColumnRef((name,))) if op in _TURNED:
                mask = pc.and_(mask, _within(actions, schema, name, _TURNED[op], [value]))
            case In(ColumnRef((name,)), values):
                mask = pc.and_(mask, _within(actions, schema, name, "=", [each.value for each in values]))
    return mask


def has_bounds(schema: pa.Schema, name: str) -> bool:
    """Return whether bounds of a column are used: of integers, strings, dates and timestamps with a zone."""
    if name not in schema.names:
        return False
    kind = schema.field(name).type
    return bool(
        kind == _MOMENT or pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date32(kind)
    )  # bounds of floats ignore NaN


def _within(actions: pa.Table, schema: pa.Schema, name: str, op: str, values: list[Any]) -> Any:
    """Return whether a file's bounds of a column allow `op` with any of `values`."""
    low, high = f"min.{name}", f"max.{name}"
    if not has_bounds(schema, name) or not {low, high} <= set(actions.column_names):
        return True
    kind = schema.field(name).type
    moment = kind == _MOMENT
    found: Any = False
    for value in values:
        try:
            bound = pa.scalar(value).cast(kind) if isinstance(value, str) else pa.scalar(value, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return True  # id > 1.5
        least, greatest = actions[low].cast(kind), actions[high].cast(kind)
        if moment:
            greatest = pc.add(greatest, _MILLISECOND)
        strict = op in ("<", ">")
        above = pc.less(least, bound) if strict else pc.less_equal(least, bound)
        below = pc.greater(greatest, bound) if strict else pc.greater_equal(greatest, bound)
        room = pc.and_(above, below) if op == "=" else above if op.startswith("<") else below
        found = room if found is False else pc.or_(found, room)
    return pc.fill_null(found, True) if found is not False else False


def wanted_keys(conjuncts: Iterable[Condition], keys: pa.Schema) -> pa.Table | None:
    """Return the only keys that rows which satisfy all `conjuncts` may have; None if these say no such keys.

    `keys` has the columns of the key. Keys of integers, strings and dates are found, each column compared with ``=`` or
    ``IN``. Of a key of several columns, all combinations are wanted, up to MOST_KEYS.
    """
    found: dict[str, pa.Array] = {}
    for each in conjuncts:
        match each:
            case Compare("=", ColumnRef((name,)), Literal() as literal):
                literals: tuple[Literal, ...] = (literal,)
            case Compare("=", Literal() as literal, ColumnRef((name,))):
                literals = (literal,)
            case In(ColumnRef((name,)), values):
                literals = tuple(values)
            case _:
                continue
        if name in keys.names and name not in found:
            exact = _exact_values(literals, keys.field(name).type)
            found |= {} if exact is None else {name: exact}
    sizes = [len(found.get(name, ())) for name in keys.names]
    if len(found) < len(keys) or (len(keys) > 1 and math.prod(sizes) > MOST_KEYS):
        return None
    places = np.unravel_index(np.arange(math.prod(sizes)), sizes)
    return pa.table([found[name].take(pa.array(at)) for name, at in zip(keys.names, places, strict=True)], keys)


def _exact_values(literals: Iterable[Literal], kind: pa.DataType) -> pa.Array | None:
    """Return the only values of a key's column that equal one of `literals`; None if that is not certain."""
    types = (
        (int,)
        if pa.types.is_integer(kind)
        else (str,)
        if pa.types.is_string(kind)
        else (str, date)
        if pa.types.is_date32(kind)
        else ()
    )
    if any(type(each.value) not in types for each in literals):
        return None
    try:
        return pa.array([literal_scalar(each, kind).as_py() for each in literals], kind)
    except (InvalidArgument, pa.ArrowException, OverflowError, ValueError):
        return None  # the key's type does not have it


_HOLDS: Final[dict[str, Callable[[Any, Any, Any], bool]]] = {
    "<": lambda low, _, value: operator.lt(low, value),
    "<=": lambda low, _, value: operator.le(low, value),
    "=": lambda low, high, value: low <= value <= high,
    ">=": lambda _, high, value: operator.ge(high, value),
    ">": lambda _, high, value: operator.gt(high, value),
}
"""Whether values between two bounds may include one that satisfies the comparison."""

_LITERALS: Final[dict[str, tuple[type, ...]]] = {
    "int16": (int,),
    "int32": (int,),
    "int64": (int,),  # with a fraction, Arrow compares as floats and rounds
    "decimal": (int, Decimal),
    "float64": (int, Decimal),
}


@dataclass(frozen=True, slots=True)
class WidenedComparison:
    """A comparison of a field that has several columns with literals, one of which must match."""

    columns: tuple[str, ...]
    op: str
    values: tuple[Any, ...]

    @classmethod
    def of(cls, found: Condition, schema: CollectionSchema) -> Self | None:
        """Return the comparison; None if it is another condition, or bounds say nothing about it."""
        match found:
            case Compare(op, ColumnRef((name,)), Literal(value)) if op in _TURNED:
                values: tuple[Any, ...] = (value,)
            case Compare(turned, Literal(value), ColumnRef((name,))) if turned in _TURNED:
                op, values = _TURNED[turned], (value,)
            case In(ColumnRef((name,)), literals):
                op, values = "=", tuple(each.value for each in literals)
            case _:
                return None
        field = next((each for each in schema.fields if each.name == name and len(each.stored_columns) > 1), None)
        kinds = () if field is None else _LITERALS.get(field.parsed_type.kind, ())
        if field is None or any(isinstance(value, bool) or not isinstance(value, kinds) for value in values):
            return None
        if field.parsed_type.kind == "float64":
            values = tuple(map(float, values))
        return cls(tuple(column.name for column in field.stored_columns), op, values)

    def groups(self, footer: pq.FileMetaData) -> set[int]:
        """Return the row groups of a file that may hold a matching row."""
        there = {footer.schema.column(place).path: place for place in range(footer.num_columns)}
        places = [there[name] for name in self.columns if name in there]
        return {
            number
            for number in range(footer.num_row_groups)
            if any(self._may(footer.row_group(number).column(place)) for place in places)
        }

    def _may(self, column: pq.ColumnChunkMetaData) -> bool:
        found = column.statistics
        if found is None:
            return True
        if found.has_null_count and found.null_count == column.num_values:
            return False
        if not found.has_min_max:
            return True
        return any(_HOLDS[self.op](found.min, found.max, value) for value in self.values)


def row_group_filter(wanted: Iterable[WidenedComparison]) -> Callable[[pq.FileMetaData], list[int]]:
    """Return a function from a file's footer to the row groups that may satisfy all of `wanted`."""
    found = tuple(wanted)
    return lambda footer: sorted(set.intersection(*(each.groups(footer) for each in found)))
