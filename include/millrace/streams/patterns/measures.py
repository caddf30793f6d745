"""MEASURES over the matches, column by column, and the rows of the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.board import Flags, Places
from millrace.streams.patterns.expressions import Aggregate, Expression, MatchNumber, Reach, classifies
from millrace.streams.patterns.find import Matches
from millrace.streams.patterns.operations import added, aggregate_kind, over_columns, summed
from millrace.streams.patterns.query import MatchRecognize
from millrace.streams.patterns.sorted_rows import SortedRows, column_of, one_chunk, ranks, sort


@dataclass(frozen=True)
class Points:
    """Points of evaluation: each point's row, match (-1: none), and the flat place up to which it sees the match."""

    rows: Places
    matches: Places
    until: Places


def answer(
    query: MatchRecognize,
    rows: SortedRows,
    matches: Matches,
    *,
    decided: Places | None = None,
    covered: Flags | None = None,
) -> pa.Table:
    """Return the rows of the query's answer for its matches.

    `decided` is the row of each partition up to which unmatched rows are known (default: all). `covered` are rows
    of earlier matches. Raises InvalidArgument.
    """
    points = _points(query, rows, matches, decided, covered)
    table = rows.table
    found: dict[str, Any] = {}
    at = pa.array(points.rows)
    for name in query.partition:
        found[name] = one_chunk(table.column(column_of(table.schema, name))).take(at)
    if query.rows != "one":
        for each in query.order:
            found.setdefault(each.column, one_chunk(table.column(column_of(table.schema, each.column))).take(at))
    zone = next((each.type.tz for each in table.schema if pa.types.is_timestamp(each.type) and each.type.tz), None)
    for name, expression in query.measures.items():
        if name in found:
            raise InvalidArgument(f"MEASURES {name}: the answer already has a column of that name")
        found[name] = _zoned(_measure(query, rows, matches, points, expression), zone)
    if query.rows != "one":
        taken = {each.lower() for each in found}
        for name in table.column_names:
            if name.lower() not in taken:
                found[name] = one_chunk(table.column(name)).take(at)
    return pa.table(found)


def check_conditions(query: MatchRecognize, schema: pa.Schema) -> None:
    """Raise InvalidArgument if a condition of DEFINE does not fit rows of `schema`.

    Call it before any row: conditions over captured rows are evaluated one by one, and would fail in mid-stream.
    """
    none = np.zeros(0, dtype=np.int64)
    rows = sort(schema.empty_table(), query)
    matches = Matches(none, np.zeros(1, dtype=np.int64), none.astype(np.int16), none.astype(np.bool_), none)
    for name, condition in query.define.items():
        kind = _measure(query, rows, matches, Points(none, none, none), condition).type
        if not (pa.types.is_boolean(kind) or pa.types.is_null(kind)):
            raise InvalidArgument(f"DEFINE {name}: the condition is of type {kind}, not boolean")


def _zoned(column: Any, zone: str | None) -> Any:
    """Return a column; times in the zone of the input's times."""
    return column.cast(pa.timestamp("us", zone)) if zone and pa.types.is_timestamp(column.type) else column


def _points(
    query: MatchRecognize, rows: SortedRows, matches: Matches, decided: Places | None, covered: Flags | None
) -> Points:
    lengths = np.diff(matches.offsets)
    numbers = np.arange(len(lengths))
    if query.rows == "one":
        return Points(matches.start, numbers, matches.offsets[1:])
    flat = np.flatnonzero(~matches.excluded)
    of = np.repeat(numbers, lengths)[flat]
    parts = [(matches.rows[flat], of, flat + 1)]
    empty = np.flatnonzero(lengths == 0)
    if query.rows != "all omit empty" and len(empty):
        parts.append((matches.start[empty], empty, matches.offsets[empty]))
    if query.rows == "all with unmatched":
        taken = np.zeros(rows.board.rows, dtype=np.bool_) if covered is None else covered.copy()
        taken[matches.rows] = True
        taken[matches.start] = True
        if decided is not None:
            taken |= np.arange(rows.board.rows) >= decided[rows.board.partition_of_row]
        free = np.flatnonzero(~taken)
        parts.append((free, np.full(len(free), -1), np.zeros(len(free), dtype=np.int64)))
    at, match, until = (np.concatenate([each[place] for each in parts]).astype(np.int64) for place in range(3))
    first = np.where(match >= 0, np.append(matches.start, 0)[match], at)
    order = np.lexsort((at, match, first))
    return Points(at[order], match[order], until[order])


