"""Joins by time: each row gets the last version of its key before it, or the one that was valid then.

The input is one stream of both sides. The column `side` marks rows of the right side, and `deleted` those that end a
version of a versioned right side. The state is the last version of each key, and rows that wait for the watermark.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.streams.keyed.operator import END, Ordered, State, check_time, one_name_each, times_of, units
from millrace.streams.patterns.query import Order
from millrace.streams.patterns.sorted_rows import column_of, key_codes, one_chunk, order_rows

_LEFT = "__left"


@dataclass(frozen=True)
class AsOf(Ordered):
    """Join each left row with the last right row of its key that is not after it. With `deleted`, a temporal join.

    A left row without a match or a key has nulls, or no answer with `inner`. At equal times, the right side comes
    first. Of several right rows of one key and time, the last by `order` counts, then by their other columns.
    """

    name: ClassVar[str] = "as_of"
    keys: tuple[str, ...]
    time: str
    side: str
    """A boolean column: whether a row is of the right side."""
    left: tuple[str, ...]
    """Columns of the left side in the answer, including keys and time if wanted."""
    right: tuple[tuple[str, str], ...]
    """Columns of the right side in the answer, as (column, name in the answer)."""
    tolerance: timedelta | int | None = None
    """Maximum age of a version, which also bounds the state. Default: no maximum."""
    deleted: str | None = None
    """A boolean column: whether the right row ends its key's version."""
    inner: bool = False
    order: tuple[str, ...] = ()
    """Columns that put versions of one key and time in order, such as the tick of a change."""
    policy: Literal["min", "max"] = "min"
    """The watermark of the two sides, as Spark's multipleWatermarkPolicy.

    "min": no row is late because the other side was faster, but an idle side holds back the answers. "max" is for a
    right side that seldom changes.
    """

    @property
    def sides(self) -> str | None:
        return self.side if self.policy == "min" else None

    def check(self, schema: pa.Schema) -> list[str]:
        check_time(schema, self.time, self.tolerance)
        if self.policy not in ("min", "max"):
            raise InvalidArgument(f"the policy of two watermarks is 'min' or 'max', not {self.policy!r}")
        for name in filter(None, (self.side, self.deleted)):
            if not pa.types.is_boolean(schema.field(column_of(schema, name)).type):
                raise InvalidArgument(f"{name} is not a boolean column")
        for each in (*self.keys, *self.order):
            column_of(schema, each)
        self.output_schema(schema)
        return (
            []
            if self.tolerance is not None
            else ["the last version of each key is kept forever: set a tolerance, or have few keys"]
        )

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        fields = [schema.field(column_of(schema, each)) for each in self.left]
        fields += [schema.field(column_of(schema, column)).with_name(name) for column, name in self.right]
        return one_name_each(each.with_nullable(True) for each in fields)

    def step(self, state: State, ready: pa.Table, watermark: int) -> tuple[pa.Table, State, int]:
        known = state.get("versions")
        pool = ready if known is None else pa.concat_tables([known, ready])
        target = self.output_schema(ready.schema)
        if not pool.num_rows:
            return target.empty_table(), state, 0
        codes = key_codes(pool, self.keys)
        right = pool.column(column_of(pool.schema, self.side)).to_numpy().astype(np.bool_)
        ranked = pool.append_column(_LEFT, pa.array(~right))
        order = (Order(self.time), Order(_LEFT), *(Order(each) for each in self.order))
        rows = order_rows(ranked, codes, order, ties=True)
        codes, right = codes[rows], right[rows]
        times = times_of(pool, self.time)[0][rows]
        version = np.maximum.accumulate(np.where(right, np.arange(len(rows)), -1))
        found = (version >= 0) & (codes[version] == codes) & self._keyed(pool)[rows]
        if self.deleted is not None:
            ended = pool.column(column_of(pool.schema, self.deleted)).take(pa.array(rows[np.maximum(version, 0)]))
            found &= ~ended.fill_null(False).to_numpy()
        if self.tolerance is not None:
            found &= times - times[np.maximum(version, 0)] <= units(self.tolerance)
        asked = np.flatnonzero(~right & found) if self.inner else np.flatnonzero(~right)
        at, of = pa.array(rows[asked]), pa.array(rows[np.maximum(version, 0)][asked], mask=~found[asked])
        columns = [pool.column(column_of(pool.schema, each)).take(at) for each in self.left]
        columns += [pool.column(column_of(pool.schema, each)).take(of) for each, _ in self.right]
        last = np.append(codes[1:] != codes[:-1], True)
        newest = version[last]
        stays = (newest >= 0) & (codes[newest] == codes[last]) & self._keyed(pool)[rows][last]
        before = int(stays.sum())
        if self.tolerance is not None and watermark != END:
            stays &= times[newest] >= watermark - units(self.tolerance)
        retained = newest[stays]
        evicted = before - len(retained)
        if self.deleted is not None and len(retained):  # a key whose version ended needs no state
            gone = (
                pool.column(column_of(pool.schema, self.deleted))
                .take(pa.array(rows[retained]))
                .fill_null(False)
                .to_numpy()
            )
            retained = retained[~gone]
        return pa.table(columns, schema=target), {"versions": pool.take(pa.array(rows[retained]))}, evicted

    def _keyed(self, rows: pa.Table) -> Any:
        """Return the mask of the rows without nulls in their keys. As in SQL, no value equals a null."""
        found = np.ones(rows.num_rows, dtype=np.bool_)
        for each in self.keys:
            found &= one_chunk(rows.column(column_of(rows.schema, each))).is_valid().to_numpy(zero_copy_only=False)
        return found


