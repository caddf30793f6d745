"""Compaction sets the rows that a published version hides apart: engines then meet files without hidden rows, and files
of which they decode nothing. No row comes or goes, at any tick, and a row is rewritten a bounded number of times.
"""

from __future__ import annotations

import random

import pytest

from millrace.base.settings import Settings
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.need import need
from millrace.operations.compaction.report import TableCompaction
from millrace.operations.compaction.run import compact
from millrace.storage.published import inner_path
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.rewrite.files import is_hidden, live_files
from tests.failpoints import at_failpoints
from tests.node.publish.published_maker import PublishedMaker, rows_in
from tests.node.publish.test_published_changes import check_changes

PARAMS = CompactionParams(min_files=4, fold="never", vacuum=False, segments=False)
"""As by default, for a history that never lets a delete be folded in."""


def compacted(made: PublishedMaker, params: CompactionParams = PARAMS, *, history: int = 0) -> TableCompaction:
    report = compact(made.settings, params, history=history)
    return report.collections[0].rows if report.collections else TableCompaction()


def shares(made: PublishedMaker) -> dict[str, float]:
    """By published file the share of its rows that is hidden."""
    table = made.table()
    assert table is not None
    return {path: 1 - file.live_rows / file.rows for path, file in table.files.items()}


def files_of(made: PublishedMaker, *, hidden: bool) -> list[str]:
    table = table_at(rows_uri(made.settings, made.collection.id))
    return [file.path for file in live_files(table) if is_hidden(file) is hidden]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(8))
def test_each_version_is_a_read_at_its_tick_whatever_is_set_apart(settings: Settings, seed: int) -> None:
    draw = random.Random(seed)
    made = PublishedMaker(settings)
    seen: dict[int, object] = {}
    apart = 0
    for step in range(15):
        made.write(draw.sample(range(60), 6), f"{seed}.{step}", upsert=draw.random() < 0.7)
        if draw.random() < 0.5:
            made.delete(draw.sample(range(60), 4))
        made.flush(percent=draw.choice((100, 100, 60)))
        if draw.random() < 0.3:
            made.fold()
        if draw.random() < 0.6:
            tick = made.publish()
            if tick:
                seen[tick] = rows_in(made.read(tick))
        if draw.random() < 0.4:
            apart += compacted(made, PARAMS.model_copy(update={"min_files": draw.choice((2, 4))})).rows_apart
    made.flush()
    made.publish()
    made.check()
    check_changes(made)
    assert apart, "some rows were set apart"
    for tick, rows in seen.items():
        assert rows_in(made.read(tick)) == rows, f"history at {tick}"


def test_engines_meet_no_file_with_more_than_a_share_of_hidden_rows(settings: Settings) -> None:
    made = PublishedMaker(settings, pchannels=("p0",), vchannels=1)
    made.write(range(1_000), "old", upsert=False)
    made.flush()
    made.write(range(2_000, 3_000), "old", upsert=False)
    made.flush()
    made.publish()
    made.write([*range(0, 1_000, 10), 2_000, 2_001], "new")
    made.flush()
    made.publish()
    assert need(settings, PARAMS).why == ["things: hidden rows of 1 files to set apart"]
    work = compacted(made)
    assert (work.files_removed, work.files_added, work.rows_removed, work.rows_apart) == (1, 2, 0, 100)
    made.publish()
    made.check()
    found = shares(made)
    assert sorted(round(each, 3) for each in found.values()) == [0.0, 0.0, 0.002, 1.0]
    assert [inner_path(path) for path, share in found.items() if share == 1.0] == files_of(made, hidden=True)
    assert compacted(made).files_removed == 0
    assert not need(settings, PARAMS).why


def test_updates_of_random_keys_rewrite_a_bounded_number_of_rows(settings: Settings) -> None:
    """At most 1 / hidden_ratio rows for each row that is hidden, besides the merges of small files."""
    draw = random.Random(0)
    made = PublishedMaker(settings, pchannels=("p0",), vchannels=1)
    params = PARAMS.model_copy(update={"min_files": 10_000})
    made.write(range(1_000), "old", upsert=False)
    made.flush()
    made.publish()
    hidden = rewritten = 0
    for step in range(14):
        keys = draw.sample(range(1_000), 20)
        made.write(keys, f"{step}")
        hidden += len(keys)
        made.flush()
        made.publish()
        work = compacted(made, params)
        rewritten += work.rows
        if work.files_removed:
            made.publish()
        assert max(share for share in shares(made).values() if share < 1.0) < params.hidden_ratio
    assert 0 < rewritten <= hidden / params.hidden_ratio
    made.check()


def test_files_of_hidden_rows_are_merged_among_themselves_and_go_with_their_deletes(settings: Settings) -> None:
    made = PublishedMaker(settings, pchannels=("p0",), vchannels=1)
    for step in range(9):
        made.write(range(100), f"{step}")
        made.write(range(100 * (step + 1), 100 * (step + 2)), "other", upsert=False)
        made.flush()
        made.publish()
        compacted(made)
        made.publish()
        made.fold()
        made.check()
    assert len(files_of(made, hidden=True)) < 2 * PARAMS.min_files
    store = table_at(rows_uri(settings, 1)).store
    for path in files_of(made, hidden=True):
        (published,) = [each for each in shares(made) if inner_path(each) == path]
        assert shares(made)[published] == 1.0
        assert store.size(path)
    always = PARAMS.model_copy(update={"fold": "always"})
    assert compacted(made, always, history=1 << 62).rows_removed == 800
    assert files_of(made, hidden=True) == []
    made.publish()
    made.check()


def test_a_vector_that_is_gone_leaves_the_rows_where_they_are(settings: Settings) -> None:
    made = PublishedMaker(settings, pchannels=("p0",), vchannels=1)
    made.write(range(100), "old", upsert=False)
    made.flush()
    made.publish()
    made.delete(range(20))
    made.flush()
    made.publish()
    (vector,) = (made.folder / "_rows" / "_vectors").iterdir()
    kept = vector.read_bytes()
    vector.unlink()
    assert compacted(made).files_removed == 0
    vector.write_bytes(kept)
    assert compacted(made).rows_apart == 20


@pytest.mark.parametrize("point", ["compact.written", "compact.replaced"])
def test_a_compaction_that_dies_leaves_every_row_once(settings: Settings, point: str) -> None:
    made = PublishedMaker(settings, pchannels=("p0",), vchannels=1)
    made.write(range(100), "old", upsert=False)
    made.flush()
    made.publish()
    made.delete(range(20))
    made.flush()
    made.publish()

    class Died(BaseException):
        pass

    def die(name: str) -> None:
        if name == point:
            raise Died

    with pytest.raises(Died), at_failpoints(die):
        compacted(made)
    made.write(range(10), "again")
    made.flush()
    made.publish()
    made.check()
    compacted(made)
    made.publish()
    made.check()
    check_changes(made)
