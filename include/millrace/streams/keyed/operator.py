"""An operator over keyed rows: a function of its state, new rows and the watermark, for one shard of keys at a time.

It holds nothing else. Its input and output are Arrow tables, so a host may run it anywhere, twice, or again from an
older state, with the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.board import Places, whole_numbers
from millrace.streams.patterns.sorted_rows import column_of, one_chunk

State = Mapping[str, pa.Table]
END: Final = (1 << 63) - 1
"""The watermark of a stream that has ended, after its last row."""

LATE_BY: Final = "late_by"
REASON: Final = "reason"
WINDOW: Final = "window_start"
IS_LATE: Final = "late"
IS_PARTLY_LATE: Final = "late for a window"
"""Taken, but one of its windows was answered before."""
IS_TIMELESS: Final = "no time"
IS_AHEAD: Final = "ahead of the log"
"""Further ahead of its own log time than the stream allows (millrace.streams.keyed.clock)."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a batch in one shard."""

    output: pa.Table
    state: State
    """The state after the batch. A table that is the same object as before need not be written again."""
    late: pa.Table
    """Rows put aside: the input's columns, LATE_BY, WINDOW (if there is one) and REASON.

    LATE_BY is an int64 in units of the time column (microseconds for times): the row's lag behind the watermark or, if
    negative, its lead over the log.
    """
    counts: Counts
    """Counts of the rows by outcome."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The outcome of each input row: ``taken + late + rejected`` is the input, always. The other counts are extra."""

    taken: int = 0
    late: int = 0
    """Rows behind the watermark, which no answer includes. They are put aside or dropped."""
    rejected: int = 0
    """Rows without a time, or too far ahead of the log."""
    partly_late: int = 0
    """Rows that were taken but are too late for one of their windows. They are also put aside."""
    corrected: int = 0
    """Answers that replace an earlier one."""
    evicted: int = 0
    """Rows of state that were removed because the watermark has passed them."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Counts)))

    @property
    def came(self) -> int:
        """Number of input rows."""
        return self.taken + self.late + self.rejected


class Operator(ABC):
    """A keyed operator. It can be pickled."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Version of the state's columns. Another version does not read it."""
    keys: tuple[str, ...]
    time: str

    @property
    def sides(self) -> str | None:
        """The boolean column that marks rows of the right side, if the watermark is that of the slower of two sides."""
        return None

    @abstractmethod
    def check(self, schema: pa.Schema) -> list[str]:
        """Raise InvalidArgument if rows of `schema` do not fit; return warnings about what lets the state grow."""

    @abstractmethod
    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema of the answers to rows of `schema`."""

    @abstractmethod
    def advance(self, state: State, rows: pa.Table, watermark: int | None) -> Step:
        """Take `rows`, in any order. Rows of the shard's keys come to this shard only.

        All rows before `watermark` have come, except late ones (None: not known yet; END: no more rows). `state` is
        what the last step returned; empty at first.
        """

    def describe(self) -> str:
        """Return a description that identifies the state's meaning: only an equal operator continues from the state."""
        return f"{self.name}/{self.version} {self!r}"


def times_of(rows: pa.Table, name: str) -> tuple[Places, Any]:
    """Return the rows' times as whole numbers (0 if null), and the mask of the rows that have one."""
    column = one_chunk(rows.column(column_of(rows.schema, name)))
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if column.null_count:
        numbers = pc.fill_null(pa.array(whole_numbers(column.drop_null())).take(_places(valid)), 0)
        return numbers.to_numpy(zero_copy_only=False), valid
    return whole_numbers(column), valid


def _places(valid: Any) -> Any:
    """Return each row's index among the valid rows; null for the others."""
    return pa.array(np.cumsum(valid) - 1, pa.int64(), mask=~valid)


def units(duration: timedelta | int) -> int:
    """Return a duration in units of :func:`times_of`: microseconds, or the number itself."""
    return duration // timedelta(microseconds=1) if isinstance(duration, timedelta) else duration


def check_time(schema: pa.Schema, name: str, *durations: timedelta | int | None) -> None:
    """Raise InvalidArgument if the column is no time or number, a duration does not fit it, or a name is reserved.

    Reserved are the columns that late rows get.
    """
    if taken := {LATE_BY, REASON, WINDOW} & {each.lower() for each in schema.names}:
        raise InvalidArgument(f"late rows get a column {', '.join(sorted(taken))}: rename the stream's column")
    kind = schema.field(column_of(schema, name)).type
    timed = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    if not timed and not pa.types.is_integer(kind):
        raise InvalidArgument(f"{name} of type {kind} is not an event time: use a timestamp, a date or a whole number")
    for each in durations:
        if each is not None and isinstance(each, timedelta) != timed:
            raise InvalidArgument(
                f"{each!r} does not fit {name} of type {kind}: use a timedelta for times, an int for numbers"
            )
        if each is not None and units(each) < 0:
            raise InvalidArgument(f"{each!r} is negative: use a duration of 0 or more")