@dataclass(frozen=True)
class Distinct(Ordered):
    """The first row of each key, and another one if the previous answer is more than `within` before it.

    At equal times, the first by the other columns counts.
    """

    name: ClassVar[str] = "distinct"
    keys: tuple[str, ...]
    time: str
    within: timedelta | int | None = None
    """Time after which a key is answered again. Default: never, which keeps each key forever."""

    def check(self, schema: pa.Schema) -> list[str]:
        check_time(schema, self.time, self.within)
        for each in self.keys:
            column_of(schema, each)
        return [] if self.within is not None else ["each key is kept forever: set within"]

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        return schema

    def step(self, state: State, ready: pa.Table, watermark: int) -> tuple[pa.Table, State, int]:
        names = [column_of(ready.schema, each) for each in dict.fromkeys((*self.keys, self.time))]
        known = state.get("given", ready.select(names).slice(0, 0))
        keys = pa.concat_tables([known, ready.select(names)])
        if not keys.num_rows:
            return ready, state, 0
        codes = key_codes(keys, self.keys)
        times = times_of(keys, self.time)[0]
        count = known.num_rows
        # Keys that were answered before come first, whatever their times.
        order = order_rows(ready, codes[count:], (Order(self.time),), ties=True) + count
        rows = np.concatenate([np.arange(count), order])
        rows = rows[np.argsort(codes[rows], kind="stable")]
        within = None if self.within is None else units(self.within)
        begins = np.append(True, codes[rows][1:] != codes[rows][:-1])
        given = begins if within is None else _reached(begins, _first_beyond(codes[rows], times[rows], within))
        ends = np.flatnonzero(np.append(begins[1:], True))
        last = np.maximum.accumulate(np.where(given, np.arange(len(rows)), 0))[ends]
        retained = np.sort(rows[last])
        output = ready.take(pa.array(rows[given & (rows >= count)] - count))
        before = len(retained)
        if within is not None and watermark != END:
            retained = retained[times[retained] >= watermark - within]
        return output, {"given": keys.take(pa.array(retained))}, before - len(retained)


def _first_beyond(codes: Any, times: Any, within: int) -> Any:
    """Return, for each row, the first one of its key more than `within` later, or the number of rows if none is.

    The rows are sorted by key and time.
    """
    count = len(codes)
    moments, ranks = np.unique(times, return_inverse=True)
    beyond = np.searchsorted(moments, np.minimum(times, END - within) + within, side="right")
    key = np.cumsum(np.append(True, codes[1:] != codes[:-1])) * (len(moments) + 1)
    found = np.searchsorted(key + ranks.reshape(-1), key + beyond)
    return np.where(codes[np.minimum(found, count - 1)] == codes, found, count)


def _reached(begins: Any, following: Any) -> Any:
    """Return which positions are reached from `begins` by following `following` (the length means the end).

    Takes as many passes as the longest path has binary digits.
    """
    count = len(begins)
    reached, following = np.append(begins, False), np.append(following, count)  # the end follows itself
    for _ in range(count.bit_length()):
        targets = following[reached]
        if (targets == count).all():
            break
        reached[targets] = True
        following = following[following]
    return reached[:count]
