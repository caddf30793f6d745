"""Read rows of one schema version as a later one, and check them against its rules.

A field of the later version corresponds to the earlier field with the same columns, in a type at least as wide. A field
that the earlier version lacks has its computed value, else its default (``now()`` is the log's time there, because no
producer stamped it), else null. The chain checks messages this way, and visible rows are filled this way: one
implementation for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.message.expression.kernels import Bools, ColumnValues, column_values, evaluate, to_array, values_equal
from millrace.message.expression.tree import Node, field_names
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.stored_columns import to_field_type

SLICE_ROWS: Final = 16_384
"""Rows evaluated together, which bounds the memory of intermediate values."""
_JOINED_ROWS: Final = 1_024
"""The same for rules that concatenate texts, of up to 16 KiB each."""

Micros = npt.NDArray[np.int64]


class Violation(NamedTuple):
    """Rows that violate a rule."""

    description: str
    rows: Bools


def missing_fields(written: CollectionSchema, newest: CollectionSchema) -> list[FieldSpec]:
    """Return the fields of the later version that the earlier lacks but that have a value in its rows."""
    if written == newest or not newest.has_fill_values:
        return []
    there = {field.stored_columns[-1].name for field in written.fields}
    return [
        field
        for field in newest.fields
        if (field.default is not None or field.computed is not None)
        and not there & {name for name, _ in field.stored_columns}
    ]


def rule_inputs(written: CollectionSchema, newest: CollectionSchema) -> list[str]:
    """Return the fields of the earlier version that :func:`find_violations` needs."""
    names = set().union(
        *(field_names(each) for each in _trees(newest)), {f.name for f in newest.fields if f.computed is not None}
    )
    columns = {name for field in newest.fields if field.name in names for name, _ in field.stored_columns}
    return [field.name for field in written.fields if field.stored_columns[-1].name in columns]


def find_violations(
    rows: pa.RecordBatch, written: CollectionSchema, newest: CollectionSchema, now: Micros | int
) -> Iterator[Violation]:
    """Yield the rules of `newest` that rows of the same or an earlier version violate: checks, then computed fields, in
    order.

    `rows` has the fields of :func:`rule_inputs`, or more. `now` is the log's time in microseconds, for each row or for
    all.
    """
    rules: list[tuple[str, FieldSpec | Node]] = [
        (f"check {each.name!r} does not hold", each.condition)  # type: ignore[misc]
        for each in newest.checks
    ]
    rules += [
        (f"field {f.name!r} is not what it is computed to be", f) for f in newest.fields if f.computed is not None
    ]
    found = [np.zeros(rows.num_rows, dtype=bool) for _ in rules]
    for start, part in _slices(rows, newest):
        brought = UpgradedRows(
            part, written, newest, now if isinstance(now, int) else now[start : start + part.num_rows]
        )
        for (_, rule), bad in zip(rules, found, strict=True):
            bad[start : start + part.num_rows] = brought.violations(rule)
    for (words, _), bad in zip(rules, found, strict=True):
        if bad.any():
            yield Violation(words, bad)


def fill_values(
    rows: pa.RecordBatch,
    written: CollectionSchema,
    newest: CollectionSchema,
    now: Micros | int,
    fields: list[FieldSpec],
) -> list[pa.Array]:
    """Return columns of `fields` of the later version, which the earlier lacks; a value that cannot be computed is
    null.
    """
    parts: list[list[pa.Array]] = [[] for _ in fields]
    for start, part in _slices(rows, newest):
        brought = UpgradedRows(
            part, written, newest, now if isinstance(now, int) else now[start : start + part.num_rows]
        )
        for field, into in zip(fields, parts, strict=True):
            into.append(brought.fill_value(field)[0])
    return [
        pa.concat_arrays(into) if into else pa.array([], field.parsed_type.arrow)
        for field, into in zip(fields, parts, strict=True)
    ]


def default_values(default: Node, now: Micros | int, field: FieldSpec, rows: int) -> pa.Array:
    """Return a default for `rows` rows."""
    array, _ = to_array(_constant(default, now, rows), field.parsed_type, rows)
    return array


class UpgradedRows:
    """Rows of the earlier version, read as the later one."""

    def __init__(
        self, rows: pa.RecordBatch, written: CollectionSchema, newest: CollectionSchema, now: Micros | int
    ) -> None:
        self._rows = rows
        self._now = now
        self._fields = {field.name: field for field in newest.fields}
        names = set(rows.schema.names)
        self._places = {field.stored_columns[-1].name: field.name for field in written.fields if field.name in names}
        self._known: dict[tuple[str, ...], ColumnValues] = {}

    def violations(self, rule: FieldSpec | Node) -> Bools:
        """Return where a check fails or is false, or where a field differs from its computed value."""
        count = self._rows.num_rows
        if isinstance(rule, Node):
            found = evaluate(rule, count, self.values)
            bad = ~found.data if found.valid is None else ~found.data & found.valid
            return bad if found.failed is None else bad | found.failed
        said = self._stored_values(rule)
        made, failed = self.fill_value(rule)
        other = np.zeros(count, dtype=bool) if said is None else ~values_equal(said, made)
        return other if failed is None else other | failed

    def fill_value(self, field: FieldSpec) -> tuple[pa.Array, Bools | None]:
        """Return the value of a field that the rows lack, and where it cannot be computed."""
        count = self._rows.num_rows
        if isinstance(field.computed, Node):
            return to_array(evaluate(field.computed, count, self.values), field.parsed_type, count)
        if isinstance(field.default, Node):
            return to_array(_constant(field.default, self._now, count), field.parsed_type, count)
        return pa.nulls(count, field.parsed_type.arrow), None

    def values(self, path: tuple[str, ...]) -> ColumnValues:
        """Return the values of a field, or of a field inside it."""
        found = self._known.get(path)
        if found is None:
            field = self._fields[path[0]]
            said = self._stored_values(field)
            column, kind = self.fill_value(field)[0] if said is None else said, field.parsed_type
            for name in path[1:]:
                column, kind = pc.struct_field(column, name), kind.children[kind.names.index(name)]
            found = self._known[path] = column_values(column, kind)
        return found

    def _stored_values(self, field: FieldSpec) -> Any:
        """Return a field's column in the rows; None if they lack it."""
        column = next((each for each in field.stored_columns if each.name in self._places), None)
        return None if column is None else to_field_type(self._rows.column(self._places[column.name]), column, field)


def _constant(default: Node, now: Micros | int, rows: int) -> ColumnValues:
    if default.op == "literal":
        return evaluate(default, rows, _nothing)
    moments = ColumnValues(np.full(rows, now, dtype=np.int64) if isinstance(now, int) else now)
    return (
        moments
        if default.op == "now"
        else evaluate(Node("cast", (_NOW,), default.params, default.kind), rows, lambda _: moments)
    )


_NOW: Final = Node("field", (), ("now",), "timestamp")


def _nothing(path: tuple[str, ...]) -> ColumnValues:
    raise KeyError(path)


def _trees(schema: CollectionSchema) -> list[Node]:
    found = [*(each.condition for each in schema.checks), *(field.computed for field in schema.fields)]
    return [each for each in found if isinstance(each, Node)]


def _slices(rows: pa.RecordBatch, schema: CollectionSchema) -> Iterator[tuple[int, pa.RecordBatch]]:
    step = _JOINED_ROWS if any(map(_joins, _trees(schema))) else SLICE_ROWS
    for start in range(0, rows.num_rows, step):
        yield start, rows.slice(start, step)


def _joins(node: Node) -> bool:
    return node.op == "||" or any(map(_joins, node.args))
