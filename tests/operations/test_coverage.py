"""An operation opens the tables that changed since its last run, and no other: its cost follows the change (law 11)."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.node.publish.definition import publish_to_end
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.manifest import BackupManifest
from millrace.operations.backup.run import BackupReport, backup
from millrace.operations.backup.verify import verify_backup
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import CheckpointReport, checkpoint
from millrace.operations.checkpoint.table_sync import sync_tables
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.need import need
from millrace.operations.compaction.run import compact
from millrace.operations.compaction.vacuum import reclaimable_bytes, vacuum
from millrace.operations.coverage import FOLDER, Coverage
from millrace.operations.quality import collection_frames, small_collections
from millrace.operations.quality import run as quality
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult
from millrace.operations.quality.collection_frames import StoredCollection
from millrace.operations.quality.declaration import QualityParams
from millrace.operations.quality.frames import ValidationInput
from millrace.operations.quality.ranges import Ranges, TickRange
from millrace.operations.quality.small_collections import batches, read_small
from millrace.operations.quality.snapshot import take_snapshot
from millrace.operations.recovery.diagnose import diagnose
from millrace.operations.recovery.findings import RecoveryFinding
from millrace.runtime.progress import Progress
from millrace.storage import table as tables
from millrace.storage.commit import CommitPart, commit_fenced
from millrace.storage.published import PublishedTable
from millrace.storage.store import store_at, table_name
from millrace.storage.table import change_mark, create_table, table_at
from tests.operations.log_maker import LogMaker, Things
from tests.tables.wal_maker import Collection

HOUR = 3600.0
Opened = Callable[[], list[str]]


class Many:
    """A deployment of many collections with a row each, on one PChannel."""

    def __init__(self, folder: Path, count: int) -> None:
        self.settings = Settings(data_dir=folder / "data")
        self.maker = LogMaker(self.settings, pchannels=("p0",))
        self.collections = [Collection(self.maker, collection_id=number + 1, vchannels=1) for number in range(count)]
        self.maker.open()
        self.next = 0
        for each in self.collections:
            each.create()
        self.insert(*self.collections)

    def insert(self, *collections: Collection, delete: bool = False) -> None:
        """Insert one more row into each, and flush."""
        for each in collections:
            (name,) = each.vchannels
            self.next += 1
            each.append(name, each.insert({"id": [self.next], "body": ["x"]}, vchannel=name))
            if delete:
                each.append(name, each.delete([self.next], vchannel=name))
        self.maker.commit()
        flush_to_end(self.settings)
        settle(self.settings)

    def checkpoint(self, **params: object) -> CheckpointReport:
        return checkpoint(self.settings, self.maker.log, CheckpointParams.parse(params), Progress())


def settle(settings: Settings) -> None:
    """Let the last commits be some seconds old, as they are when the next operation runs."""
    for path in settings.data_dir.rglob("_delta_log"):
        if time.time() - path.stat().st_mtime < 60:
            before = path.stat().st_mtime_ns - 60 * 10**9
            os.utime(path, ns=(before, before))


@pytest.fixture(scope="module", params=[8, pytest.param(200, marks=pytest.mark.slow)])
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Many]:
    made = Many(tmp_path_factory.mktemp("many"), request.param)
    yield made
    made.maker.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Which collections' tables were opened since the last call."""
    found: list[str] = []
    opens = tables._delta

    def counting(store: object, version: int | None) -> object:
        parts = store.uri.split("/")  # type: ignore[attr-defined]
        found.append("/".join(parts[-3:] if parts[-1] == "_rows" else parts[-2:]))
        return opens(store, version)  # type: ignore[arg-type]

    monkeypatch.setattr(tables, "_delta", counting)

    def since() -> list[str]:
        names = [name for name in found if name.startswith(("tables/", "deletes/"))]
        found.clear()
        return names

    return since