def _measure(query: MatchRecognize, rows: SortedRows, matches: Matches, points: Points, expression: Expression) -> Any:
    found = over_columns(expression, lambda leaf: _leaf(query, rows, matches, points, leaf))
    if isinstance(found, pa.Scalar):
        found = pa.repeat(found, len(points.rows))
    found = one_chunk(found)
    if (points.matches < 0).any():
        found = pc.if_else(pa.array(points.matches >= 0), found, pa.scalar(None, found.type))
    return found


def _leaf(query: MatchRecognize, rows: SortedRows, matches: Matches, points: Points, leaf: Expression) -> Any:
    if isinstance(leaf, MatchNumber):
        return pa.array(np.append(matches.number, 0)[points.matches])
    assert isinstance(leaf, Reach | Aggregate)
    if leaf.variables:
        member = np.isin(matches.codes, [query.variables.index(each) for each in leaf.variables])
    else:
        member = np.ones(len(matches.codes), dtype=np.bool_)
    members = np.flatnonzero(member)
    before = np.append(0, np.cumsum(member))
    match = np.maximum(points.matches, 0)
    offsets = matches.offsets if len(matches.start) else np.zeros(2, dtype=np.int64)
    low = before[offsets[match]]
    high = before[offsets[match + 1]] if leaf.final else before[points.until]
    high = np.where(points.matches >= 0, high, low)
    if isinstance(leaf, Reach):
        return _reached(query, rows, matches, match, leaf, members, low, high)
    return _aggregated(query, rows, matches, leaf, members, low, high)


def _labels(query: MatchRecognize, codes: Any, mask: Any = None) -> Any:
    return pa.array(list(query.variables), pa.utf8()).take(pa.array(codes.astype(np.int64), mask=mask))


def _reached(
    query: MatchRecognize,
    rows: SortedRows,
    matches: Matches,
    match: Places,
    leaf: Reach,
    members: Places,
    low: Places,
    high: Places,
) -> Any:
    at = low + leaf.offset if leaf.first else high - 1 - leaf.offset
    there = (at >= low) & (at < high)
    if not len(members):
        nothing = pa.nulls(len(at), pa.int64())
        return rows.gathered(leaf.row, nothing, pa.nulls(len(at), pa.utf8()))
    flat = members[np.where(there, at, 0)]
    found = matches.rows[flat]
    board = rows.board
    if leaf.shift:
        home = board.partition_of_row[found]
        moved = found + leaf.shift
        there &= (moved >= 0) & (moved < board.rows)
        moved = np.where(there, moved, found)
        there &= board.partition_of_row[moved] == home
        found = moved
    labels = None
    if classifies(leaf.row):
        flat = flat + leaf.shift
        inside = (flat >= matches.offsets[match]) & (flat < matches.offsets[match + 1]) & there
        labels = _labels(query, matches.codes[np.where(inside, flat, 0)], ~inside)
    return rows.gathered(leaf.row, pa.array(found, mask=~there), labels)


