"""Which deletes hit which rows, by the rule as it is told."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.tables.read.deleted import deleted_mask

NAMES = ("id", "_partition_id", "_time_tick", "_write_tick")
PLACES = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3))


KEYS = {"near": pa.int64(), "far": pa.int64(), "text": pa.utf8(), "small": pa.int16()}
"""Of numbers that lie together, that lie apart, of text, and of a type that has canonical bytes."""


def table(places: list[tuple[int, int, int, int]], keys: str) -> pa.Table:
    found = pa.table({name: pa.array([each[at] for each in places], pa.int64()) for at, name in enumerate(NAMES)})
    numbers = pa.array([(each[0] - 1) << 61 if keys == "far" else each[0] - 1 for each in places], pa.int64())
    return found.set_column(0, "id", numbers.cast(KEYS[keys]))


@settings(max_examples=400)
@given(
    st.lists(PLACES, min_size=1, max_size=8), st.lists(PLACES, max_size=8), st.booleans(), st.sampled_from(sorted(KEYS))
)
def test_a_delete_hits_the_rows_of_its_key_and_partition_that_are_before_it(
    rows: list[tuple[int, int, int, int]], deletes: list[tuple[int, int, int, int]], in_order: bool, keys: str
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
    assert deleted_mask(table(rows, keys), table(deletes, keys), ["id"]).tolist() == wanted
