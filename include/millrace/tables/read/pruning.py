"""Which files of a table may hold rows that a predicate hits, by the bounds in the table's log.

Bounds of numbers, strings and dates are taken; a bound may be wider than the file's values (a string cut off), never narrower.
Where a file has none it may hold anything. What is no comparison of a column with a literal rules nothing out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.predicate.language import Column, Compare, Condition, In, Literal

_TURNED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "="}


def may_hold(actions: pa.Table, schema: pa.Schema, conjuncts: Iterable[Condition]) -> pa.Array:
    """Of each file in `actions` (millrace.storage.table.Table.actions) whether it may hold a row for which all `conjuncts` hold."""
    kept = pa.repeat(True, actions.num_rows)
    for found in conjuncts:
        match found:
            case Compare(op, Column((name,)), Literal(value)) if op in _TURNED:
                kept = pc.and_(kept, _within(actions, schema, name, op, [value]))
            case Compare(op, Literal(value), Column((name,))) if op in _TURNED:
                kept = pc.and_(kept, _within(actions, schema, name, _TURNED[op], [value]))
            case In(Column((name,)), values):
                kept = pc.and_(kept, _within(actions, schema, name, "=", [each.value for each in values]))
    return kept


def _within(actions: pa.Table, schema: pa.Schema, name: str, op: str, values: list[Any]) -> Any:
    """Whether a file's bounds of a column leave room for `op` any of `values`."""
    low, high = f"min.{name}", f"max.{name}"
    kind = schema.field(name).type if name in schema.names else None
    if kind is None or not {low, high} <= set(actions.column_names):
        return True
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date32(kind)):
        return True  # bounds of timestamps are cut to milliseconds, those of floats leave NaN out
    found: Any = False
    for value in values:
        try:
            bound = pa.scalar(value).cast(kind) if isinstance(value, str) else pa.scalar(value, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return True  # id > 1.5
        least, greatest = actions[low].cast(kind), actions[high].cast(kind)
        strict = op in ("<", ">")
        above = pc.less(least, bound) if strict else pc.less_equal(least, bound)
        below = pc.greater(greatest, bound) if strict else pc.greater_equal(greatest, bound)
        room = pc.and_(above, below) if op == "=" else above if op.startswith("<") else below
        found = room if found is False else pc.or_(found, room)
    return pc.fill_null(found, True) if found is not False else False
