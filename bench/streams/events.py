"""The events: a key, a time that grows, a small value; the same for every subject."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pyarrow as pa

from millrace.streams.operators.joins import AsOf
from millrace.streams.operators.patterns import Patterns
from millrace.streams.patterns.sql import parse

STEP: int = 1_000
"""Microseconds between two events."""

RISING = Patterns(
    parse("""PARTITION BY k ORDER BY t
        MEASURES A.v AS a, C.v AS c
        AFTER MATCH SKIP TO NEXT ROW
        PATTERN (A B C) DEFINE B AS v > PREV(v), C AS v > PREV(v)"""),
    "t",
)
"""Three rising values of a key."""

LAST = AsOf(keys=("k",), time="t", side="right", left=("k", "t"), right=(("v", "last"),))
"""The last value of a key before an event: a row in eight is of the right side."""


def events(first: int, count: int, *, keys: int) -> pa.Table:
    """Events from number `first` on: what is in one follows from its number."""
    numbers = np.arange(first, first + count, dtype=np.int64)
    mixed = (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
    other = (numbers.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)) >> np.uint64(24)
    return pa.table(
        {
            "k": (mixed % np.uint64(keys)).astype(np.int64),
            "t": numbers * STEP,
            "v": (other % np.uint64(1000)).astype(np.int64),
            "right": other % np.uint64(8) == 0,
        }
    )


def batches(count: int, *, keys: int, size: int) -> Iterator[pa.Table]:
    """All of them, `size` a batch."""
    for first in range(0, count, size):
        yield events(first, min(size, count - first), keys=keys)


SECOND = timedelta(seconds=1) // timedelta(microseconds=1)
