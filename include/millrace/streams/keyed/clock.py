"""The basis of a watermark: the newest event time of each side, and how far ahead of the log a row's may be.

The watermark is `delay` before the newest event time of all earlier batches. With two sides (:attr:`Operator.sides`)
the slower one counts, and there is no watermark until both have rows: so no row is late because the other side was
faster. A row whose event time is more than `max_ahead` after its own log time, that of its tick, is rejected: it is put
aside and does not advance the watermark, which would make all later rows late. All of this depends only on the rows, so
a repeated batch gives the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.message.ids import LOGICAL_BITS
from millrace.streams.keyed.operator import (
    END,
    IS_AHEAD,
    Counts,
    Operator,
    State,
    Step,
    late_schema,
    left_out,
    times_of,
    units,
)
from millrace.streams.patterns.board import Places
from millrace.streams.patterns.sorted_rows import column_of, one_chunk

TICK: Final = "_time_tick"
"""The column of a row's tick in rows of a collection (docs/streams.md)."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest event times so far (:func:`times_of`) of the left and the right side; only `left` for one side."""

    left: int | None = None
    right: int | None = None

    def __or__(self, other: Newest) -> Newest:
        return Newest(_later(self.left, other.left), _later(self.right, other.right))


def _later(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else max(one, other)


@dataclass(frozen=True, slots=True)
class Clock:
    """The rule by which a stream's watermark follows its rows."""

    delay: timedelta | int
    max_ahead: timedelta | None = None
    """Default: no bound."""

    def check(self, operator: Operator, schema: pa.Schema) -> None:
        """Raise InvalidArgument if `max_ahead` is set and rows of `schema` have no tick to compare their times with."""
        if self.max_ahead is None:
            return
        if not pa.types.is_temporal(schema.field(column_of(schema, operator.time)).type):
            raise InvalidArgument(f"max_ahead compares {operator.time} with the log's time: leave it out for numbers")
        if self.max_ahead < timedelta(0):
            raise InvalidArgument(f"max_ahead is negative: {self.max_ahead}")
        if TICK not in schema.names or schema.field(TICK).type != pa.int64():
            raise InvalidArgument(
                f"max_ahead needs the column {TICK}, which the rows lack: name it among the source's columns, and"
                " keep it in the transform"
            )

    def watermark(self, operator: Operator, newest: Newest) -> int | None:
        """Return the time before which all rows but late ones have come; None if it is not known yet."""
        times = [newest.left] if operator.sides is None else [newest.left, newest.right]
        known = [each for each in times if each is not None]
        return min(known) - units(self.delay) if len(known) == len(times) else None

    def advance(self, operator: Operator, state: State, rows: pa.Table, watermark: int | None) -> tuple[Step, Newest]:
        """Do :meth:`Operator.advance` with acceptable rows; return the others among the late ones, and newest times."""
        believed, ahead = self._parted(operator, rows)
        step = operator.advance(state, believed, watermark)
        if ahead is not None:
            late = pa.concat_tables([step.late, ahead.cast(step.late.schema)])
            step = replace(step, late=late, counts=step.counts + Counts(rejected=ahead.num_rows))
        return step, _newest(operator, believed)

    def _parted(self, operator: Operator, rows: pa.Table) -> tuple[pa.Table, pa.Table | None]:
        """Return the acceptable rows, and the others in the form of :attr:`Step.late` (None if there are none)."""
        if self.max_ahead is None:
            return rows, None
        times, valid = times_of(rows, operator.time)
        over = times - _log_times(rows)
        beyond = valid & (over > units(self.max_ahead))
        if not beyond.any():
            return rows, None
        kind = rows.schema.field(column_of(rows.schema, operator.time)).type
        aside = left_out(rows, beyond, -over, IS_AHEAD, kind=kind)
        return rows.filter(pa.array(~beyond)), aside.cast(late_schema(rows.schema, kind))


def _log_times(rows: pa.Table) -> Places:
    """Return the physical time of each row's tick, in microseconds. A row without a tick gets the latest time."""
    ticks: Places = one_chunk(rows.column(TICK)).fill_null(END).to_numpy(zero_copy_only=False)
    return (ticks >> LOGICAL_BITS) * 1000


def _newest(operator: Operator, rows: pa.Table) -> Newest:
    times, valid = times_of(rows, operator.time)
    if operator.sides is None:
        return Newest(_last(times, valid))
    side = one_chunk(rows.column(column_of(rows.schema, operator.sides)))
    right: Any = side.fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)
    return Newest(_last(times, valid & ~right), _last(times, valid & right))


def _last(times: Places, chosen: Any) -> int | None:
    return int(times[chosen].max()) if chosen.any() else None