def _aggregated(
    query: MatchRecognize,
    rows: SortedRows,
    matches: Matches,
    leaf: Aggregate,
    members: Places,
    low: Places,
    high: Places,
) -> Any:
    filled = high > low
    if leaf.row is None:
        return pa.array(high - low)
    at = pa.array(matches.rows[members])
    values = rows.gathered(leaf.row, at, _labels(query, matches.codes[members]))
    if leaf.function == "array_agg":
        lengths = high - low
        starts = np.append(0, np.cumsum(lengths))
        inside = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)
        return pa.ListArray.from_arrays(
            pa.array(starts, pa.int32()), values.take(pa.array(np.repeat(low, lengths) + inside))
        )
    valid = np.append(0, np.cumsum(values.is_valid().to_numpy(zero_copy_only=False))).astype(np.int64)
    counts = valid[high] - valid[low]
    if leaf.function == "count":
        return pa.array(counts)
    nothing = counts == 0
    last = np.where(filled, high - 1, 0)
    numeric = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if leaf.function not in ("min", "max") and not (numeric or pa.types.is_decimal(values.type)):
        raise InvalidArgument(f"{leaf.function.upper()} does not apply to {values.type}")
    if not len(values):
        return pa.nulls(len(low), aggregate_kind(leaf.function, values.type))
    of = np.searchsorted(matches.offsets, members, side="right")
    if leaf.function in ("min", "max"):
        down = leaf.function == "max"
        found = ranks(values, descending=down, tiebreaker="first")  # nulls last
        least = scanned(found, of, np.minimum)
        by_rank = np.empty(len(values) + 1, dtype=np.int64)
        by_rank[found] = np.arange(len(values))
        return values.take(pa.array(by_rank[least[last]], mask=nothing))
    if pa.types.is_decimal(values.type):
        return _decimal(leaf.function, values, low, high)
    numbers = pc.fill_null(values, pa.scalar(0).cast(values.type)).to_numpy(zero_copy_only=False)
    whole = pa.types.is_integer(values.type) and leaf.function == "sum"
    if whole:
        require_sums(leaf.function.upper(), values, lambda: of)
    sums = scanned(numbers.astype(np.int64 if whole else np.float64), of, np.add)[last]
    if leaf.function == "sum":
        return pa.array(sums, mask=nothing)
    return pa.array(sums / np.maximum(counts, 1), mask=nothing)


def scanned(values: Any, of: Places, step: Any) -> Any:
    """Scan values with `step`, restarting at each group, in as many passes as the longest group has binary digits."""
    found = values.copy()
    longest = int(np.bincount(of).max()) if len(of) else 0
    distance = 1
    while distance < longest:
        same = of[distance:] == of[:-distance]
        moved = step(found[distance:], found[:-distance])
        found[distance:] = np.where(same, moved, found[distance:])
        distance *= 2
    return found


def require_sums(name: str, values: Any, groups: Callable[[], Places]) -> None:
    """Raise InvalidArgument if a running sum of whole numbers, restarted at each group, leaves a bigint's range.

    `groups` is called only if the values are large enough for that.
    """
    extremes = pc.min_max(values)
    least, most = extremes["min"].as_py(), extremes["max"].as_py()
    if least is None or max(abs(least), abs(most)) * len(values) < 1 << 63:
        return
    of = groups()
    order = np.argsort(of, kind="stable")
    numbers = pc.fill_null(values.cast(pa.float64(), safe=False), 0.0).to_numpy(zero_copy_only=False)[order]
    if (np.abs(scanned(numbers, of[order], np.add)) >= float(1 << 63)).any():
        raise InvalidArgument(f"{name}: the sum exceeds a bigint: sum a double, CAST(x AS DOUBLE)")


def require_digits(name: str, values: Any, groups: Callable[[], Places]) -> None:
    """Raise InvalidArgument if a group's sum of decimals has more than 38 digits, which Arrow wraps silently."""
    extremes = pc.min_max(values)
    least, most = extremes["min"].as_py(), extremes["max"].as_py()
    limit = Decimal(10) ** (values.type.precision - values.type.scale)
    if least is None or max(abs(least), abs(most)) * len(values) < limit:
        return
    totals: dict[int, Decimal] = {}
    for group, value in zip(groups().tolist(), values.to_pylist(), strict=True):
        if value is not None:
            totals[group] = added(totals[group], value) if group in totals else value
    if any(abs(each) >= limit for each in totals.values()):
        raise InvalidArgument(f"{name}: the sum has more than 38 digits: sum a double, CAST(x AS DOUBLE)")


def _decimal(function: str, values: Any, low: Places, high: Places) -> Any:
    plain = values.to_pylist()
    found: list[Decimal | float | None] = []
    for begin, end in zip(low.tolist(), high.tolist(), strict=True):
        there = [each for each in plain[begin:end] if each is not None]
        total = summed(functools.reduce(added, there)) if there else None
        found.append(total if function == "sum" or total is None else float(total) / len(there))
    return pa.array(found, pa.decimal128(38, values.type.scale) if function == "sum" else pa.float64())
