"""MATCH_RECOGNIZE over a stream: the state is the rows that later rows may still need.

Matches are answered in the order of their first rows, each as soon as nothing can change it. A match that could
continue, or be replaced by a preferred one, waits for a row that decides, or until the watermark passes the end of
WITHIN.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.streams.keyed.operator import END, Ordered, State, check_time, times_of, units
from millrace.streams.patterns.find import Finder
from millrace.streams.patterns.measures import answer
from millrace.streams.patterns.query import MatchRecognize
from millrace.streams.patterns.sorted_rows import SortedRows, column_of, key_codes, sort
from millrace.streams.patterns.table import answer_schema

_BEGIN: Final = "__begin"
_COVERED: Final = "__covered"
_NUMBER: Final = "__number"


@dataclass(frozen=True)
class Patterns(Ordered):
    """One pattern. Rows of equal times are ordered by the rest of ORDER BY, then by their other columns."""

    name: ClassVar[str] = "patterns"
    query: MatchRecognize
    time: str
    """The first column of ORDER BY."""
    forget: timedelta | int | None = None
    """Time for which PREV and MATCH_NUMBER() remember a key without an open match. Default: forever."""
    most_rows: int = 1_000_000
    """Maximum number of rows in one shard's open matches. More are an error, which leaves the state unchanged."""

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.query.partition

    def check(self, schema: pa.Schema) -> list[str]:
        warnings = self.query.check_stream()
        if column_of(schema, self.query.order[0].column) != column_of(schema, self.time):
            raise InvalidArgument(f"a stream's pattern must begin with its event time: ORDER BY {self.time}")
        check_time(schema, self.time, self.query.within, self.forget)
        self.output_schema(schema)
        return warnings

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        return answer_schema(self.query, schema)

    def step(self, state: State, ready: pa.Table, watermark: int) -> tuple[pa.Table, State, int]:
        query = self.query
        schema = ready.schema
        fresh = ready.append_column(_BEGIN, pa.array(np.ones(ready.num_rows, dtype=np.bool_)))
        fresh = fresh.append_column(_COVERED, pa.array(np.zeros(ready.num_rows, dtype=np.bool_)))
        earlier = state.get("rows")
        pool = fresh if earlier is None else pa.concat_tables([earlier, fresh])
        if not pool.num_rows:
            return self.output_schema(schema).empty_table(), state, 0
        ordered = sort(pool, query, open_=watermark != END, ties=True)
        board = ordered.board
        may_begin, covered = (ordered.table.column(each).to_numpy() for each in (_BEGIN, _COVERED))
        ends = np.append(board.starts[1:], board.rows)
        begins = board.starts + np.add.reduceat((~may_begin).astype(np.int64), board.starts)
        rows = SortedRows(ordered.table.drop_columns([_BEGIN, _COVERED]), board)
        numbers, base = self._numbers(state, rows)
        closing = None if watermark == END else watermark
        found = Finder(query, rows, begin=begins, base=base, watermark=closing).find()
        undecided = found.undecided
        output = answer(query, rows, found.matches, decided=undecided, covered=covered | ~may_begin)
        following: dict[str, pa.Table] = {}
        covered[found.matches.rows] = True
        covered[found.matches.start] = True
        free = np.maximum(begins, undecided)
        first = np.maximum(np.minimum(undecided, ends) - query.lookback, board.starts)
        stale = self._stale(rows, undecided == ends, ends, watermark)
        looked_back = np.arange(board.rows) >= first[board.partition_of_row]
        forgotten = looked_back & stale[board.partition_of_row]
        stay = looked_back & ~forgotten
        left = ordered.table.filter(pa.array(stay))
        left = left.drop_columns([_BEGIN, _COVERED])
        left = left.append_column(_BEGIN, pa.array((np.arange(board.rows) >= free[board.partition_of_row])[stay]))
        left = left.append_column(_COVERED, pa.array(covered[stay]))
        opened = int(np.count_nonzero(left.column(_BEGIN).to_numpy()))
        if opened > self.most_rows:
            raise InvalidArgument(
                f"open matches keep {opened} rows in one shard, more than {self.most_rows}: bound the pattern by WITHIN"
            )
        following["rows"] = left
        if numbers is not None:
            following["numbers"] = self._counted(numbers, rows, found.matches.start, base, undecided < ends, watermark)
        return output, following, int(forgotten.sum())

    def _stale(self, rows: SortedRows, idle: Any, ends: Any, watermark: int) -> Any:
        if self.forget is None or watermark == END:
            return np.zeros(len(ends), dtype=np.bool_)
        times, _ = times_of(rows.table, self.time)
        return idle & (times[ends - 1] < watermark - units(self.forget))

    def _numbers(self, state: State, rows: SortedRows) -> tuple[pa.Table | None, Any]:
        """Return the numbers of earlier matches: the table of all keys that had some, and those of these partitions."""
        starts = rows.board.starts
        base = np.zeros(len(starts), dtype=np.int64)
        if not self.query.counts_matches:
            return None, base
        names = [column_of(rows.table.schema, each) for each in self.query.partition]
        here = rows.table.select(names).take(pa.array(starts)) if names else None
        known = state.get("numbers")
        if known is None:
            fields = [] if here is None else list(here.schema)
            known = pa.schema([*fields, (_NUMBER, pa.int64()), ("__time", pa.int64())]).empty_table()
        if known.num_rows:
            both = known.select(names) if names else None
            codes = (
                key_codes(pa.concat_tables([both, here.cast(both.schema)]), names)
                if both is not None and here is not None
                else np.zeros(known.num_rows + len(starts), dtype=np.int64)
            )
            by_code = np.zeros(int(codes.max()) + 1, dtype=np.int64)
            by_code[codes[: known.num_rows]] = known.column(_NUMBER).to_numpy()
            base = by_code[codes[known.num_rows :]]
        return known, base

    def _counted(
        self, known: pa.Table, rows: SortedRows, starts: Any, base: Any, opened: Any, watermark: int
    ) -> pa.Table:
        """Return the number of matches of each key, without keys whose last row is old and that have no open match."""
        board = rows.board
        names = [column_of(rows.table.schema, each) for each in self.query.partition]
        counts = base + np.bincount(board.partition_of_row[starts], minlength=len(board.starts))
        times, _ = times_of(rows.table, self.time)
        last = times[np.append(board.starts[1:], board.rows) - 1]
        columns = {name: rows.table.column(name).take(pa.array(board.starts)) for name in names}
        fresh = pa.table({**columns, _NUMBER: pa.array(counts), "__time": pa.array(last)}).cast(known.schema)
        fresh, opened = fresh.filter(pa.array(counts > 0)), opened[counts > 0]
        both = pa.concat_tables([fresh, known])
        codes = key_codes(both, names) if names else np.zeros(both.num_rows, dtype=np.int64)
        _, first = np.unique(codes, return_index=True)
        first = np.sort(first)
        merged = both.take(pa.array(first))
        if self.forget is not None and watermark != END:
            stays = merged.column("__time").to_numpy() >= watermark - units(self.forget)
            stays |= np.append(opened, np.zeros(known.num_rows, dtype=np.bool_))[first]
            merged = merged.filter(pa.array(stays))
        return merged
