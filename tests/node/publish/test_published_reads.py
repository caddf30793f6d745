"""Whatever is written, dropped, flushed, folded and compacted: every published version is a read at its tick, for every
engine.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.settings import Settings
from millrace.node.publish import publisher
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from tests.laws.profile import examples, nightly_example, spread
from tests.node.publish.published_maker import PublishedMaker
from tests.tables.read.test_at_tick import ACROSS, ALL, IMPORTS, PARTITIONS
from tests.tables.read_model import OPERATIONS, do

PARAMS = CompactionParams(min_files=2, fold="always", vacuum=False)

WITH_PUBLISHING = st.one_of(
    OPERATIONS,
    OPERATIONS,
    st.tuples(st.just("flush"), st.integers(0, 100)),
    st.tuples(st.just("flush"), st.just(100)),
    st.tuples(st.just("publish"), st.just(0)),
    st.tuples(st.just("fold"), st.just(0)),
    st.tuples(st.just("compact"), st.integers(0, 100)),
)

END = [("wal_commit", 0), ("flush", 100), ("publish", 0)]
FOLDED = [
    *(step for number in range(9) for step in (("upsert", [number % 3], 1, 0), *END)),
    ("fold", 0),
    ("delete", [0], 0, 0),
    ("wal_commit", 0),
    ("flush", 100),
    ("fold", 0),
    ("publish", 0),
    ("insert", [0], 1, 0),
    *END,
    ("compact", 100),
    ("delete", [1, 2], 0, 0),
    *END,
]
"""Published files are joined while rows in them are deleted: no row returns (moonlink#1834, #1042)."""
AHEAD = [
    ("insert", ALL, 1, 0),
    ("wal_commit", 0),
    ("flush", 40),
    ("publish", 0),
    ("flush", 70),
    ("publish", 0),
    ("delete", [0, 1, 2, 3], 0, 0),
    ("upsert", ALL, 2, 0),
    ("wal_commit", 0),
    ("flush", 60),
    ("publish", 0),
    ("fold", 0),
    ("flush", 90),
    ("publish", 0),
    *END,
]
"""One PChannel is ahead of another, so that files have rows of after the published tick."""


def published(operations: list[Any]) -> list[Any]:
    """The operations with a publish after every second flush."""
    found: list[Any] = []
    for each in operations:
        found += [each, ("publish", 0)] if each[0] in ("flush", "compact") else [each]
    return found


@example(FOLDED, True)
@example(AHEAD, True)
@example([*published(PARTITIONS), *END], True)
@nightly_example([*published(ACROSS), *END], False)
@nightly_example([*published(IMPORTS), *END], False)
@example([*published(IMPORTS), ("compact", 60), *END, ("compact", 100), *END], True)
@given(st.lists(WITH_PUBLISHING, max_size=40), st.booleans())
@examples(4)
def test_every_published_version_is_a_read_at_its_tick(operations: list[tuple[Any, ...]], indexed: bool) -> None:
    folder, patch = Path(tempfile.mkdtemp()), pytest.MonkeyPatch()
    patch.setattr(publisher, "INDEX_FROM_ROWS", 1 if indexed else publisher.INDEX_FROM_ROWS)
    try:
        made = PublishedMaker(Settings(data_dir=folder / "data"))
        for number, operation in enumerate([*operations, *END]):
            match operation[0]:
                case "wal_commit":
                    made.maker.commit()
                case "flush":
                    made.flush(percent=operation[1])
                case "publish":
                    if made.publish():
                        made.check()
                case "fold":
                    made.fold()
                case "compact":
                    compact(made.settings, PARAMS, history=made.maker.tick_at(operation[1]))
                case _:
                    do(made.collection, operation, number)
        table = made.table()
        if table is not None:
            for version in spread(1, list(range(1, table.version + 1)), first=0):
                made.check(version=version)
    finally:
        patch.undo()
        shutil.rmtree(folder)
