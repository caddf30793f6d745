"""A publisher that dies or is overtaken leaves a version that is a read at its tick, and the next goes on."""

from __future__ import annotations

from collections import Counter

import pytest

from millrace.base.errors import PublishedRowsDiffer
from millrace.base.settings import Settings
from millrace.node.publish import publisher
from millrace.node.publish.definition import publish
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import rows_uri
from tests.failpoints import at_failpoints
from tests.node.publish.published_maker import PublishedMaker

POINTS = ("publish.planned", "publish.vectors", "publish.checked", "publish.committed", "publish.indexed")
COMMITTED = POINTS[3:]


class _Died(BaseException):
    """Ends the publisher where it stands."""


@pytest.fixture(autouse=True)
def indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every collection has a key index once a published row is deleted."""
    monkeypatch.setattr(publisher, "INDEX_FROM_ROWS", 1)


@pytest.fixture
def made(settings: Settings) -> PublishedMaker:
    """A published collection with news: rows, an upsert of published rows, joined files."""
    made = PublishedMaker(settings)
    for number in range(4):
        made.write(range(number, number + 6), f"v{number}")
        made.flush()
        made.publish()
    made.write(range(3, 12), "new")
    made.delete([0, 4])
    made.flush()
    made.fold()
    return made


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("point", POINTS)
def test_a_publisher_that_dies_is_followed_by_the_next(made: PublishedMaker, point: str) -> None:
    before = made.table()
    assert before is not None

    def die(name: str) -> None:
        if name == point:
            raise _Died

    with pytest.raises(_Died), at_failpoints(die):
        made.publish()
    table = made.table()
    assert table is not None
    assert table.version == before.version + (point in COMMITTED)
    made.check()
    made.publish()
    made.check()
    final = made.table()
    assert final is not None
    assert final.version == before.version + 1, "nothing is published twice"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("point", POINTS[:3])
def test_of_two_publishers_one_is_fenced_and_plans_again(made: PublishedMaker, point: str) -> None:
    seen: Counter[str] = Counter()

    def other(name: str) -> None:
        seen[name] += 1
        if name == point and seen[name] == 1:
            made.write([20, 3], "between")
            made.flush()
            made.publish()

    with at_failpoints(other):
        made.publish()
    assert seen["publish.planned"] >= 2, "it was planned again"
    made.check()
    table = made.table()
    assert table is not None
    for version in range(1, table.version + 1):
        made.check(version=version)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("point", ["publish.checked", "publish.planned"])
def test_files_may_be_joined_and_rows_deleted_while_a_publish_is_under_way(made: PublishedMaker, point: str) -> None:
    # moonlink#1834: a delete that was stored while its file was compacted was lost, and the row returned.
    done = []

    def meanwhile(name: str) -> None:
        if name == point and not done:
            done.append(name)
            made.delete([5, 6])
            for number in range(8):
                made.write([100 + number], "small")
                made.flush()
            made.fold()

    with at_failpoints(meanwhile):
        made.publish()
    made.check()
    made.publish()
    made.check()


def test_rows_that_a_rewrite_lost_are_not_published(made: PublishedMaker) -> None:
    made.publish()
    table = table_at(rows_uri(made.settings, 1))
    file = next(each for each in table.describe_files() if each.rows > 1)
    _replace_by_part(made, file.path)
    before = made.table()
    with pytest.raises(PublishedRowsDiffer, match="Nothing was published"):
        made.publish()
    after = made.table()
    assert before is not None
    assert after is not None
    assert after.version == before.version
    assert publish(made.settings, 1, confirm=made.confirm, anew=True)
    made.check()


def _replace_by_part(made: PublishedMaker, path: str) -> None:
    """Replace a file of the rows table by one without its last row, as no rewrite may."""
    from millrace.storage.commit import CommitPart, commit_fenced
    from millrace.storage.file_sink import FileSink
    from millrace.tables.rewrite.rewrite import merge_job

    table = table_at(rows_uri(made.settings, 1))
    job = merge_job(table, ("id",))
    file = next(each for each in table.describe_files() if each.path == path)
    rows = table.read(path)
    sink = FileSink.at(job.uri, rows.schema, job.stats)
    # The first row of the file that readers see is left out.
    live = {row["body"] for row in made.read(made.maker.last_tick("p0")).to_pylist()}
    lost = next(place for place, body in enumerate(rows["body"].to_pylist()) if body in live)
    kept = [place for place in range(rows.num_rows) if place != lost]
    sink.write(rows.take(kept), dict(file.partition))
    commit_fenced(table, [CommitPart(sink.finish(), [path])], data_change=False)
