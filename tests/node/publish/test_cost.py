"""What a publish opens and reads follows what changed, not what is there."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.node.publish import publisher
from millrace.node.publish.definition import PublishLoop
from millrace.node.publish.publisher import PublishFigures
from millrace.rpc.selection import Selection
from millrace.tables.key_index import index as index_module
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.read.arrow import read_pieces
from millrace.tables.read.keys import read_keys
from millrace.tables.read.plan import plan_read
from tests.node.publish.published_maker import PublishedMaker


class Published:
    """A publisher of one collection that keeps its handles from publish to publish."""

    def __init__(self, made: PublishedMaker) -> None:
        self.made = made
        self.loop = PublishLoop(made.settings, made.confirm)
        self.planner = self.loop.planner()

    @classmethod
    def of_days(cls, settings: Settings) -> Published:
        """12 files of 50 rows, published, with keys that grow."""
        found = cls(PublishedMaker(settings, pchannels=("p0",), vchannels=1))
        for number in range(12):
            found.made.write(range(100 * number, 100 * number + 50), "old", upsert=False)
            found.made.flush()
        found.publish()
        return found

    def publish(self) -> PublishFigures:
        pending = self.planner.pending(without=frozenset(), target=None, max_bytes=0)
        (plan,) = self.planner.plan({each.channel: each.end for each in pending}, max_bytes=0)
        report = self.loop.run(plan)
        assert self.loop.committer(None).commit([report]).committed
        assert report.planned is not None
        return report.planned.figures

    def after(self, *, insert: Sequence[int] = (), delete: Sequence[int] = ()) -> PublishFigures:
        if insert:
            self.made.write(insert, "new", upsert=False)
        if delete:
            self.made.delete(delete)
        self.made.flush()
        return self.publish()

    @property
    def index(self) -> KeyIndex:
        return KeyIndex.open(self.made.settings.key_index_path(1))


def test_rows_without_deletes_open_no_file(settings: Settings) -> None:
    published = Published.of_days(settings)
    figures = published.after(insert=range(5000, 5050))
    assert (figures.files_added, figures.files_opened, figures.rows_scanned) == (1, 0, 0)
    assert not published.index.runs
    published.made.check()


def test_deletes_of_keys_that_grow_with_time_read_the_files_that_bounds_leave(settings: Settings) -> None:
    published = Published.of_days(settings)
    figures = published.after(delete=[300, 301])
    assert (figures.files_masked, figures.rows_masked, figures.rows_scanned) == (1, 2, 50)
    assert not published.index.runs, "no index is needed for that"
    published.made.check()


@pytest.mark.parametrize("by_predicate", [False, True])
def test_a_reader_that_has_to_scan_for_a_key_gets_an_index_with_the_next_publish(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, by_predicate: bool
) -> None:
    monkeypatch.setattr(index_module, "INDEX_FROM_ROWS", 50)
    published = Published.of_days(settings)
    key = pa.RecordBatch.from_pylist([{"id": 307}], pa.schema([pa.field("id", pa.int64(), False)]))
    plan = plan_read(settings, 1, confirmed=published.made.confirm(["p0"]))

    def found() -> list[int]:
        pieces = read_pieces(plan, selection=Selection(where="id = 307")) if by_predicate else [read_keys(plan, key)]
        return [row for piece in pieces for row in piece["id"].to_pylist()]

    assert found() == [307], "one file of 50 rows may have it"
    assert not published.index.runs
    published.after(insert=range(5000, 5050))
    assert published.index.rows == 650
    assert found() == [307]


def test_deletes_of_random_keys_make_an_index_and_read_no_file_from_then_on(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "INDEX_FROM_ROWS", 500)
    published = Published.of_days(settings)
    keys = [100 * number + 7 for number in range(12)]
    assert published.after(delete=keys).rows_scanned == 600
    assert published.index.rows == 600
    figures = published.after(delete=[key + 1 for key in keys])
    assert (figures.files_masked, figures.rows_masked, figures.rows_scanned) == (12, 12, 0)
    published.after(insert=range(7000, 7050))
    assert published.index.rows == 650, "the index follows each publish"
    assert published.after(delete=[7003, 9]).rows_scanned == 0
    published.made.fold()
    figures = published.after(delete=[7004])
    published.made.check()
    for path in published.index.folder.glob("*.run"):
        path.write_bytes(b"")
    again = Published(published.made)
    assert again.after(delete=[7005]).rows_scanned > 0, "a lost index is a scan"
    published.made.check()
