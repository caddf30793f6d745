"""The input rows of a pattern, sorted by partition and order, with their row expressions as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.board import Board, Flags, Places, whole_numbers
from millrace.streams.patterns.expressions import Classifier, Column, Expression, Reach, classifies
from millrace.streams.patterns.operations import Failed, constant, over_columns
from millrace.streams.patterns.query import MatchRecognize, Order


@dataclass
class SortedRows:
    """`table` in order, one chunk per column, and its shape, `board`. In `values`, zoned times are in UTC."""

    table: pa.Table
    board: Board
    _values: dict[Expression, Any] = field(default_factory=dict)
    _lists: dict[Expression, list[Any]] = field(default_factory=dict)

    def value(self, expression: Expression) -> Any:
        """Return a row expression without a classifier, evaluated for all rows. Raises InvalidArgument."""
        if expression not in self._values:
            found = over_columns(expression, self._column)
            self._values[expression] = _spread(found, self.board.rows)
        return self._values[expression]

    def plain(self, expression: Expression) -> Callable[[int, str | None], Any]:
        """Return a function of row and variable to the Python value of a row expression."""
        if isinstance(expression, Classifier):
            return lambda row, label: label
        if classifies(expression):
            each: dict[str | None, list[Any]] = {}

            def value(row: int, label: str | None) -> Any:
                if label not in each:
                    each[label] = self.labelled(expression, constant(label)).to_pylist()
                return each[label][row]

            return value
        if expression not in self._lists:
            try:
                self._lists[expression] = self.value(expression).to_pylist()
            except Failed:  # in some row, which may not be needed
                return lambda row, label: self._evaluated(expression, pa.array([row]), label)[0].as_py()
        found = self._lists[expression]
        return lambda row, label: found[row]

    def kind(self, expression: Expression) -> pa.DataType:
        """Return the type of a row expression's values."""
        return self._evaluated(expression, pa.array([], pa.int64()), constant("")).type

    def _evaluated(self, expression: Expression, rows: Any, labels: Any) -> Any:
        """Evaluate a row expression at `rows` only, matched as `labels`."""
        found = over_columns(
            expression, lambda leaf: labels if isinstance(leaf, Classifier) else self._column(leaf).take(rows)
        )
        return _spread(found, len(rows))

    def labelled(self, expression: Expression, label: Any) -> Any:
        """Evaluate a row expression for all rows, each matched as `label` (a scalar)."""
        return _spread(
            over_columns(expression, lambda leaf: label if isinstance(leaf, Classifier) else self._column(leaf)),
            self.board.rows,
        )

    def gathered(self, expression: Expression, rows: Any, labels: Any) -> Any:
        """Return a row expression's values at `rows`, matched as `labels`; null at a null row."""
        if not classifies(expression):
            try:
                return self.value(expression).take(rows)
            except Failed:  # in some row, which may not be among these
                pass
        found = self._evaluated(expression, rows, labels)
        return pc.if_else(pc.is_valid(rows), found, pa.scalar(None, found.type))

    def local(self, condition: Expression, variable: str) -> Flags:
        """Return the mask of a condition on the current row and physical offsets. Raises InvalidArgument."""
        board = self.board

        def leaf(reach: Expression) -> Any:
            assert isinstance(reach, Reach)
            if classifies(reach.row):
                return self.labelled(reach.row, constant(variable))
            found = self.value(reach.row)
            if reach.shift:
                rows = np.arange(board.rows) + reach.shift
                inside = (rows >= 0) & (rows < board.rows)
                rows = np.where(inside, rows, 0)
                inside &= board.partition_of_row[rows] == board.partition_of_row
                found = found.take(pa.array(rows, mask=~inside))
            return found

        found = _spread(over_columns(condition, leaf), board.rows)
        if pa.types.is_null(found.type):
            return np.zeros(board.rows, dtype=np.bool_)
        if not pa.types.is_boolean(found.type):
            raise InvalidArgument(f"DEFINE {variable}: the condition is of type {found.type}, not boolean")
        flags: Flags = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
        return flags

    def _column(self, leaf: Expression) -> Any:
        assert isinstance(leaf, Column)
        return naive(one_chunk(self.table.column(column_of(self.table.schema, leaf.name))))


def column_of(schema: pa.Schema, name: str) -> str:
    """Return the column of that name, or the only one that differs just in case. Raises InvalidArgument."""
    if name in schema.names:
        return name
    alike = [each for each in schema.names if each.lower() == name.lower()]
    if len(alike) != 1:
        raise InvalidArgument(f"there is no column {name}; there are {', '.join(schema.names)}")
    return alike[0]


def one_chunk(column: Any) -> Any:
    found = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(found, pa.ChunkedArray):
        found = found.chunk(0) if found.num_chunks == 1 else pa.concat_arrays(found.chunks)
    return found.dictionary_decode() if pa.types.is_dictionary(found.type) else found


def naive(column: Any) -> Any:
    """Return times as microseconds in UTC, without a zone."""
    return column.cast(pa.timestamp("us"), safe=False) if pa.types.is_timestamp(column.type) else column


