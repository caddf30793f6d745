"""Compaction that dies at any point, or meets the flusher or another compaction at any point,
loses no row and doubles none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

import millrace
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.message import builders
from millrace.node.flush.definition import flush_to_end
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.report import CompactionReport
from millrace.operations.compaction.run import compact
from millrace.storage.table import open_table
from millrace.tables.collections.data_tables import FOLDED_APP, deletes_uri, rows_uri
from millrace.tables.collections.flush_tables import read_segments
from millrace.tables.read.arrow import read_arrow
from tests.crash.test_flusher_crash_points import Deployment, die, stopping_at
from tests.crash.test_flusher_crash_points import _Died as Died
from tests.failpoints import at_failpoints
from tests.operations.test_compaction_keeps_reads import accounted_for
from tests.tables.wal_maker import Collection, WalMaker

PARAMS = CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum=False)


class Filled(Deployment):
    """Three flushes of rows, deletes and flushed segments on two PChannels, and WAL
    behind them that is not flushed yet.
    """

    def __init__(self, settings: Settings) -> None:
        maker = WalMaker(settings)
        maker.open()
        collection = Collection(maker)
        collection.create()
        for number in range(4):
            for vchannel in collection.vchannels:
                keys = collection.keys_of(vchannel, 6)
                rows: dict[str, list[object]] = {"id": list(keys), "body": [f"{number}:{key}" for key in keys]}
                collection.append(vchannel, collection.insert(rows, vchannel=vchannel))
                collection.append(vchannel, collection.delete(keys[number : number + 2], vchannel=vchannel))
                collection.append(vchannel, builders.manual_flush(vchannel=vchannel, collection_id=1, term=1))
            maker.commit()
            if number < 3:
                flush_to_end(settings)
        assert not maker.rejected
        self.settings = settings
        self.reachable = min(maker.last_tick(name) for name in maker.pchannels)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return Filled(Settings(data_dir=tmp_path_factory.mktemp("wal") / "data"))


def rows(settings: Settings, tick: int | None = None) -> Counter[tuple[Any, ...]]:
    return Counter((row["id"], row["body"]) for row in read_arrow(settings, 1, at=tick).to_pylist())


def places(filled: Filled, folder: Path) -> list[str]:
    """Every place a clean run comes by."""
    names: list[str] = []
    with at_failpoints(names.append):
        compact(filled.copy(folder), PARAMS)
    return names


def left_to_fold(settings: Settings) -> int:
    """Deletes that are folded in and there nevertheless."""
    table = DeltaTable(str(Path(rows_uri(settings, 1))))
    deletes = DeltaTable(str(Path(deletes_uri(settings, 1)))).to_pyarrow_dataset().to_table()
    return deletes.filter(pc.less_equal(deletes["_time_tick"], table.transaction_version(FOLDED_APP) or 0)).num_rows


@pytest.mark.slow
def test_what_is_compacted_is_smaller_and_reads_the_same(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    before = rows(settings)
    report = compact(settings, PARAMS)
    [work] = report.collections
    assert (work.rows.files_removed, work.rows.files_added) == (6, 1)
    assert work.rows.rows_removed > 0
    assert work.deletes.rows_removed == work.deletes_foldable > 0
    assert left_to_fold(settings) == 0
    assert rows(settings) == before
    again = compact(settings, PARAMS)
    assert not again.collections[0].rows.files_removed
    assert again.segments_joined == 0
    assert accounted_for(settings).folded == work.rows.rows_removed


def test_a_dry_run_says_the_same_and_changes_nothing(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    versions = [DeltaTable(str(path)).version() for path in tables(settings)]
    said = compact(settings, PARAMS.model_copy(update={"dry_run": True}))
    assert [DeltaTable(str(path)).version() for path in tables(settings)] == versions
    done = compact(settings, PARAMS)
    for each in (said, done):
        assert each.collections[0].rows.small_files == done.collections[0].rows.files_removed
        assert each.collections[0].deletes_foldable == done.collections[0].deletes_foldable
    assert said.segments_joined == done.segments_joined > 0


def tables(settings: Settings) -> list[Path]:
    return [
        Path(rows_uri(settings, 1)),
        Path(deletes_uri(settings, 1)),
        Path(settings.segments_uri),
        Path(settings.checkpoints_uri),
    ]


@pytest.mark.slow
def test_a_compaction_that_dies_at_any_point_is_made_good_by_the_next(filled: Filled, tmp_path: Path) -> None:
    names = places(filled, tmp_path / "names")
    assert {"compact.base", "compact.replaced", "compact.folded", "compact.segments"} <= set(names)
    for number, name in enumerate(names):
        settings = filled.copy(tmp_path / str(number))
        before = rows(settings)
        with pytest.raises(Died), at_failpoints(stopping_at(number, die)):
            compact(settings, PARAMS)
        assert rows(settings) == before, f"read after {name}"
        flush_to_end(settings)
        compact(settings, PARAMS)
        assert rows(settings) == before, f"died at {name} ({number})"
        accounted_for(settings)
        assert left_to_fold(settings) == 0, f"died at {name}: deletes are left"
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.slow
def test_a_flusher_at_any_point_of_a_compaction_is_not_held_up_and_not_undone(filled: Filled, tmp_path: Path) -> None:
    for number, name in enumerate(places(filled, tmp_path / "names")):
        settings = filled.copy(tmp_path / str(number))
        before = rows(settings)
        with at_failpoints(stopping_at(number, partial(flush_to_end, settings))):
            report = compact(settings, PARAMS)
        assert not report.collections[0].rows.given_up, f"flusher at {name} ({number})"
        assert rows(settings) == before, f"flusher at {name} ({number})"
        assert accounted_for(settings).folded > 0
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.slow
def test_a_compaction_at_any_point_of_a_flush_fences_no_flusher(filled: Filled, tmp_path: Path) -> None:
    names: list[str] = []
    with at_failpoints(names.append):
        flush_to_end(filled.copy(tmp_path / "names"))
    for number, name in enumerate(names):
        settings = filled.copy(tmp_path / str(number))
        before = rows(settings)
        with at_failpoints(stopping_at(number, partial(compact, settings, PARAMS))):
            reached = flush_to_end(settings)
        assert set(reached) == {"p0", "p1"}, f"compaction at {name} ({number})"
        assert rows(settings) == before, f"compaction at {name} ({number})"
        accounted_for(settings)
        shutil.rmtree(tmp_path / str(number))


@pytest.mark.slow
def test_of_two_compactions_at_once_one_gives_up_and_leaves_no_file(filled: Filled, tmp_path: Path) -> None:
    for number, name in enumerate(places(filled, tmp_path / "names")):
        settings = filled.copy(tmp_path / str(number))
        before = rows(settings)
        with at_failpoints(stopping_at(number, partial(compact, settings, PARAMS))):
            compact(settings, PARAMS)
        assert rows(settings) == before, f"another compaction at {name} ({number})"
        accounted_for(settings)
        table = DeltaTable(str(Path(rows_uri(settings, 1))))
        assert table.transaction_version(FOLDED_APP)
        named = {Path(uri).name for version in range(table.version() + 1) for uri in files_at(settings, version)}
        there = {file.name for file in Path(rows_uri(settings, 1)).glob("_date=*/*.parquet")}
        # Where a commit was on its way already, its files are left for VACUUM: they might have been named.
        assert there == named if name != "commit.checked" else there >= named, (
            f"another compaction at {name} ({number})"
        )
        shutil.rmtree(tmp_path / str(number))


def files_at(settings: Settings, version: int) -> list[str]:
    return DeltaTable(str(Path(rows_uri(settings, 1))), version=version).file_uris()


def test_a_fold_between_any_two_tables_that_a_read_opens_changes_nothing(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        settings = filled.copy(tmp_path / str(number))
        before = rows(settings)
        opened: list[Path] = []

        def open_late(path: Path) -> DeltaTable | None:
            if len(opened) == number:  # noqa: B023
                opened.append(path)  # noqa: B023
                compact(settings, PARAMS)  # noqa: B023
            opened.append(path)  # noqa: B023
            return open_table(path)

        with monkeypatch.context() as patch:
            patch.setattr("millrace.tables.read.open_tables.open_table", open_late)
            assert rows(settings) == before, f"folded before the read opened {opened[number]}"
        assert accounted_for(settings).folded or number >= len(opened)


def test_small_segments_are_joined_to_the_first_and_a_drop_finds_it(filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    path = Path(settings.segments_uri)
    before = read_segments(open_table(path)).to_pylist()
    report = compact(settings, PARAMS)
    after = read_segments(open_table(path)).to_pylist()
    assert report.segments_joined == 4
    for vchannel in ("p0_1v0", "p1_1v1"):
        mine = [row for row in before if row["vchannel"] == vchannel]
        first, *others = [row for row in after if row["vchannel"] == vchannel]
        assert first["state"] == "flushed"
        assert first["rows"] == sum(row["rows"] for row in mine)
        assert first["bytes"] == sum(row["bytes"] for row in mine)
        assert {row["merged_into"] for row in others if row["state"] == "dropped"} == {first["segment_id"]}
    assert sum(row["rows"] for row in after if row["state"] != "dropped") == sum(row["rows"] for row in before)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("compact.written", marks=pytest.mark.slow),
        pytest.param("compact.base", marks=pytest.mark.slow),
        "compact.replaced",
        "compact.folded",
    ],
)
def test_a_killed_process_leaves_what_the_next_one_completes(place: str, filled: Filled, tmp_path: Path) -> None:
    settings = filled.copy(tmp_path)
    before = rows(settings)
    code = (
        "from millrace.operations.compaction.run import compact; from millrace.base.settings import Settings;"
        "from millrace.operations.compaction.declaration import CompactionParams;"
        f"compact(Settings.load(), CompactionParams.parse({PARAMS.model_dump()!r}))"
    )
    env = {**os.environ, **settings.environment(), VARIABLE: place}
    env["PYTHONPATH"] = str(Path(millrace.__file__).parents[1])
    ended = subprocess.run([sys.executable, "-c", code], env=env, check=False, capture_output=True, timeout=120)
    assert ended.returncode == -9, ended.stderr.decode()
    assert rows(settings) == before
    report: CompactionReport = compact(settings, PARAMS)
    assert not report.collections[0].rows.given_up
    assert rows(settings) == before
    accounted_for(settings)
