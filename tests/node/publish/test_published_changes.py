"""Each published version says by its files and vectors, and by dataChange, exactly which rows came and went."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from millrace.base.settings import Settings
from millrace.storage.deletion_vectors import NO_POSITIONS, Vector, read_vector
from millrace.storage.published import PublishedTable
from millrace.storage.published_log import parse_commit
from millrace.storage.store import store_at
from millrace.tables.collections.data_tables import published_uri
from tests.node.publish.published_maker import PublishedMaker, rows_in


def shown(made: PublishedMaker, table: PublishedTable, action: dict[str, Any]) -> Counter[str]:
    """The rows that an add action shows, or a remove action showed."""
    rows = pq.read_table(made.folder / action["path"], columns=["id", "body"], partitioning=None)
    vector = Vector.from_action(action.get("deletionVector"))
    masked = NO_POSITIONS if vector is None else read_vector(table.store, vector)
    dead = set(masked.tolist())
    return rows_in(rows.take(pa.array([place for place in range(rows.num_rows) if place not in dead], pa.int64())))


def check_changes(made: PublishedMaker) -> tuple[int, int]:
    """Check the changes from each version to the next. Returns the numbers of versions, and of those with a rewrite."""
    store = store_at(published_uri(made.settings, made.collection.id))
    newest = made.table()
    assert newest is not None
    before: Counter[str] = Counter()
    rewrites = 0
    for version in range(1, newest.version + 1):
        actions = parse_commit(store, version)
        assert actions is not None
        moved = 0
        for kind, sign in (("remove", -1), ("add", 1)):
            for action in (each[kind] for each in actions if kind in each):
                if action["dataChange"]:
                    for row, count in shown(made, newest, action).items():
                        before[row] += sign * count
                else:
                    moved += sign * sum(shown(made, newest, action).values())
                    rewrites += kind == "remove"
        assert moved == 0, "a rewrite shows as many rows as what it replaces"
        at = PublishedTable.open(store, version=version)
        assert at is not None
        assert {row: count for row, count in before.items() if count} == rows_in(made.read(at.tick)), version
    return newest.version, rewrites


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(3))
def test_changes_lead_from_each_version_to_the_next_through_folds_of_files_that_change(
    settings: Settings, seed: int
) -> None:
    draw = random.Random(seed)
    made = PublishedMaker(settings)
    for step in range(20):
        made.write(draw.sample(range(60), 6), f"{seed}.{step}", upsert=draw.random() < 0.7)
        if draw.random() < 0.5:
            made.delete(draw.sample(range(60), 4))
        made.flush(percent=draw.choice((100, 100, 60)))
        if draw.random() < 0.4:
            made.fold()
        if draw.random() < 0.7:
            made.publish()
    made.flush()
    made.fold()
    made.publish()
    made.check()
    _, rewrites = check_changes(made)
    assert rewrites, "some folds were published"


def test_the_change_feed_is_a_property_that_follows_its_setting(settings: Settings) -> None:
    made = PublishedMaker(settings)
    for number, feed in enumerate((False, True, False)):
        made.settings = replace(settings, publish_change_feed=feed)
        made.write([number], "x")
        made.flush()
        made.publish()
        table = made.table()
        assert table is not None
        found = table.properties.get("delta.enableChangeDataFeed")
        assert found == (None, "true", "false")[number]
        features = DeltaTable(str(made.folder)).protocol().writer_features or []
        assert ("changeDataFeed" in features) == (number > 0), "a feature stays"
        made.check()