def test_a_checkpoint_opens_the_tables_that_changed(many: Many, opened: Opened) -> None:
    assert many.checkpoint().synced_files > len(many.collections)
    assert len(opened()) >= len(many.collections)
    settle(many.settings)
    report = many.checkpoint()
    assert opened() == []
    assert report.tables - report.unchanged_tables <= 3
    assert f"{report.unchanged_tables:,} of {report.tables:,} tables unchanged" in report.sentence
    many.insert(many.collections[6])
    opened()
    many.checkpoint()
    assert set(opened()) == {"tables/7/_rows"}
    many.checkpoint(full=True)
    assert len(set(opened())) >= len(many.collections)


def test_compaction_and_its_need_open_the_tables_that_changed(many: Many, opened: Opened) -> None:
    params, count = CompactionParams(), len(many.collections)
    first = need(many.settings, params)
    assert len(set(opened())) >= len(many.collections)
    assert (first.known_collections, len(first.collections)) == (len(many.collections), len(many.collections))
    assert need(many.settings, params).collections == []
    assert opened() == []
    compact(many.settings, params)
    opened()  # VACUUM has records of its own
    report = compact(many.settings, params)
    assert opened() == []
    assert report.sentence == f"There was nothing to compact; {count} of {count} collections unchanged."
    many.insert(many.collections[2])
    opened()
    changed = need(many.settings, params)
    assert set(opened()) == {"tables/3/_rows", "deletes/3"}
    assert [each.collection_id for each in changed.collections] == [3]
    need(many.settings, CompactionParams(full=True))
    assert len(set(opened())) >= len(many.collections)


def test_other_parameters_and_settings_make_every_table_count_as_changed(many: Many, opened: Opened) -> None:
    need(many.settings, CompactionParams())
    need(many.settings, CompactionParams())
    opened()
    assert len(need(many.settings, CompactionParams(min_files=2)).collections) == len(many.collections)
    assert len(need(replace(many.settings, history_hours=1.0), CompactionParams(min_files=2)).collections) == len(
        many.collections
    )
    opened()


def test_vacuum_opens_the_tables_that_changed(many: Many, opened: Opened) -> None:
    vacuum(many.settings, hours=24, full=True)
    settle(many.settings)
    vacuum(many.settings, hours=24)
    opened()
    done = vacuum(many.settings, hours=24)
    assert opened() == []
    assert (done.unchanged, done.files) == (done.tables, {})
    assert vacuum(many.settings, hours=48).unchanged == 0


def test_a_lost_or_damaged_record_costs_work_and_nothing_else(things: Things, opened: Opened) -> None:
    things.fill()
    settle(things.settings)
    sync_tables(things.settings)
    opened()
    path = things.settings.run_path / FOLDER / "checkpoint.json"
    whole = path.read_text()
    for text in ("", "{", "[]", '{"depends": 1}', whole.replace('"depends": "', '"depends": "0'), '{"tables": {}}'):
        path.write_text(text)
        assert sync_tables(things.settings).unchanged == 0, text
    assert sync_tables(things.settings).files == 0


def test_a_commit_right_after_the_mark_is_not_missed(tmp_path: Path) -> None:
    """The clock of a file system ticks every few milliseconds: two commits may leave the same timestamp."""
    settings = Settings(data_dir=tmp_path / "data")
    uri = str(tmp_path / "t")
    table = create_table(uri, pa.schema([pa.field("a", pa.int64())]), partition_by=[])
    covered = Coverage.load(settings, "mine")
    assert covered.look("t", uri) is None
    covered.record("t", note=1)
    covered.save()
    mark = change_mark(uri)
    assert mark is not None
    assert not mark.settled
    assert Coverage.load(settings, "mine").look("t", uri) is None
    log = tmp_path / "t" / "_delta_log"
    commit_fenced(table, [CommitPart()])
    os.utime(log, (mark.at, mark.at))  # as if both had happened in one tick of the clock
    assert Coverage.load(settings, "mine").look("t", uri) is None