def _spread(found: Any, rows: int) -> Any:
    return pa.repeat(found, rows) if isinstance(found, pa.Scalar) else one_chunk(found)


def sort(table: pa.Table, query: MatchRecognize, *, open_: bool = False, ties: bool = False) -> SortedRows:
    """Sort rows into partitions, in the query's order.

    Equal rows stay in the table's order; with `ties` the other columns decide, so that the order of arrival does not
    matter. Raises InvalidArgument.
    """
    codes = key_codes(table, query.partition)
    chosen = order_rows(table, codes, query.order, ties=ties)
    inside = codes[chosen]
    starts = np.flatnonzero(np.append(True, inside[1:] != inside[:-1])) if len(inside) else np.zeros(0, dtype=np.int64)
    if len(chosen) and not np.array_equal(chosen, np.arange(len(chosen))):
        table = table.take(pa.array(chosen))
    times = None
    if query.within is not None:
        times = within_times(table, query)
    board = Board(len(inside), starts, np.full(len(starts), open_), times)
    return SortedRows(table, board)


def within_times(table: pa.Table, query: MatchRecognize) -> Places:
    """Return the values of the column that WITHIN compares. Raises InvalidArgument."""
    name = column_of(table.schema, query.order[0].column)
    column = one_chunk(table.column(name))
    timed = isinstance(query.within, timedelta)
    fits = (
        pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
        if timed
        else pa.types.is_integer(column.type)
    )
    if not fits:
        raise InvalidArgument(f"WITHIN {query.within} does not fit ORDER BY {name} of type {column.type}")
    if column.null_count:
        raise InvalidArgument(f"WITHIN compares {name}, which is null in {column.null_count} rows")
    return whole_numbers(column)


def within_units(query: MatchRecognize) -> int:
    """Return WITHIN in the units of :func:`within_times`."""
    assert query.within is not None
    return query.within // timedelta(microseconds=1) if isinstance(query.within, timedelta) else query.within


def one_value_each(column: Any) -> Any:
    """Return a key's values in canonical form: 0.0 for -0.0, and the same NaN for every NaN."""
    if not pa.types.is_floating(column.type):
        return column
    found = pc.add(column, pa.scalar(0.0, column.type))
    return pc.if_else(pc.is_nan(found), pa.scalar(float("nan"), column.type), found)


def key_codes(table: pa.Table, names: Sequence[str]) -> Places:
    """Return a number for each row, equal for equal keys, by first appearance.

    Nulls are equal, NaNs too, and -0.0 equals 0.0.
    """
    codes = np.zeros(table.num_rows, dtype=np.int64)
    for name in names:
        column = one_value_each(one_chunk(table.column(column_of(table.schema, name))))
        encoded = column.dictionary_encode(null_encoding="encode")
        mine = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        codes = codes * max(1, len(encoded.dictionary)) + mine
        if name != names[0]:  # numbers stay small, however many columns
            codes = pa.array(codes).dictionary_encode().indices.to_numpy().astype(np.int64)
    return codes


def order_rows(table: pa.Table, codes: Places, order: Sequence[Order], *, ties: bool = False) -> Places:
    """Return the indices of the rows by key and order. Nulls come last in either direction."""
    keys = [_rank(table, each.column, each.descending) for each in order]
    if ties:
        said = {column_of(table.schema, each.column) for each in order}
        rows = np.lexsort((*reversed(keys), codes))
        equal = codes[rows][1:] == codes[rows][:-1]
        for each in keys:
            equal &= each[rows][1:] == each[rows][:-1]
        if not equal.any():
            return rows
        keys += [_rank(table, name, False) for name in table.schema.names if name not in said and _sorts(table, name)]
    return np.lexsort((*reversed(keys), codes))


def _sorts(table: pa.Table, name: str) -> bool:
    return not pa.types.is_nested(table.schema.field(name).type)


def _rank(table: pa.Table, name: str, descending: bool) -> Places:
    column = one_chunk(table.column(column_of(table.schema, name)))
    if (
        not column.null_count
        and not descending
        and (pa.types.is_timestamp(column.type) or pa.types.is_integer(column.type))
    ):
        exact = column.cast(pa.int64()) if not pa.types.is_uint64(column.type) else None
        if exact is not None:
            found: Places = exact.to_numpy(zero_copy_only=False)
            return found
    return ranks(column, descending=descending, tiebreaker="dense")


def ranks(column: Any, *, descending: bool, tiebreaker: str) -> Places:
    """Return ranks from 1 on, as :func:`pyarrow.compute.rank` does: NaN is above every number, and nulls come last."""
    direction = "descending" if descending else "ascending"
    found: Places = (
        pc.rank(column, sort_keys=direction, tiebreaker=tiebreaker).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    if descending and pa.types.is_floating(column.type):  # Arrow sorts NaN after the numbers in either direction
        nan = pc.fill_null(pc.is_nan(column), False).to_numpy(zero_copy_only=False)
        if nan.any():
            known = column.is_valid().to_numpy(zero_copy_only=False) & ~nan
            first = int(found[nan].min()) - 1
            found[nan] -= first
            found[known] += int(found[nan].max())
    return found
