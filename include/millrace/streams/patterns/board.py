"""Rows of many partitions in one array, sorted by partition and order, with one extra place after each: its end.

A *place* is an index into that padded array; place `p` of partition `k` is row ``p - k``. So the end of a partition is
not the beginning of another, and a step from place to place never leaves a partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Board:
    """The shape of sorted rows: `starts` are partitions' first rows, `open` whether more rows may come to each."""

    rows: int
    starts: Places
    open: Flags
    times: Places | None = None
    """Each row's value of the column that WITHIN compares, as a whole number."""

    def __post_init__(self) -> None:
        ends = np.append(self.starts[1:], self.rows)
        numbers = np.arange(len(self.starts))
        set_ = object.__setattr__
        set_(self, "first", self.starts + numbers)
        set_(self, "last", ends + numbers)
        set_(self, "partition_of_row", np.repeat(numbers, ends - self.starts))
        set_(self, "size", self.rows + len(self.starts))

    first: Places = None  # type: ignore[assignment]
    """The first place of each partition."""
    last: Places = None  # type: ignore[assignment]
    """The end of each partition, as a place."""
    partition_of_row: Places = None  # type: ignore[assignment]
    size: int = 0

    def place_of(self, rows: Places) -> Places:
        return rows + self.partition_of_row[rows]

    def padded(self, mask: Flags) -> Flags:
        """Return a mask over rows as one over places, which is false at ends."""
        found = np.zeros(self.size, dtype=np.bool_)
        found[np.arange(self.rows) + self.partition_of_row] = mask
        return found

    def partition_of(self, places: Places) -> Places:
        return np.searchsorted(self.last, places)


def whole_numbers(column: Any) -> Places:
    """Return times or whole numbers as int64; times of any unit as microseconds."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        column = column.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False).cast(pa.int64())
    found: Places = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return found


def next_true(flags: Flags) -> Places:
    """Return for each place the next one, itself included, whose flag is set; the number of places if none follows."""
    size = len(flags)
    found = np.where(flags, np.arange(size), size)
    return np.minimum.accumulate(found[::-1])[::-1]


def previous_true(flags: Flags) -> Places:
    """Return for each place the previous one, itself included, whose flag is set; -1 if there is none."""
    return np.maximum.accumulate(np.where(flags, np.arange(len(flags)), -1))
