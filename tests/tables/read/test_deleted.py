"""Which deletes hit which rows, by the rule as it is told."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.tables.read.arrow import deleted

NAMES = ("id", "_partition_id", "_time_tick", "_write_tick")
PLACES = st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3))


def table(places: list[tuple[int, int, int, int]]) -> pa.Table:
    return pa.table({name: pa.array([each[at] for each in places], pa.int64()) for at, name in enumerate(NAMES)})


@settings(max_examples=400)
@given(st.lists(PLACES, min_size=1, max_size=8), st.lists(PLACES, min_size=1, max_size=8), st.booleans())
def test_a_delete_hits_the_rows_of_its_key_and_partition_that_are_before_it(
    rows: list[tuple[int, int, int, int]], deletes: list[tuple[int, int, int, int]], in_order: bool
) -> None:
    """Partition 0 of a delete is all partitions; deletes come in the order of their ticks, or in any."""
    if in_order:
        deletes.sort(key=lambda each: each[2:])
    wanted = [
        any(
            key == row[0] and partition in (0, row[1]) and ticks > row[2:]
            for key, partition, *at in deletes
            for ticks in [tuple(at)]
        )
        for row in rows
    ]
    assert deleted(table(rows), table(deletes), ["id"]).tolist() == wanted