def test_a_mark_is_taken_before_the_work(tmp_path: Path) -> None:
    """A commit while the operation works leaves the table changed."""
    settings = Settings(data_dir=tmp_path / "data")
    uri = str(tmp_path / "t")
    table = create_table(uri, pa.schema([pa.field("a", pa.int64())]), partition_by=[])
    log = tmp_path / "t" / "_delta_log"
    os.utime(log, (1, 1))
    covered = Coverage.load(settings, "mine")
    covered.look("t", uri)
    commit_fenced(table, [CommitPart()])  # another writer, meanwhile
    covered.record("t")
    covered.save()
    assert Coverage.load(settings, "mine").look("t", uri) is None
    os.utime(log, (2, 2))
    covered = Coverage.load(settings, "mine")
    covered.look("t", uri)
    covered.record("t", until=time.time() + HOUR)
    covered.save()
    assert Coverage.load(settings, "mine").look("t", uri) is not None
    assert Coverage.load(settings, "mine", ignore=True).look("t", uri) is None
    assert Coverage.load(settings, "mine", depends=2).look("t", uri) is None


def test_a_record_ends_at_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    covered = Coverage.load(settings, "mine")
    covered.look("gone", str(tmp_path / "gone"))
    covered.record("gone", until=time.time() + HOUR)
    covered.save()
    assert Coverage.load(settings, "mine").look("gone", str(tmp_path / "gone")) is not None
    later = time.time() + 2 * HOUR
    monkeypatch.setattr(time, "time", lambda: later)
    assert Coverage.load(settings, "mine").look("gone", str(tmp_path / "gone")) is None


