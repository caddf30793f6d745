"""A read on top of a published version is what the model says, and costs what came since that version."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.node.publish.definition import publish
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.rpc.selection import Selection
from millrace.storage.local import local_path
from millrace.storage.table import TableHandle, table_at
from millrace.tables.collections.data_tables import deletes_uri, earliest_readable_tick, rows_uri
from millrace.tables.key_index.index import KeyIndex
from millrace.tables.read import arrow
from millrace.tables.read.arrow import count_rows, read_arrow, read_pieces
from millrace.tables.read.plan import ReadPlan, plan_read
from tests.failpoints import at_failpoints
from tests.laws.profile import examples, nightly_example, spread
from tests.node.publish.published_maker import PublishedMaker, rows_in
from tests.node.publish.test_published_reads import AHEAD, FOLDED, WITH_PUBLISHING, published
from tests.tables.read.test_at_tick import ACROSS, IMPORTS, PARTITIONS, as_counter, tick_everywhere
from tests.tables.read_model import do, expected
from tests.tables.wal_maker import SCHEMA

PARAMS = CompactionParams(min_files=2, fold="always", vacuum=True)
KILLS = ("publish.planned", "publish.vectors", "publish.checked", "publish.committed", "publish.indexed")
STEPS = st.one_of(WITH_PUBLISHING, WITH_PUBLISHING, st.tuples(st.just("kill"), st.sampled_from(KILLS)))
KILLED = [step for place in KILLS for step in (("upsert", [0, 1, 2], 1, 0), ("wal_commit", 0), ("kill", place))]


class _Died(BaseException):
    """Ends the publisher where it stands."""


def run(made: PublishedMaker, operation: tuple[Any, ...], number: int) -> None:
    """Do one step."""
    match operation:
        case ["wal_commit", _]:
            made.maker.commit()
        case ["flush", percent]:
            made.flush(percent=percent)
        case ["publish", _]:
            made.publish()
        case ["kill", place]:

            def die(name: str) -> None:
                if name == place:
                    raise _Died

            made.flush()
            try:
                with at_failpoints(die):
                    made.publish()
            except _Died:
                pass
        case ["fold", _]:
            made.fold()
        case ["compact", percent]:
            compact(made.settings, PARAMS, history=made.maker.tick_at(percent))
        case _:
            do(made.collection, operation, number)


def check(made: PublishedMaker, first: int, step: int) -> int:
    """Check reads at some of the ticks that can be read. Returns how many of them had a published base."""
    maker = made.maker
    rows = local_path(rows_uri(made.settings, 1))
    base = 0 if rows is None or not rows.exists() else earliest_readable_tick(table_at(rows))
    inside = [tick for tick in maker.readable_ticks() if tick >= base]
    based = 0
    for tick in spread(step, inside, first=first):
        wanted = expected(maker, tick, SCHEMA)
        assert as_counter(read_arrow(made.settings, 1, at=tick)) == wanted, f"at {tick}"
        plan = plan_read(made.settings, 1, at=tick)
        based += plan.base is not None
        pieces = list(read_pieces(plan, max_bytes=1, with_ticks=True))
        assert as_counter(pa.concat_tables(pieces)) == wanted, f"at {tick}, in pieces"
        assert count_rows(plan) == wanted.total()
        some = read_arrow(made.settings, 1, at=tick, selection=Selection(columns=("body",), where="id < 3"))
        assert sorted(some["body"].to_pylist()) == sorted(row[1] for row in wanted.elements() if row[0] < 3)
        some = read_arrow(made.settings, 1, at=tick, selection=Selection(where="id in (1, 4, 5)"))
        assert as_counter(some) == Counter(row for row in wanted.elements() if row[0] in (1, 4, 5))
    return based


@example(FOLDED, True, 0)
@nightly_example(AHEAD, True, 1)
@example([*AHEAD, *KILLED], False, 0)
@nightly_example(published(PARTITIONS), True, 0)
@nightly_example(published(ACROSS), False, 0)
@example([*published(IMPORTS), ("compact", 60), ("upsert", [1, 2], 1, 0), ("fold", 0)], True, 0)
@given(st.lists(STEPS, max_size=30), st.booleans(), st.integers(0, 4))
@examples(4)
def test_a_read_on_a_published_version_is_what_the_model_says(
    operations: list[tuple[Any, ...]], indexed: bool, first: int
) -> None:
    """Reads at any tick, whatever was published, killed, folded, compacted and removed in between."""
    folder = Path(tempfile.mkdtemp())
    try:
        made = PublishedMaker(Settings(data_dir=folder / "data"))
        if indexed:
            KeyIndex.open(made.settings.key_index_path(1)).request()
        for number, operation in enumerate(operations):
            run(made, operation, number)
            if operation[0] in ("fold", "compact", "kill"):
                made.maker.commit()
                check(made, 0, 1 << 30)
        for last in (("wal_commit", 0), ("upsert", [1], 1, 0), ("wal_commit", 0)):
            run(made, last, 99)
        check(made, first, 5)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def made(settings: Settings) -> PublishedMaker:
    """A published collection with 60 rows in three files, of which 20 were replaced, and the index."""
    found = PublishedMaker(settings, vchannels=2)
    KeyIndex.open(settings.key_index_path(1)).request()
    for part in range(3):
        found.write(range(part, 60, 3), "old")
        found.flush()
    found.write(range(20), "new")
    found.flush()
    found.publish()
    return found


def reads(made: PublishedMaker, **named: Any) -> pa.Table:
    return read_arrow(made.settings, 1, confirmed=made.maker.confirmed(), **named)


class Counted:
    """What reads take of the deletes table, and rows that they judge by their keys."""

    def __init__(self, made: PublishedMaker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.deletes: list[int] = []
        """The ticks of the deletes that were read."""
        self.judged = 0
        uri = table_at(deletes_uri(made.settings, 1)).uri
        read, scan, mask = TableHandle.read_rows, TableHandle.scan_rows, arrow.deleted_mask

        def read_rows(table: TableHandle, *given: Any, **named: Any) -> pa.Table:
            rows = read(table, *given, **named)
            self.deletes += rows["_time_tick"].to_pylist() if table.uri == uri else []
            return rows

        def scan_rows(table: TableHandle, *given: Any, **named: Any) -> Iterator[pa.RecordBatch]:
            assert table.uri != uri
            yield from scan(table, *given, **named)

        def deleted_mask(rows: pa.Table, *given: Any) -> Any:
            self.judged += rows.num_rows
            return mask(rows, *given)

        monkeypatch.setattr(TableHandle, "read_rows", read_rows)
        monkeypatch.setattr(TableHandle, "scan_rows", scan_rows)
        monkeypatch.setattr(arrow, "deleted_mask", deleted_mask)


def test_a_read_takes_no_delete_of_before_the_published_version(
    made: PublishedMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(made, monkeypatch)
    assert sorted(reads(made)["id"].to_pylist()) == list(range(60))
    assert counted.deletes == []
    assert counted.judged == 0
    tick = made.table().tick  # type: ignore[union-attr]
    made.delete([3])
    made.write([30], "newest")
    made.flush()
    found = reads(made, selection=Selection(columns=("body",)))
    assert found.num_rows == 59
    assert pc.sum(pc.starts_with(found["body"], "newest")).as_py() == 1
    assert len(counted.deletes) == 2, "one delete, one upsert"
    assert min(counted.deletes) > tick
    assert counted.judged <= 1, "the index finds the rows of published files, by no look at their keys"


class Opened:
    """The files of which reads take rows, and the rows that they take by position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scanned: list[str] = []
        self.taken: list[tuple[str, int]] = []
        scan, read, take = TableHandle.scan_rows, TableHandle.read_rows, TableHandle.take_rows

        def scan_rows(table: TableHandle, names: Any, *given: Any, **named: Any) -> Iterator[pa.RecordBatch]:
            self.scanned.extend(names)
            yield from scan(table, names, *given, **named)

        def read_rows(table: TableHandle, names: Any, *given: Any, **named: Any) -> pa.Table:
            self.scanned.extend(names if "deletes" not in table.uri else ())
            return read(table, names, *given, **named)

        def take_rows(table: TableHandle, name: str, positions: Any, **named: Any) -> tuple[pa.Table, int]:
            self.taken.append((name, len(positions)))
            return take(table, name, positions, **named)

        monkeypatch.setattr(TableHandle, "scan_rows", scan_rows)
        monkeypatch.setattr(TableHandle, "read_rows", read_rows)
        monkeypatch.setattr(TableHandle, "take_rows", take_rows)


