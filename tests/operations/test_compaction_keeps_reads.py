"""Whatever is inserted, deleted, dropped, flushed and compacted, a read at a tick that is
kept finds what it found before.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from millrace.base.errors import TickTooOld
from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.operations.verification import CollectionVerification, verify_collections
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import earliest_readable_tick, rows_uri
from millrace.tables.read.arrow import read_arrow
from tests.laws.profile import nightly_example, spread
from tests.tables.read.test_at_tick import ACROSS, ALL, IMPORTS, PARTITIONS, made, tick_everywhere
from tests.tables.read_model import ADDED, OPERATIONS, do, expected
from tests.tables.wal_maker import SCHEMA

PARAMS = CompactionParams(min_files=2, fold="always", vacuum=False)

WITH_COMPACTION = st.one_of(
    OPERATIONS,
    OPERATIONS,
    st.tuples(st.just("flush"), st.just(100)),
    st.tuples(st.just("compact"), st.integers(0, 100)),
)
"""As for reads; "compact" carries how far back history is kept, in percent of the ticks that are there."""

FOLDS = [
    ("insert", ALL, 1, 0),
    ("insert", ALL, 2, 0),
    ("wal_commit", 0),
    ("flush", 100),
    ("delete", [0, 1, 2], 0, 0),
    ("insert", [0, 1], 1, 0),
    ("delete", [0], 1, 0),
    ("drop_partition", 1, 2),
    ("wal_commit", 0),
    ("flush", 100),
    ("compact", 60),
    ("insert", [0, 5], 1, 0),
    ("delete", [5], 2, 0),
    ("wal_commit", 0),
    ("flush", 100),
    ("compact", 100),
    ("compact", 100),
]
"""Deletes of all kinds before and behind the tick that history is kept from; inserted again; compacted twice."""


def rows_at(settings: Settings, tick: int | None = None) -> Counter[tuple[Any, ...]]:
    rows = read_arrow(settings, 1, at=tick).to_pylist()
    return Counter((row["id"], row["body"], row.get(ADDED.name)) for row in rows)


def accounted_for(settings: Settings) -> CollectionVerification:
    """Once all is flushed, the collection holds every row of the WAL that a read can see, and no other."""
    flush_to_end(settings)
    reports = verify_collections(settings)
    report = reports.get(1, CollectionVerification(1))
    assert report.ok, report
    return report


@example(FOLDS, 0)
@example([*PARTITIONS, ("wal_commit", 0), ("flush", 100), ("compact", 80)], 0)
@nightly_example([*ACROSS, ("compact", 50), ("wal_commit", 0), ("flush", 100), ("compact", 100)], 0)
@example([*IMPORTS, ("compact", 60), ("wal_commit", 0), ("flush", 100), ("compact", 100)], 0)
@example([("schema_change", 2), ("insert", [0], 1, 0)], 0)  # on one VChannel alone
@given(st.lists(WITH_COMPACTION, max_size=30), st.integers(0, 3))
@profile(max_examples=8)
def test_a_read_at_a_kept_tick_finds_what_the_model_says_and_an_earlier_one_is_refused(
    operations: list[tuple[Any, ...]], first: int
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        settings = Settings(data_dir=folder / "data")
        maker, collection = made(settings)
        kept = 0
        for number, operation in enumerate(operations):
            if operation[0] == "wal_commit":
                maker.commit()
            elif operation[0] == "flush":
                flush_to_end(settings, up_to_tick=maker.tick_at(operation[1]))
            elif operation[0] == "compact":
                history = maker.tick_at(operation[1])
                kept = max(kept, history)
                compact(settings, PARAMS, history=history)
            else:
                do(collection, operation, number)
        tick_everywhere(maker)
        base = earliest_readable_tick(open_table(Path(rows_uri(settings, 1))))
        assert base <= kept
        inside = maker.readable_ticks()
        for tick in {*spread(4, inside, first=first), *([base] if base > inside[0] else [])}:
            if tick < base:
                with pytest.raises(TickTooOld, match=str(base)):
                    rows_at(settings, tick)
            else:
                assert rows_at(settings, tick) == expected(maker, tick, SCHEMA), f"at {tick}"
        accounted_for(settings)
        compact(settings, PARAMS, history=inside[-1])
        accounted_for(settings)
        assert rows_at(settings, inside[-1]) == expected(maker, inside[-1], SCHEMA)
    finally:
        shutil.rmtree(folder)
