"""Predicates as Spark columns: they match the same rows as :mod:`millrace.base.predicate.arrow`, and Spark can push
them down.

Where Spark differs, the result follows Arrow: NaN equals nothing, and is neither less nor greater than anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from millrace.base.predicate.arrow import column_type, literal_scalar
from millrace.base.predicate.language import And, ColumnRef, Compare, Condition, In, IsNull, Like, Literal, Not, Or

_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def spark_predicate(found: Condition, schema: pa.Schema) -> SparkColumn:
    """Convert `found` for a frame with the columns of `schema`. Check it before
    (millrace.base.predicate.arrow.expression).
    """
    match found:
        case And(parts):
            return reduce(operator.and_, (spark_predicate(each, schema) for each in parts))
        case Or(parts):
            return reduce(operator.or_, (spark_predicate(each, schema) for each in parts))
        case Not(part):
            return ~spark_predicate(part, schema)
        case IsNull(subject):
            return _value(subject, schema, None).isNull()
        case Like(subject, pattern):
            return _value(subject, schema, None).like(pattern)
        case In(subject, values):
            kind = _kind(subject, schema)
            return _value(subject, schema, kind).isin([_value(each, schema, kind) for each in values])
        case Compare(op, left, right):
            return _compared(op, left, right, schema)
    return _value(found, schema, None)  # a boolean column or literal


def _compared(op: str, left: ColumnRef | Literal, right: ColumnRef | Literal, schema: pa.Schema) -> SparkColumn:
    kind = _kind(left, schema) or _kind(right, schema)
    sides = [_value(each, schema, kind) for each in (left, right)]
    found: SparkColumn = _COMPARE[op](*sides)
    floats = [
        value
        for each, value in zip((left, right), sides, strict=True)
        if (its := _kind(each, schema)) is not None and pa.types.is_floating(its)
    ]
    if not floats:
        return found
    strange = reduce(operator.or_, map(F.isnan, floats))
    known = reduce(operator.and_, (each.isNotNull() for each in sides))
    # Null stays unknown. The comparison comes first, so that Spark can push it down.
    return (found | (strange & known)) if op == "!=" else (found & (~strange | ~known))


def _kind(operand: ColumnRef | Literal, schema: pa.Schema) -> pa.DataType | None:
    return column_type(operand, schema) if isinstance(operand, ColumnRef) else None


def _value(operand: ColumnRef | Literal | Condition, schema: pa.Schema, kind: pa.DataType | None) -> SparkColumn:
    if isinstance(operand, ColumnRef):
        return reduce(SparkColumn.getField, operand.path[1:], F.col(quote_name(operand.path[0])))
    assert isinstance(operand, Literal)
    scalar = literal_scalar(operand, kind)
    if pa.types.is_timestamp(scalar.type):
        micros = F.timestamp_micros(F.lit(scalar.cast(pa.timestamp("us", scalar.type.tz)).value))
        if scalar.type.tz is not None:
            return micros
        return F.lit(scalar.as_py().isoformat(" ")).cast("timestamp_ntz")
    if pa.types.is_decimal(scalar.type):
        return F.lit(scalar.as_py())
    return F.lit(scalar.as_py()).cast(from_arrow_schema(pa.schema([pa.field("_", scalar.type)])).fields[0].dataType)


def quote_name(name: str) -> str:
    """Quote a column name for Spark."""
    return "`" + name.replace("`", "``") + "`"