@pytest.mark.parametrize("where", ["id = 31", "31 = id", "body != 'x' and id in (31)"])
@pytest.mark.parametrize("max_bytes", [None, 1 << 20])
def test_a_read_of_keys_takes_their_rows_alone(
    made: PublishedMaker, monkeypatch: pytest.MonkeyPatch, where: str, max_bytes: int | None
) -> None:
    """No bound excludes a file: the keys of each lie between those of the others."""
    opened = Opened(monkeypatch)
    plan = plan_read(made.settings, 1, confirmed=made.maker.confirmed())
    found = pa.concat_tables(read_pieces(plan, selection=Selection(where=where), max_bytes=max_bytes))
    assert found.to_pylist() == [{"id": 31, "body": "old:31"}]
    assert (opened.scanned, [rows for _, rows in opened.taken]) == ([], [1])
    assert plan.rows is not None
    assert len(plan.rows.live_files()) == 4


def test_a_read_of_keys_takes_no_row_that_is_masked_or_deleted_since(
    made: PublishedMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.delete([31])
    made.flush()
    opened = Opened(monkeypatch)
    found = reads(made, selection=Selection(where="id in (3, 31, 45)"))
    assert sorted(found.to_pylist(), key=str) == [{"id": 3, "body": "new:3"}, {"id": 45, "body": "old:45"}]
    assert opened.scanned == []
    assert sum(rows for _, rows in opened.taken) == 2, "of the row in the files of before, the vector tells"


def test_a_read_of_keys_of_a_collection_without_deletes_uses_the_index(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PublishedMaker(settings, vchannels=1)
    KeyIndex.open(settings.key_index_path(1)).request()
    for part in range(3):
        made.write(range(part, 60, 3), "old", upsert=False)
        made.flush()
    made.publish()
    opened = Opened(monkeypatch)
    assert reads(made, selection=Selection(where="id = 31")).to_pylist() == [{"id": 31, "body": "old:31"}]
    assert (opened.scanned, [rows for _, rows in opened.taken]) == ([], [1])


@pytest.mark.parametrize(
    ("where", "files"),
    [("body = 'b:25'", 1), ("body >= 'b' and id > 3", 2), ("body in ('a:1', 'c:41')", 2), ("body < 'a'", 0)],
)
def test_a_read_opens_the_files_whose_published_bounds_allow_a_row(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, where: str, files: int
) -> None:
    """Of a column that is no key. A file that was flushed since has no published bounds."""
    made = PublishedMaker(settings, vchannels=1)
    for start, name in ((0, "a"), (20, "b"), (40, "c")):
        made.write(range(start, start + 20), name)
        made.flush()
    made.delete([7])
    made.flush()
    made.publish()
    opened = Opened(monkeypatch)
    found = rows_in(reads(made, selection=Selection(where=where)))
    assert len(opened.scanned) == files
    assert found == rows_in(reads(made, selection=Selection(where=where), use_published=False))
    made.write([30], "a")
    made.flush()
    opened.scanned.clear()
    reads(made, selection=Selection(where=where))
    assert len(opened.scanned) == files + 1


def test_a_read_in_the_past_takes_the_deletes_since_the_version_of_then(
    made: PublishedMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = made.table().tick  # type: ignore[union-attr]
    for number in range(3):
        made.write([number], "later")
        made.flush()
        made.publish()
    wanted = rows_in(reads(made, at=then + 1, use_published=False))
    counted = Counted(made, monkeypatch)
    assert rows_in(reads(made, at=then + 1)) == wanted
    assert counted.deletes == []


def test_a_read_judges_the_rows_of_a_file_whose_vector_is_gone(
    made: PublishedMaker, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = rows_in(reads(made, use_published=False))
    for path in (made.folder / "_rows" / "_vectors").iterdir():
        path.unlink()
    assert rows_in(reads(made)) == wanted
    assert "judges the rows" in caplog.text


def test_a_row_that_is_masked_because_it_was_not_visible_yet_is_there_at_its_tick(settings: Settings) -> None:
    """Its PChannel was ahead of the other one, which decided the published tick. A deleted row beside it stays away."""
    made = PublishedMaker(settings)
    early, late = made.collection.keys_of(made.collection.vchannels[0], 2)
    made.write([early], "early")
    made.delete([early])
    tick_everywhere(made.maker)
    made.write([late], "late")
    flush_to_end(settings)
    tick = publish(settings, 1, confirm=lambda names: {})
    table = made.table()
    assert table is not None
    assert (table.row_count, len(table.files)) == (0, 1), "both rows are masked"
    assert reads(made, at=tick).num_rows == 0
    assert reads(made)["body"].to_pylist() == [f"late:{late}"]


def test_a_plan_keeps_the_published_version_that_it_began_with(made: PublishedMaker) -> None:
    def planned() -> ReadPlan:
        return plan_read(made.settings, 1, confirmed=made.maker.confirmed())

    plan = planned()
    wanted = rows_in(pa.concat_tables(read_pieces(plan)))
    made.write(range(10, 40), "later")
    made.flush()
    made.publish()
    assert rows_in(pa.concat_tables(read_pieces(plan))) == wanted
    assert rows_in(pa.concat_tables(read_pieces(planned()))) != wanted
