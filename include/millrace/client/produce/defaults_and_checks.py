"""Rows on their way into messages, by the rules of their schema: defaults, computed values, checks.

A producer fills what its rows do not say and refuses what the chain would reject, so that the rows of one call harm no others
that share a message with them. The chain judges again: it does not know who has sent a message.
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
    """This moment, as ``now()`` of a default is stamped."""
    return time.time_ns() // 1_000


def with_defaults(table: pa.Table, schema: CollectionSchema) -> pa.Table:
    """`table` with a column for each field that has a default and is not among them."""
    now = now_micros()
    for field in schema.fields:
        if field.default is not None and field.name not in table.column_names:
            table = table.append_column(field.name, default_values(field.default, now, field, len(table)))
    return table


def default_value(field: FieldSpec) -> Any:
    """A field's default as an object of Python."""
    return default_values(field.default, now_micros(), field, 1)[0].as_py()


def compute_and_check(table: pa.Table, schema: CollectionSchema, given: set[str]) -> pa.Table:
    """`table`, whose columns are the schema's, with computed fields where they are not among those that were `given`, or null.

    Raises CheckViolated, with the first row, for rows that make a check false, say another value than a computed one, or of which
    one cannot be computed; InvalidArgument for a computed null where none may be.
    """
    parts: list[pa.RecordBatch] = []
    start = 0
    for batch in table.to_batches():
        parts.append(_judged(batch, schema, given, start))
        start += batch.num_rows
    return pa.Table.from_batches(parts, table.schema)


def apply_rules_to_file(table: pa.Table, schema: CollectionSchema, absent: set[str]) -> tuple[pa.Table, dict[int, str]]:
    """A file's rows, whose columns may all be null, by the rules: filled, and by place why one cannot be, or breaks them.

    A default fills a column that the file does not have (`absent`), and each empty place of one that may not be null.
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
    """By place the rows of a batch that the schema's rules refuse, with the first rule that does."""
    found: dict[int, str] = {}
    for rule in find_violations(batch, schema, schema, now_micros()):
        for place in rule.rows.nonzero()[0].tolist():
            found.setdefault(place, rule.description)
    return found


def fill_computed(
    batch: pa.RecordBatch, schema: CollectionSchema, given: set[str]
) -> tuple[pa.RecordBatch, dict[int, str]]:
    """A batch with its computed fields filled, and by place the rows of which one cannot be computed, or is null and must not."""
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
                    wrong.setdefault(place, f"field {field.name!r} is computed to be null, and it is not nullable")
    return pa.RecordBatch.from_arrays([columns[name] for name in batch.schema.names], schema=batch.schema), wrong


def _judged(batch: pa.RecordBatch, schema: CollectionSchema, given: set[str], start: int) -> pa.RecordBatch:
    filled, wrong = fill_computed(batch, schema, given)
    if not wrong:
        wrong = violations(filled, schema)
    if wrong:
        place = min(wrong)
        more = f", and {len(wrong) - 1} more with faults" if len(wrong) > 1 else ""
        words = f"row {start + place}: {wrong[place]}{more}; none was sent"
        raise InvalidArgument(words) if "not nullable" in wrong[place] else CheckViolated(words)
    return filled