def one_name_each(fields_: Iterable[pa.Field]) -> pa.Schema:
    """Return the schema of these fields. Raises InvalidArgument if two of them have the same name."""
    found = pa.schema(fields_)
    if len({each.lower() for each in found.names}) < len(found.names):
        raise InvalidArgument(f"two columns of the answer have the same name ({', '.join(found.names)}): rename one")
    return found


def left_out(
    rows: pa.Table,
    late: Any,
    behind: Places,
    reason: str,
    window: Places | None = None,
    kind: pa.DataType | None = None,
) -> pa.Table:
    """Return the rows of the mask `late` in the form of :attr:`Step.late`."""
    places = np.flatnonzero(late)
    found = rows.take(pa.array(places))
    found = found.append_column(LATE_BY, pa.array(behind[places], pa.int64()))
    starts = pa.nulls(len(places), pa.int64()) if window is None else pa.array(window[places], pa.int64())
    found = found.append_column(WINDOW, starts if kind is None else from_number(starts, kind))
    return found.append_column(REASON, pa.array([reason] * len(places), pa.utf8()))


def late_schema(schema: pa.Schema, kind: pa.DataType) -> pa.Schema:
    """Return the schema of :func:`left_out` for rows of `schema` whose time is of `kind`."""
    return pa.schema([*schema, pa.field(LATE_BY, pa.int64()), pa.field(WINDOW, kind), pa.field(REASON, pa.utf8())])


def from_number(numbers: Any, kind: pa.DataType) -> Any:
    """Inverse of :func:`whole_numbers`."""
    if pa.types.is_timestamp(kind):
        return numbers.cast(pa.timestamp("us")).cast(pa.timestamp("us", kind.tz)).cast(kind)
    if pa.types.is_date(kind):
        return numbers.cast(pa.timestamp("us")).cast(kind, safe=False)
    return numbers.cast(kind)


class Ordered(Operator):
    """An operator that takes its rows in order of time: they wait until the watermark has passed them.

    A row whose time is before the watermark is late and is put aside. The operator orders equal times itself, never by
    arrival.
    """

    @abstractmethod
    def step(self, state: State, ready: pa.Table, watermark: int) -> tuple[pa.Table, State, int]:
        """Take all rows with times before the watermark that no earlier step took, in no order.

        Return the answers, the state, and how many rows of the state the watermark has passed and removed.
        """

    def advance(self, state: State, rows: pa.Table, watermark: int | None) -> Step:
        kind = rows.schema.field(column_of(rows.schema, self.time)).type
        times, valid = times_of(rows, self.time)
        behind = (
            np.zeros(len(times), dtype=np.bool_)
            if watermark is None or watermark == END
            else valid & (times < watermark)
        )
        side = [left_out(rows, ~valid, np.zeros(len(times), dtype=np.int64), IS_TIMELESS, kind=kind)]
        if behind.any():
            side.append(left_out(rows, behind, (watermark or 0) - times, IS_LATE, kind=kind))
        taken = valid & ~behind
        pool = rows if taken.all() else rows.filter(pa.array(taken))
        waiting = state.get("waiting")
        if waiting is not None and waiting.num_rows:
            pool = pa.concat_tables([waiting, pool.cast(waiting.schema)])
        own: State = {name: table for name, table in state.items() if name != "waiting"}
        if watermark is None:
            ready = pool.slice(0, 0)
        elif watermark == END:
            ready, pool = pool, pool.slice(0, 0)
        else:
            passed = times_of(pool, self.time)[0] < watermark
            ready, pool = pool.filter(pa.array(passed)), pool.filter(pa.array(~passed))
        output, following, evicted = self.output_schema(rows.schema).empty_table(), own, 0
        if watermark is not None:
            output, following, evicted = self.step(own, ready, watermark)
        late = pa.concat_tables([each.cast(late_schema(rows.schema, kind)) for each in side])
        counts = Counts(int(taken.sum()), int(behind.sum()), int((~valid).sum()), evicted=evicted)
        return Step(output, {**following, "waiting": pool}, late, counts)
