"""Windows over event time without losses: a late row is put aside with its lateness and window, or corrects answers.

A window is answered once, when the watermark (less the allowed lateness) has passed its end. The state is its partial
aggregates. A row is late if a window of its time was answered. It may be late for one sliding window and in time for
the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.streams.keyed.operator import (
    END,
    IS_LATE,
    IS_PARTLY_LATE,
    IS_TIMELESS,
    Counts,
    Operator,
    State,
    Step,
    check_time,
    from_number,
    late_schema,
    left_out,
    one_name_each,
    times_of,
    units,
)
from millrace.streams.patterns.board import Places
from millrace.streams.patterns.measures import require_digits, require_sums, scanned
from millrace.streams.patterns.operations import aggregate_kind
from millrace.streams.patterns.sorted_rows import column_of, key_codes, one_chunk, one_value_each

Late: TypeAlias = Literal["drop", "side", "correct"]
START: Final = "window_start"
STOP: Final = "window_end"
REVISION: Final = "revision"
_PARTS: Final = {"count": ("count",), "sum": ("sum",), "min": ("min",), "max": ("max",), "avg": ("sum", "count")}
MAX_WINDOWS: Final = 1000
"""Maximum number of windows of one row. A slide much shorter than the size would copy each row that often."""
_MERGE: Final = {"count": "sum", "sum": "sum", "min": "min", "max": "max"}


@dataclass(frozen=True)
class Windows(Operator):
    """Aggregates by key and window: `size` with `slide` (default: `size`), or sessions of rows under `gap` apart."""

    name: ClassVar[str] = "windows"
    version: ClassVar[int] = 2
    keys: tuple[str, ...]
    time: str
    aggregates: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    """(function, column) of each column of the answer; functions are count, sum, min, max and avg. A count of None
    counts rows."""
    size: timedelta | int | None = None
    slide: timedelta | int | None = None
    gap: timedelta | int | None = None
    lateness: timedelta | int | None = None
    """Time that a window stays open after the watermark has passed its end."""
    late: Late = "side"
    """The treatment of late rows.

    drop: only count them. side: put them aside. correct: answer their windows again, with a REVISION one higher, unless
    `keep` has passed.
    """
    keep: timedelta | int | None = None
    """With correct: the time that answered windows are kept, by the watermark."""

    def check(self, schema: pa.Schema) -> list[str]:
        if (self.size is None) == (self.gap is None):
            raise InvalidArgument("windows need either a size, or a gap for sessions")
        if self.slide is not None and self.size is None:
            raise InvalidArgument("a slide requires a size")
        check_time(schema, self.time, self.size, self.slide, self.gap, self.lateness, self.keep)
        for each in (self.size, self.slide, self.gap):
            if each is not None and units(each) <= 0:
                raise InvalidArgument(f"{each!r} is not the length of a window: use more than 0")
        if self.size is not None and self.slide is not None and units(self.slide) > units(self.size):
            raise InvalidArgument("a slide longer than the size would skip rows: use a slide of at most the size")
        if self.size is not None and units(self.size) > MAX_WINDOWS * units(self.slide or self.size):
            raise InvalidArgument(f"each row would be in more than {MAX_WINDOWS} windows: slide by more")
        self._check_days(schema)
        if self.late == "correct" and (self.keep is None or self.gap is not None):
            raise InvalidArgument("corrections need `keep`, which bounds the state, and windows with a size")
        if not self.aggregates:
            raise InvalidArgument("aggregates is empty: give each column of the answer its function")
        self.output_schema(schema)
        days = self.size is not None and units(self.size) % units(timedelta(days=1)) == 0
        timed = pa.types.is_timestamp(schema.field(column_of(schema, self.time)).type)
        return ["windows of days begin at midnight in UTC, not in a local time zone"] if days and timed else []

    def _check_days(self, schema: pa.Schema) -> None:
        """Raise InvalidArgument if the time is a date and a length is not a number of days."""
        if not pa.types.is_date(schema.field(column_of(schema, self.time)).type):
            return
        for each in (self.size, self.slide, self.gap):
            if each is not None and units(each) % units(timedelta(days=1)):
                raise InvalidArgument(f"{self.time} is a date, so {each!r} must be a number of days")

    @property
    def _keys(self) -> list[str]:
        """Names of the keys' columns in the state. No other column can have such a name."""
        return [f"k{number}" for number in range(len(self.keys))]

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        kind = schema.field(column_of(schema, self.time)).type
        fields = [schema.field(column_of(schema, each)) for each in self.keys]
        fields += [pa.field(START, kind), pa.field(STOP, kind)]
        for name, (function, column) in self.aggregates.items():
            if function not in _PARTS or (column is None and function != "count"):
                raise InvalidArgument(f"{name}: {function} of {column} is not supported; use {', '.join(_PARTS)}")
            of = pa.int64() if column is None else schema.field(column_of(schema, column)).type
            numeric = pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_decimal(of)
            if function in ("sum", "avg") and not numeric:
                raise InvalidArgument(f"{name}: {function} does not apply to {of}")
            if function in ("min", "max") and pa.types.is_nested(of):
                raise InvalidArgument(f"{name}: {function} does not apply to {of}")
            fields.append(pa.field(name, aggregate_kind(function, of)))
        return one_name_each([*fields, *([pa.field(REVISION, pa.int64())] if self.late == "correct" else [])])

    def advance(self, state: State, rows: pa.Table, watermark: int | None) -> Step:
        kind = rows.schema.field(column_of(rows.schema, self.time)).type
        times, valid = times_of(rows, self.time)
        floor = None if watermark is None or watermark == END else watermark - units(self.lateness or 0)
        side = [left_out(rows, ~valid, np.zeros(len(times), dtype=np.int64), IS_TIMELESS, kind=kind)]
        if self.gap is not None:
            fresh, gone, window = self._sessions(state, rows, times, valid, floor)
            missed, dropped = gone, gone
        else:
            fresh, missed, dropped, window = self._placed(rows, times, valid, floor)
        partly = missed & ~dropped
        if missed.any() and floor is not None and self.late != "drop":
            side.append(left_out(rows, dropped, floor - times, IS_LATE, window, kind))
            side.append(left_out(rows, partly, floor - times, IS_PARTLY_LATE, window, kind))
        late = pa.concat_tables([each.cast(late_schema(rows.schema, kind)) for each in side])
        open_ = self._merged(state.get("windows"), fresh)
        output, following = self._closed(open_, rows.schema, END if watermark == END else floor)
        counts = Counts(
            taken=int(valid.sum() - dropped.sum()),
            late=int(dropped.sum()),
            rejected=int((~valid).sum()),
            partly_late=int(partly.sum()),
            corrected=int(pc.sum(pc.greater(output.column(REVISION), 0)).as_py() or 0) if self.late == "correct" else 0,
            evicted=open_.num_rows - following.num_rows,
        )
        return Step(output, {"windows": following}, late, counts)

    def _placed(
        self, rows: pa.Table, times: Places, valid: Any, floor: int | None
    ) -> tuple[pa.Table, Any, Any, Places]:
        """Return partial aggregates by window, the rows that missed a window, those that missed all, and the last
        missed.
        """
        size = units(self.size or 0)
        slide = units(self.slide) if self.slide is not None else size
        missed, placed = np.zeros(len(times), dtype=np.bool_), np.zeros(len(times), dtype=np.bool_)
        window = np.zeros(len(times), dtype=np.int64)
        newest = np.floor_divide(times, slide) * slide
        indices, starts = [], []
        limit = None if floor is None else floor - units(self.keep or 0) if self.late == "correct" else floor
        for back in range(-(-size // slide)):
            start = newest - back * slide
            inside = valid & (start + size > times)
            late = inside & (start + size <= limit) if limit is not None else np.zeros(len(times), dtype=np.bool_)
            window = np.where(late & ~missed, start, window)
            missed |= late
            inside &= ~late
            placed |= inside
            at = np.flatnonzero(inside)
            indices.append(at)
            starts.append(start[at])
        at = np.concatenate(indices)
        begin = np.concatenate(starts)
        return self._partial(rows, at, begin, begin + size), missed, missed & ~placed, window

    def _sessions(
        self, state: State, rows: pa.Table, times: Places, valid: Any, floor: int | None
    ) -> tuple[pa.Table, Any, Places]:
        """Make each row a session, to be merged later. Sessions that end by `floor` were answered.

        So a row before `floor` is late unless it lies inside an open session: one that begins a session, or moves its
        beginning, may be closer than the gap to an answered one.
        """
        gap = units(self.gap or 0)
        late = np.zeros(len(times), dtype=np.bool_)
        if floor is not None:
            late = valid & (times < floor)
            open_ = state.get("windows")
            if late.any() and open_ is not None and open_.num_rows:
                late &= ~self._inside(open_, rows, times)
        at = np.flatnonzero(valid & ~late)
        return self._partial(rows, at, times[at], times[at] + gap), late, times

    def _inside(self, open_: pa.Table, rows: pa.Table, times: Places) -> Any:
        """Return the mask of the rows inside an open session of their key. Sessions of one key do not overlap."""
        names = self._keys
        mine = rows.select([column_of(rows.schema, each) for each in self.keys]).rename_columns(names)
        both = pa.concat_tables([open_.select(names), mine.cast(open_.select(names).schema)]) if names else None
        count = open_.num_rows
        codes = key_codes(both, names) if both is not None else np.zeros(count + rows.num_rows, dtype=np.int64)
        order = np.lexsort((open_.column(START).to_numpy(), codes[:count]))
        starts, stops = (open_.column(each).to_numpy()[order] for each in (START, STOP))
        known = codes[:count][order]
        # The last open session of that key that begins with the row or before it.
        ranks = np.lexsort(
            (np.r_[np.zeros(count), np.ones(len(times))], np.r_[starts, times], np.r_[known, codes[count:]])
        )
        seen = np.cumsum(ranks < count)
        before = np.empty(len(ranks), dtype=np.int64)
        before[ranks] = seen - 1
        last = before[count:]
        there = last >= 0
        last = np.maximum(last, 0)
        found: Any = there & (known[last] == codes[count:]) & (stops[last] > times)
        return found

    def _partial(self, rows: pa.Table, at: Places, starts: Places, stops: Places) -> pa.Table:
        """Return windows of one row each, merged unless they are sessions."""
        chosen = pa.array(at)
        columns: dict[str, Any] = {
            ours: one_value_each(one_chunk(rows.column(column_of(rows.schema, name)))).take(chosen)
            for ours, name in zip(self._keys, self.keys, strict=True)
        }
        columns[START], columns[STOP] = pa.array(starts), pa.array(stops)
        columns[REVISION] = pa.array(np.zeros(len(at), dtype=np.int64))
        columns["changed"] = pa.array(np.ones(len(at), dtype=np.bool_))
        for name, (function, column) in self.aggregates.items():
            values = None if column is None else rows.column(column_of(rows.schema, column)).take(chosen)
            for part in _PARTS[function]:
                columns[f"{name}.{part}"] = self._part(part, values, len(at))
        table = pa.table(columns)
        return table if self.gap is not None else self._grouped(table)

    def _part(self, part: str, values: Any, count: int) -> Any:
        if values is None:
            return pa.array(np.ones(count, dtype=np.int64))
        if part == "count":
            return pc.cast(pc.is_valid(values), pa.int64())
        if part == "sum":
            return values.cast(aggregate_kind("sum", values.type))
        return values

    def _grouped(self, table: pa.Table) -> pa.Table:
        names = [*self._keys, START, STOP]
        rest = [each for each in table.column_names if each not in names]
        how = {REVISION: "max", "changed": "max"}
        asked = [(each, how.get(each) or _MERGE[each.rpartition(".")[2]]) for each in rest]
        unordered = [
            each
            for each, function in asked
            if function == "max" and pa.types.is_floating(table.schema.field(each).type)
        ]
        marks = {f"{each}.nan": pc.is_nan(table.column(each)) for each in unordered}
        grouped = pa.table({**{each: table.column(each) for each in table.column_names}, **marks})
        found = grouped.group_by(names).aggregate([*asked, *((each, "max") for each in marks)])
        for each in unordered:  # NaN is the greatest value, but Arrow's maximum ignores it
            nan = pc.fill_null(found.column(f"{each}.nan_max"), False)
            greatest = pc.if_else(
                nan, pa.scalar(float("nan"), table.schema.field(each).type), found.column(f"{each}_max")
            )
            found = found.set_column(found.column_names.index(f"{each}_max"), f"{each}_max", greatest)
        for each, function in asked:
            if function == "sum" and pa.types.is_integer(table.schema.field(each).type):
                values = one_chunk(table.column(each))
                require_sums(each.rpartition(".")[0], values, lambda: key_codes(table, names))
            elif function == "sum" and pa.types.is_decimal(table.schema.field(each).type):
                require_digits(each.rpartition(".")[0], one_chunk(table.column(each)), lambda: key_codes(table, names))
        return (
            found.select([*names, *(f"{each}_{function}" for each, function in asked)])
            .rename_columns([*names, *rest])
            .cast(table.schema)
        )

    def _merged(self, known: pa.Table | None, fresh: pa.Table) -> pa.Table:
        both = fresh if known is None else pa.concat_tables([known, fresh])
        if self.gap is None:
            return both if known is None else self._grouped(both)
        if not both.num_rows:
            return both
        codes = key_codes(both, self._keys)
        starts, stops = both.column(START).to_numpy(), both.column(STOP).to_numpy()
        order = np.lexsort((starts, codes))
        reach = scanned(stops[order], codes[order], np.maximum)
        first = np.append(True, (codes[order][1:] != codes[order][:-1]) | (starts[order][1:] >= reach[:-1]))
        session = np.cumsum(first) - 1
        places = np.flatnonzero(first)
        ends = reach[np.append(places[1:], len(order)) - 1]
        table = both.take(pa.array(order))
        table = table.set_column(table.column_names.index(START), START, pa.array(starts[order][places][session]))
        return self._grouped(table.set_column(table.column_names.index(STOP), STOP, pa.array(ends[session])))

    def _closed(self, windows: pa.Table, schema: pa.Schema, floor: int | None) -> tuple[pa.Table, pa.Table]:
        """Return the answers, and the windows that stay open or may be corrected."""
        target = self.output_schema(schema)
        if floor is None:
            return target.empty_table(), windows
        stops = windows.column(STOP).to_numpy()
        over = stops <= floor
        changed = windows.column("changed").to_numpy()
        answered = windows.filter(pa.array(over & changed))
        stay = stops > (floor - units(self.keep or 0) if floor != END else END) if self.late == "correct" else ~over
        remaining = windows.filter(pa.array(stay))
        if self.late == "correct":
            again = (over & changed)[stay]
            revision = remaining.column(REVISION).to_numpy() + again
            remaining = remaining.set_column(remaining.column_names.index(REVISION), REVISION, pa.array(revision))
            remaining = remaining.set_column(
                remaining.column_names.index("changed"), "changed", pa.array(changed[stay] & ~again)
            )
        return self._answers(answered, target), remaining

    def _answers(self, windows: pa.Table, target: pa.Schema) -> pa.Table:
        kind = target.field(START).type
        columns: list[Any] = [windows.column(each) for each in self._keys]
        columns += [from_number(windows.column(each), kind) for each in (START, STOP)]
        for name, (function, _) in self.aggregates.items():
            if function == "avg":
                total, count = (
                    windows.column(f"{name}.sum").cast(pa.float64()),
                    windows.column(f"{name}.count").cast(pa.float64()),
                )
                columns.append(pc.divide(total, pc.if_else(pc.equal(count, 0.0), pa.scalar(None, pa.float64()), count)))
            else:
                columns.append(windows.column(f"{name}.{function}"))
        if self.late == "correct":
            columns.append(windows.column(REVISION))
        return pa.table(columns, names=target.names).cast(target)