def test_vacuum_opens_the_published_tables_that_changed(many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, found = many.settings, []
    real = PublishedTable.open

    def counting(store: Any, **options: Any) -> Any:
        found.append(store.uri.rpartition("/")[2])
        return real(store, **options)

    def publish() -> None:
        publish_to_end(settings, confirm=lambda names: {})
        settle(settings)
        monkeypatch.setattr(PublishedTable, "open", counting)
        found.clear()

    publish()
    vacuum(settings, hours=24)
    assert sorted(found, key=int) == [str(each.id) for each in many.collections]
    found.clear()
    vacuum(settings, hours=24)
    assert found == []
    many.insert(many.collections[4])
    publish()
    vacuum(settings, hours=24)
    assert found == ["5"]


def test_deletes_that_grow_old_are_folded_in_although_nothing_was_committed(things: Things) -> None:
    """What is to do follows from time, too: a record holds until the history limit reaches the next delete."""
    things.fill()
    settle(things.settings)
    params = CompactionParams(fold="always", min_files=100, vacuum=False, segments=False)
    early = compact(things.settings, params, history=1)
    assert [each.deletes_foldable for each in early.collections] == [0]
    assert compact(things.settings, params, history=2).collections == []
    late = compact(things.settings, params, history=1 << 62)
    assert [each.rows.rows_removed > 0 for each in late.collections] == [True]


def test_replaced_files_go_after_their_hours_although_nothing_was_committed(
    things: Things, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        things.fill(entries=1)
    compact(things.settings, CompactionParams(min_files=2, vacuum=False))
    settle(things.settings)
    assert vacuum(things.settings, hours=24).files == {}
    held = vacuum(things.settings, hours=24)
    assert held.unchanged >= 3
    assert reclaimable_bytes(things.settings, hours=24) == 0
    later = time.time() + 50 * HOUR  # the WAL keeps its files for two days
    monkeypatch.setattr(time, "time", lambda: later)
    # delta-rs has a clock of its own, so this says which tables are looked at again, not what is removed.
    assert vacuum(things.settings, hours=24).unchanged == 0


def test_a_table_that_is_gone_leaves_no_record(things: Things) -> None:
    things.fill()
    settle(things.settings)
    sync_tables(things.settings)
    shutil.rmtree(things.settings.data_dir / "tables" / "1")
    sync_tables(things.settings)
    records = json.loads((things.settings.run_path / FOLDER / "checkpoint.json").read_text())["tables"]
    assert sorted(records) == ["checkpoints", "deletes/1", "segments", "wal"]


def test_a_store_that_is_no_folder_is_known_by_its_newest_log_entry(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    table = create_table(uri, pa.schema([pa.field("a", pa.int64())]), partition_by=[])

    class Remote:
        def list(self, folder: str, *, age: float = 0.0) -> list[str]:
            return store_at(uri).list(folder, age=age)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "store_at", lambda _: Remote())
        first = change_mark(uri)
        patch.undo()
        commit_fenced(table_at(uri), [CommitPart(info={"a": 1})])
        patch.setattr(tables, "store_at", lambda _: Remote())
        second = change_mark(uri)
    assert first is not None
    assert second is not None
    assert first.text != second.text
    assert first.settled
    assert table_name(str(tmp_path), table.uri) == "t"


def test_quality_opens_and_checks_what_changed(many: Many, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Spark: small collections are read here, and a validator of the test's counts the checks."""
    checks: list[str] = []

    class Counting:
        def __init__(self, **_: object) -> None:
            pass

        def check(self, frame: ValidationInput, *, run_id: str) -> TableCheckResult:
            checks.append(frame.table)
            return TableCheckResult(frame.table, dict(frame.ranges), (), frame.collection_id)

        def write_docs(self) -> None:
            return None

    sessions: list[Frames] = []

    @contextmanager
    def session() -> Iterator[Any]:
        sessions.append(Frames())
        yield sessions[-1]

    monkeypatch.setattr(quality, "Validator", Counting)

    def run(**params: object) -> quality.QualityReport:
        chosen = QualityParams.parse({"tables": ["collections"], **params})
        checks.clear()
        sessions.clear()
        return quality.run(many.settings, chosen, Progress(), session_factory=session)

    count = len(many.collections)
    first = run()
    assert checks == ["collections/batch-0"], "all of them in one check"
    assert len([name for name in first.tables if name.startswith("collections/")]) == count
    assert len(set(opened())) >= count
    again = run()
    assert opened() == []
    assert (checks, sessions, again.unchanged_tables >= 2 * count) == ([], [], True)
    assert again.summary == "Nothing to check: no rows are newer than the last check."
    many.insert(many.collections[4])
    opened()
    changed = run()
    assert set(opened()) == {"tables/5/_rows", "deletes/5"}
    assert list(changed.tables) == ["collections/5"]
    assert changed.tables["collections/5"]["rows"] == 1
    run(full=True)
    assert len(set(opened())) >= count
    assert checks == [], "it looks at them, and finds no new rows"


def test_recovery_opens_what_changed_and_everything_once_a_day(
    many: Many, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(depth: str) -> list[RecoveryFinding]:
        return diagnose(many.settings, many.maker.log, depth=depth, stale_after=60, progress=Progress())

    assert look("full") == []
    assert len(set(opened())) >= len(many.collections)
    settle(many.settings)
    assert look("changed") == []
    opened()
    assert look("changed") == []
    assert opened() == []
    victim = next((many.settings.data_dir / "tables" / "2" / "_rows").rglob("*.parquet"))
    whole = victim.read_bytes()
    victim.unlink()
    try:
        assert look("changed") == [], "a disk that loses a file commits nothing"
        assert [each.kind for each in look("full")] == ["table_file_damaged"]
        assert [each.kind for each in look("changed")] == ["table_file_damaged"], "until nothing is wrong any more"
        victim.write_bytes(whole)
        assert look("changed") == []
        victim.unlink()
        later = time.time() + 25 * HOUR
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: later)
            assert [each.kind for each in look("changed")] == ["table_file_damaged"]
    finally:
        victim.write_bytes(whole)


def test_a_backup_opens_what_changed_and_has_all_of_it(many: Many, opened: Opened, tmp_path: Path) -> None:
    def make(**params: object) -> BackupReport:
        return backup(many.settings, many.maker.log, BackupParams.parse({"to": str(tmp_path), **params}), Progress())

    count = len(many.collections)
    first = make()
    settle(many.settings)
    assert (first.unchanged_tables, first.tables >= count) == (0, True)
    make()
    opened()
    again = make()
    assert opened() == []
    assert again.unchanged_tables >= count
    assert (again.files, again.bytes) == (first.files, first.bytes)
    assert verify_backup(Path(again.folder)).problems == ()
    manifests = [BackupManifest.read(Path(each.folder)) for each in (first, again)]
    assert manifests[0].files.keys() == manifests[1].files.keys()
    many.insert(many.collections[3])
    opened()
    changed = make()
    assert set(opened()) == {"tables/4/_rows"}
    assert changed.files > again.files
    assert verify_backup(Path(changed.folder)).problems == ()
    (Path(changed.folder) / "manifest.json").unlink()  # the previous backup is an older one now
    assert make().unchanged_tables == 0


def test_a_batch_that_fails_is_checked_one_by_one_and_the_result_names_the_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = Many(tmp_path, 3)
    checks: list[str] = []
    wrong = Check("row", "expect_something", {}, "a row is right")

    class Failing:
        def __init__(self, **_: object) -> None:
            pass

        def check(self, frame: ValidationInput, *, run_id: str) -> TableCheckResult:
            checks.append(frame.table)
            good = frame.table in ("collections/1", "collections/3")
            ranges = dict(frame.ranges)
            return TableCheckResult(frame.table, ranges, (CheckResult(wrong, good),), frame.collection_id)

        def write_docs(self) -> None:
            return None

    def rows_of(_: object, __: object, stored: StoredCollection, ranges: Ranges, *_checks: object) -> ValidationInput:
        name = f"collections/{stored.collection_id}"
        return ValidationInput(name, cast("Any", None), (), ranges, (), stored.collection_id)

    class Session:
        def createDataFrame(self, rows: pa.Table) -> pa.Table:
            assert sorted(rows["_collection_id"].to_pylist()) == [1, 2, 3]
            return rows

    monkeypatch.setattr(quality, "Validator", Failing)
    monkeypatch.setattr(collection_frames, "visible_rows", rows_of)
    try:
        params = QualityParams(tables=("collections",), data_docs=False)
        session = partial(nullcontext, cast("Any", Session()))
        report = quality.run(many.settings, params, Progress(), session_factory=session)
        assert checks == ["collections/batch-0", "collections/1", "collections/2", "collections/3"]
        assert [each.table for each in report.failed] == ["collections/2"]
        checks.clear()
        quality.run(many.settings, params, Progress(), session_factory=session)
        assert checks == ["collections/2"], "what failed is looked at again, the others have passed"
    finally:
        many.maker.close()


def test_collections_of_other_schemas_have_batches_of_their_own_and_large_ones_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = Many(tmp_path, 3)
    try:
        snapshot = take_snapshot(many.settings, Coverage.load(many.settings, "quality"))
        assert snapshot is not None
        ranges = {"p0": TickRange(0, snapshot.flushed_ticks["p0"])}
        small = [read_small(many.settings, each, ranges) for each in snapshot.collections.values()]
        found = [each for each in small if each is not None]
        assert [each.rows.num_rows for each in found] == [1, 1, 1]
        assert [len(each.members) for each in batches(found)] == [3]
        other = replace(found[1], rows=found[1].rows.append_column("more", pa.array([1])))
        assert sorted(len(each.members) for each in batches([found[0], other, found[2]])) == [1, 2]
        monkeypatch.setattr(small_collections, "BATCH_COLLECTIONS", 2)
        assert [len(each.members) for each in batches(found)] == [2, 1]
        keys = [each for each in batches(found)[0].frame(cast("Any", Frames())).checks if each.name == "key-unique"]
        assert keys[0].kwargs == {"column_list": ["_collection_id", "id"]}
        monkeypatch.setattr(small_collections, "SMALL_ROWS", 0)
        assert read_small(many.settings, snapshot.collections[1], ranges) is None
    finally:
        many.maker.close()


class Frames:
    """In place of a Spark session."""

    def createDataFrame(self, rows: pa.Table) -> pa.Table:
        return rows
