"""Rules of a schema, applied to rows before they become messages: defaults, computed values, checks.

A producer fills in missing values and refuses rows that the chain would reject, so that the rows of one call do not
harm others that share a message with them. The chain checks again, because it does not trust the sender.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CheckViolated, InvalidArgument
from millrace.message.expression.rule_evaluation import UpgradedRows, default_values, find_violations
from millrace.message.expression.tree import Node
from millrace.message.schema import CollectionSchema, FieldSpec


def now_micros() -> int:
    """Return the current time in microseconds, the value of ``now()`` in a default."""
    return time.time_ns() // 1_000


def with_defaults(table: pa.Table, schema: CollectionSchema) -> pa.Table:
    """Return `table` with a column for each missing field that has a default."""
    now = now_micros()
    for field in schema.fields:
        if field.default is not None and field.name not in table.column_names:
            table = table.append_column(field.name, default_values(field.default, now, field, len(table)))
    return table


def default_value(field: FieldSpec) -> Any:
    """Return a field's default as a Python object."""
    return default_values(field.default, now_micros(), field, 1)[0].as_py()


def compute_and_check(table: pa.Table, schema: CollectionSchema, given: set[str]) -> pa.Table:
    """Return `table` with computed fields filled in where they were not `given` or are null.

    `table` has the schema's columns.

    Raises CheckViolated, with the first row, if rows fail a check, contradict a computed value, or cannot be computed.
    Raises InvalidArgument if a computed value is null and must not be.
    """
    parts: list[pa.RecordBatch] = []
    start = 0
    for batch in table.to_batches():
        parts.append(_judged(batch, schema, given, start))
        start += batch.num_rows
    return pa.Table.from_batches(parts, table.schema)


def apply_rules_to_file(table: pa.Table, schema: CollectionSchema, absent: set[str]) -> tuple[pa.Table, dict[int, str]]:
    """Apply the rules to a file's rows, all of whose columns may be null.

    Returns the filled rows, and by row number why a row cannot be filled or violates a rule. A default fills a column
    that the file lacks (`absent`), and each null in a column that is not nullable.
    """
    now = now_micros()
    for place, field in enumerate(schema.fields):
        values = table[field.name]
        if field.default is not None and values.null_count and (field.name in absent or not field.nullable):
            filled = pc.coalesce(values, default_values(field.default, now, field, 1)[0])
            table = table.set_column(place, field.name, filled)
    if not schema.has_row_rules:
        return table, {}
    parts: list[pa.RecordBatch] = []
    wrong: dict[int, str] = {}
    start = 0
    for batch in table.to_batches():
        filled_batch, bad = fill_computed(batch, schema, set(table.column_names))
        bad |= {place: words for place, words in violations(filled_batch, schema).items() if place not in bad}
        wrong |= {start + place: words for place, words in bad.items()}
        parts.append(filled_batch)
        start += batch.num_rows
    return pa.Table.from_batches(parts, table.schema), wrong


def violations(batch: pa.RecordBatch, schema: CollectionSchema) -> dict[int, str]:
    """Return by row number the first rule that a row violates."""
    found: dict[int, str] = {}
    for rule in find_violations(batch, schema, schema, now_micros()):
        for place in rule.rows.nonzero()[0].tolist():
            found.setdefault(place, rule.description)
    return found


def fill_computed(
    batch: pa.RecordBatch, schema: CollectionSchema, given: set[str]
) -> tuple[pa.RecordBatch, dict[int, str]]:
    """Fill in a batch's computed fields.

    Returns the batch, and by row number why a value cannot be computed, or is null and must not be.
    """
    brought = UpgradedRows(batch, schema, schema, 0)
    columns, wrong = dict(zip(batch.schema.names, batch.columns, strict=True)), dict[int, str]()
    for field in schema.fields:
        if isinstance(field.computed, Node) and (field.name not in given or columns[field.name].null_count):
            made, failed = brought.fill_value(field)
            columns[field.name] = pc.coalesce(columns[field.name], made) if field.name in given else made
            for place in [] if failed is None else failed.nonzero()[0].tolist():
                wrong.setdefault(place, f"field {field.name!r} cannot be computed")
            if not field.nullable and columns[field.name].null_count:
                for place in columns[field.name].is_null().to_numpy(zero_copy_only=False).nonzero()[0].tolist():
                    wrong.setdefault(place, f"field {field.name!r} computes to null, and it is not nullable")
    return pa.RecordBatch.from_arrays([columns[name] for name in batch.schema.names], schema=batch.schema), wrong


def _judged(batch: pa.RecordBatch, schema: CollectionSchema, given: set[str], start: int) -> pa.RecordBatch:
    filled, wrong = fill_computed(batch, schema, given)
    if not wrong:
        wrong = violations(filled, schema)
    if wrong:
        place = min(wrong)
        more = f", and {len(wrong) - 1} more bad rows" if len(wrong) > 1 else ""
        words = f"row {start + place}: {wrong[place]}{more}; none was sent"
        raise InvalidArgument(words) if "not nullable" in wrong[place] else CheckViolated(words)
    return filled
