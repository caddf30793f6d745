"""The handle on a published table: what is committed is there once, and what fails leaves the table as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millrace
from millrace.base.errors import (
    CommitFenced,
    InvalidArgument,
    StoreCannotPublish,
    TableDamaged,
    TableUnavailable,
    UnsupportedVersion,
)
from millrace.storage.delta_log import LAST_CHECKPOINT_FILE, checkpoint_file, commit_file, first_commit, log_files
from millrace.storage.local import LocalStore
from millrace.storage.published import VECTOR_FOLDER, AddedFile, PublishedChange, PublishedTable
from millrace.storage.published_log import PHYSICAL_NAME
from millrace.storage.table import LogMaintenance
from tests.failpoints import at_failpoints
from tests.storage.published_world import FIRST_MS, SCHEMA, World, log_of, positions, tick_at
from tests.storage.shelf import Shelf, ShelfStore

ROOT = Path(__file__).resolve().parents[2]
SOON = LogMaintenance(checkpoint_commits=4, keep_commits=3)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def vector_files(world: World) -> set[str]:
    return {f"{VECTOR_FOLDER}/{name}" for name in world.store.list(VECTOR_FOLDER)}


def check(world: World, table: PublishedTable | None = None) -> None:
    """The handle, and one that opens the table now, say what the model says."""
    reopened = PublishedTable.open(world.store)
    assert reopened is not None
    for each in (reopened, world.table if table is None else table):
        assert each.version == len(world.versions) - 1
        shown = {path: frozenset(each.masked(path).tolist()) for path in each.files}
        assert shown == world.versions[-1]
        assert each.row_count == each.commit_info["rows"] == len(world.expected())
        assert each.schema.equals(world.schema)
        assert each._state == reopened._state


@pytest.mark.parametrize("seed", range(4))
def test_the_handle_shows_what_was_committed(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed=seed)
    follower = PublishedTable.open(world.store)
    assert follower is not None
    world.maintenance = SOON
    for step in range(30):
        world.change_at_random()
        if world.random.random() < 0.4 or step == 29:
            follower.refresh()
            check(world, follower)
    assert first_commit(world.store) > 20
    behind = PublishedTable.open(world.store, version=first_commit(world.store))
    assert behind is not None
    behind.refresh()
    check(world, behind)


def test_a_new_table_is_empty_and_exists_once(world: World, tmp_path: Path) -> None:
    check(world)
    again = PublishedTable.create(world.store, pa.schema([("other", pa.int8())]), collection_id=8)
    assert (again.collection_id, again.schema) == (7, world.schema)
    assert PublishedTable.open(LocalStore(tmp_path / "none")) is None
    assert (world.table.tick, world.table.version) == (0, 0)


def test_a_commit_has_its_tick_and_the_log_keeps_the_order_that_readers_need(world: World) -> None:
    first, second = world.write(world.make_rows(5)), world.write(world.make_rows(4))
    world.commit(ms=100, add=[first, second])
    world.commit(ms=100, mask={first.path: positions([0, 4]), second.path: positions([1])}, info={"rowsVersion": 9})
    old = [replace(each) for each in world.table.files.values()]
    world.commit(ms=90_000, mask={first.path: positions([0, 3, 4])}, remove=[second.path])
    infos = [action["commitInfo"] for version in range(4) for action in log_of(world.folder, version)[:1]]
    assert [each["inCommitTimestamp"] - FIRST_MS for each in infos[1:]] == [100, 101, 90_000]
    assert infos[2]["millrace"] == {
        "rowsVersion": 9, "tick": tick_at(100), "schemaVersion": 1, "collectionId": 7, "rows": 6,
        "vectorBytes": sum(vector.size_in_bytes for each in old if (vector := each.vector) is not None),
    }  # fmt: skip
    assert world.table.tick == tick_at(90_000)
    last = log_of(world.folder, 3)
    kinds = [next(iter(action)) for action in last]
    assert kinds == ["commitInfo", "txn", "remove", "remove", "add"]
    removed = {action["remove"]["path"]: action["remove"] for action in last if "remove" in action}
    # A remove without the old vector would remove another file than the live one.
    assert {each.path: removed[each.path]["deletionVector"] for each in old} == {
        each.path: each.vector.to_action() for each in old if each.vector is not None
    }
    (add,) = (action["add"] for action in last if "add" in action)
    stats = json.loads(add["stats"])
    assert (stats["numRecords"], stats["tightBounds"], add["deletionVector"]["cardinality"]) == (5, False, 3)
    assert add["path"] == first.path
    assert "=" in add["path"]
    assert set(stats["minValues"]) == {"id", "name", "at"}, "bounds of internal columns are left out"
    check(world)


def test_bounds_are_tight_if_the_files_writer_says_so_and_no_row_is_masked(world: World) -> None:
    def stats(*, tight: bool) -> str:
        return json.dumps({"numRecords": 4, "minValues": {"id": 1}, "maxValues": {"id": 9}, "tightBounds": tight})

    made = [
        replace(world.write(world.make_rows(4), masked=masked), stats=stats(tight=tight))
        for tight, masked in ((True, []), (True, [1]), (False, []))
    ]
    world.commit(add=made)
    found = [json.loads(world.table.files[each.path].stats or "")["tightBounds"] for each in made]
    assert found == [True, False, False]


def test_all_vectors_of_a_commit_are_in_one_file(world: World) -> None:
    files = [world.write(world.make_rows(4)) for _ in range(3)]
    world.commit(add=files)
    assert vector_files(world) == set()
    world.commit(mask={each.path: positions([1]) for each in files}, add=[world.write(world.make_rows(3), masked=[0])])
    assert len(vector_files(world)) == 1
    world.commit(mask={files[0].path: positions([])})
    assert len(vector_files(world)) == 1
    check(world)


def test_a_mask_that_was_and_stays_empty_is_no_action(world: World) -> None:
    # A remove and an add of one path without a vector is one file twice: delta-rs' checkpoint lost it.
    world.maintenance = LogMaintenance(checkpoint_commits=2)
    file = world.write(world.make_rows(4))
    world.commit(add=[file])
    world.commit(mask={file.path: positions([])})
    assert [next(iter(action)) for action in log_of(world.folder, 2)] == ["commitInfo", "txn"]
    check(world)


def test_a_rewrite_changes_no_data_for_those_who_follow_changes(world: World) -> None:
    old = world.write(world.make_rows(4), masked=[2])
    world.commit(add=[old])
    new = world.write([world.rows[old.path][at] for at in (0, 1, 3)])
    other = world.write(world.make_rows(1))
    world.commit(add=[new, other], remove=[old.path], rewrites=frozenset([old.path, new.path]))
    changes = {
        action[kind]["path"]: action[kind]["dataChange"]
        for action in log_of(world.folder, 2)
        for kind in ("add", "remove")
        if kind in action
    }
    assert changes == {old.path: False, new.path: False, other.path: True}
    check(world)


def test_a_change_that_does_not_fit_is_refused_and_leaves_nothing(world: World) -> None:
    file, new = world.write(world.make_rows(3)), world.write(world.make_rows(3))
    world.commit(add=[file])
    for change in (
        PublishedChange(tick_at(9), 1, add=[file]),
        PublishedChange(tick_at(9), 1, add=[new, new]),
        PublishedChange(tick_at(9), 1, remove=[new.path]),
        PublishedChange(tick_at(9), 1, mask={new.path: positions([0])}),
        PublishedChange(tick_at(9), 1, mask={file.path: positions([0])}, remove=[file.path]),
        PublishedChange(tick_at(9), 1, mask={file.path: positions([3])}),
        PublishedChange(tick_at(9), 1, mask={file.path: np.array([1, 1])}),
        PublishedChange(tick_at(9), 1, add=[replace(new, path="_rows/_date%3D2026-11-26/part-1.parquet")]),
        PublishedChange(tick_at(0), 1, add=[new]),
    ):
        with pytest.raises(InvalidArgument):
            world.table.commit(change)
    assert vector_files(world) == set()
    check(world)


def test_a_handle_that_is_behind_is_fenced_and_may_plan_again(world: World) -> None:
    file = world.write(world.make_rows(3))
    world.commit(add=[file])
    behind = PublishedTable.open(world.store)
    assert behind is not None
    world.commit(mask={file.path: positions([0])})
    before = vector_files(world)
    with pytest.raises(CommitFenced, match="first"):
        behind.commit(PublishedChange(tick_at(5), 1, mask={file.path: positions([1])}))
    assert vector_files(world) == before
    behind.refresh()
    assert behind.masked(file.path).tolist() == [0]
    behind.commit(PublishedChange(tick_at(5), 1, mask={file.path: positions([0, 1])}))
    world.table.refresh()
    assert world.table.masked(file.path).tolist() == [0, 1]


def test_the_loser_of_a_race_deletes_its_own_vectors_only(world: World) -> None:
    # trino#29361: a failed write cleaned up files of the winner.
    file = world.write(world.make_rows(3))
    world.commit(add=[file])
    rival = PublishedTable.open(world.store)
    assert rival is not None

    def win(name: str) -> None:
        if name == "publish.checked":
            world.commit(mask={file.path: positions([0])})

    with at_failpoints(win), pytest.raises(CommitFenced):
        rival.commit(PublishedChange(tick_at(9), 1, mask={file.path: positions([2])}))
    assert vector_files(world) == {world.table.files[file.path].vector.file}  # type: ignore[union-attr]
    check(world)


def test_a_handle_whose_version_was_trimmed_is_fenced(world: World) -> None:
    # The names after a trimmed version are free again, and a commit there is no part of the table.
    behind = PublishedTable.open(world.store)
    assert behind is not None
    world.maintenance = SOON
    for _ in range(12):
        world.commit(add=[world.write(world.make_rows(1))])
    assert first_commit(world.store) > 1
    with pytest.raises(CommitFenced, match="trimmed"):
        behind.commit(PublishedChange(tick_at(99), 1, add=[world.write(world.make_rows(1))]))
    assert world.store.size(commit_file(1)) is None
    behind.refresh()
    check(world, behind)


class Unlucky(LocalStore):
    """A folder whose puts fail, by a script: with or without an effect, and before or after others."""

    def __init__(self, uri: object, *faults: str, rival: Callable[[], object] = lambda: None) -> None:
        super().__init__(uri)
        self.faults = list(faults)
        self.rival = rival

    def put_if_absent(self, name: str, data: bytes) -> bool:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "overtaken":
            self.rival()
        if fault == "lost answer":
            super().put_if_absent(name, data)
        if fault in ("lost answer", "fails", "overtaken"):
            raise OSError("no answer")
        return super().put_if_absent(name, data)

    def read(self, name: str) -> bytes | None:
        if self.faults and self.faults[0] == "cannot read":
            self.faults.pop(0)
            raise OSError("cannot read")
        return super().read(name)


@pytest.mark.parametrize(
    "faults",
    [
        ("fails",),
        ("lost answer",),
        ("lost answer", "cannot read"),
        ("fails", "cannot read", "lost answer"),
        ("fails", "fails", "fails"),
    ],
)
def test_a_commit_without_an_answer_is_settled_by_reading_back(world: World, faults: tuple[str, ...]) -> None:
    file = world.write(world.make_rows(3))
    world.commit(add=[file])
    world.store = world.table.store = Unlucky(world.folder, *faults)
    world.commit(mask={file.path: positions([1])})
    assert not world.store.faults
    world.commit(mask={file.path: positions([1, 2])})
    check(world)


def test_a_commit_that_another_overtook_without_an_answer_is_fenced(world: World) -> None:
    file = world.write(world.make_rows(3))
    world.commit(add=[file])
    store = Unlucky(world.folder, "overtaken", rival=lambda: world.commit(mask={file.path: positions([0])}))
    rival = PublishedTable.open(store)
    assert rival is not None
    with pytest.raises(CommitFenced):
        rival.commit(PublishedChange(tick_at(9), 1, mask={file.path: positions([2])}))
    check(world)
    assert len(vector_files(world)) == 1


def test_a_store_that_stays_out_of_reach_is_a_typed_error_and_the_vectors_stay_for_the_sweep(world: World) -> None:
    file = world.write(world.make_rows(3))
    world.commit(add=[file])
    table = PublishedTable.open(Unlucky(world.folder, *["fails"] * 9))
    assert table is not None
    with pytest.raises(TableUnavailable, match="may have been committed"):
        table.commit(PublishedChange(tick_at(9), 1, mask={file.path: positions([2])}))
    # The commit may still arrive, so nothing of it is deleted yet.
    (left,) = vector_files(world)
    world.commit(mask={file.path: positions([0])})
    assert world.table.sweep_vectors() == [left]
    check(world)


def test_a_sweep_leaves_every_vector_that_a_version_in_the_log_names(world: World) -> None:
    files = [world.write(world.make_rows(4), masked=[at]) for at in range(3)]
    world.commit(add=files)
    for at in range(3):
        world.commit(mask={files[at].path: positions([at, 3])})
    assert len(vector_files(world)) == 4
    assert world.table.sweep_vectors() == []
    for version in range(1, 5):
        table = PublishedTable.open(world.store, version=version)
        assert table is not None
        assert {path: frozenset(table.masked(path).tolist()) for path in table.files} == world.versions[version]


def test_a_sweep_does_nothing_while_another_commits(world: World) -> None:
    file = world.write(world.make_rows(3))
    world.commit(add=[file])
    other = PublishedTable.open(world.store)
    assert other is not None
    swept: list[list[str]] = []
    with at_failpoints(lambda name: swept.append(other.sweep_vectors()) if name == "publish.vectors" else None):
        world.commit(mask={file.path: positions([1])})
    assert swept == [[]]
    check(world)


def test_expired_versions_release_their_vectors_and_files_and_the_log_goes_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000]
    monkeypatch.setattr("millrace.storage.published._now_ms", lambda: clock[0])
    world = World(tmp_path)
    world.maintenance = LogMaintenance(checkpoint_commits=2, keep_commits=1)
    world.expires = False
    first, second = world.write(world.make_rows(4), masked=[0]), world.write(world.make_rows(4), masked=[0])
    assert world.table.expire(before_ms=0) == []
    for change in (
        {"add": [first, second]},
        {"mask": {first.path: positions([0, 1])}},  # the file of both first vectors is still named
        {"mask": {second.path: positions([0, 1])}},
        {"remove": [first.path]},
        {"add": [world.write(world.make_rows(1))]},
    ):
        clock[0] += 1000
        world.commit(**change)
    assert len(vector_files(world)) == 3
    assert first_commit(world.store) == 0, "nothing is expired, so the log keeps what was removed"
    assert world.table.expire(before_ms=3999) == []
    assert len(vector_files(world)) == 3
    assert world.table.expire(before_ms=4000) == []
    assert len(vector_files(world)) == 2
    assert world.table.needed_files(since_ms=4000) == {*world.table.files, first.path}
    assert world.table.expire(before_ms=5000) == [first.path]
    assert world.table.needed_files(since_ms=5001) == set(world.table.files)
    assert vector_files(world) == {world.table.files[second.path].vector.file}  # type: ignore[union-attr]
    world.commit(add=[world.write(world.make_rows(1))])
    world.commit(add=[world.write(world.make_rows(1))])
    assert first_commit(world.store) == 4
    reopened = PublishedTable.open(world.store)
    assert reopened is not None
    assert reopened.expire(before_ms=5000) == [first.path], "a second remover does the same again"
    check(world)


def test_opening_reads_the_last_checkpoint_and_the_commits_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.maintenance = LogMaintenance(checkpoint_commits=10, keep_commits=1000)
    file = world.write(world.make_rows(100))
    world.commit(add=[file])
    for at in range(24):
        world.commit(mask={file.path: positions(range(at))})
    reads: Counter[str] = Counter()
    for call in ("read", "list", "size"):
        real = getattr(LocalStore, call)

        def counted(store: LocalStore, name: str, *, call: str = call, real: Any = real) -> Any:
            reads[call] += 1
            return real(store, name)

        monkeypatch.setattr(LocalStore, call, counted)
    follower = PublishedTable.open(world.store)
    assert follower is not None
    # The hint, the checkpoint's own commit, the commits 21 to 25, and the one that is not there.
    assert reads == {"read": 8, "size": 1}
    reads.clear()
    follower.refresh()
    assert reads == {"read": 1, "size": 1}
    world.commit(mask={file.path: positions([5])})
    reads.clear()
    follower.refresh()
    assert reads == {"read": 2, "size": 1}
    assert follower.version == world.table.version


def test_a_log_opens_without_its_hint_and_with_a_torn_checkpoint(world: World) -> None:
    world.maintenance = LogMaintenance(checkpoint_commits=3, keep_commits=1000)
    for _ in range(8):
        world.change_at_random()
    checkpoint = world.folder / checkpoint_file(6)
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    check(world)
    assert not checkpoint.exists()
    (world.folder / LAST_CHECKPOINT_FILE).write_bytes(b"{")
    check(world)
    (world.folder / commit_file(0)).unlink()  # as a trimming does: now only the listing tells where to start
    check(world)


def test_a_checkpoint_that_names_a_live_file_as_removed_too_loses_no_file(world: World) -> None:
    # trino#31252: a reader that keys a checkpoint by path loses files whose vector changed.
    world.maintenance = LogMaintenance(checkpoint_commits=3, keep_commits=1)
    file = world.write(world.make_rows(9))
    world.commit(add=[file])
    for at in range(1, 6):
        world.commit(mask={file.path: positions(range(at))})
    import pyarrow.parquet as pq

    actions = pq.read_table(world.folder / checkpoint_file(6))
    removed = [each["path"] for each in actions["remove"].to_pylist() if each is not None]
    assert file.path in removed
    check(world)


def test_a_damaged_commit_and_a_feature_of_a_newer_build_are_typed_errors(world: World) -> None:
    world.commit(add=[world.write(world.make_rows(1))])
    path = world.folder / commit_file(1)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\n{]")
    with pytest.raises(TableDamaged, match="cannot read"):
        PublishedTable.open(world.store)
    newer = {"protocol": {**world.table._state.protocol, "readerFeatures": ["deletionVectors", "v9"]}}
    path.write_bytes(whole + b"\n" + json.dumps(newer).encode())
    with pytest.raises(UnsupportedVersion, match="v9"):
        PublishedTable.open(world.store)


def test_a_store_without_put_if_absent_is_refused_with_a_typed_error(tmp_path: Path) -> None:
    store = Shelf(tmp_path).store("shelf://box/tables/7")
    with pytest.raises(StoreCannotPublish, match="put_if_absent"):
        PublishedTable.create(store, SCHEMA, collection_id=7)  # type: ignore[arg-type]
    assert PublishedTable.open(store) is None  # type: ignore[arg-type]


class PublishingShelf(ShelfStore):
    """A store that is no folder, with the one call that publishing needs."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True


def test_a_foreign_store_with_put_if_absent_is_published_to(tmp_path: Path) -> None:
    store = PublishingShelf(Shelf(tmp_path / "hidden"), "shelf://box/tables/7")
    table = PublishedTable.create(store, SCHEMA, collection_id=7)
    file = AddedFile("_rows/part-1.parquet", 1, 9, masked=positions([0, 8]))
    table.commit(PublishedChange(tick_at(1), 1, add=[file]), maintenance=LogMaintenance(checkpoint_commits=1))
    behind = PublishedTable.open(store)
    assert behind is not None
    table.commit(PublishedChange(tick_at(2), 1, mask={file.path: positions([3])}))
    with pytest.raises(CommitFenced):
        behind.commit(PublishedChange(tick_at(2), 1, remove=[file.path]))
    behind.refresh()
    assert (behind.masked(file.path).tolist(), behind.row_count) == ([3], 8)


def test_a_version_is_found_by_its_tick(world: World) -> None:
    for ms in (10, 20, 20, 40):
        world.commit(ms=ms, add=[world.write(world.make_rows(1))])
    found = {ms: world.table.version_at(tick_at(ms)) for ms in (9, 10, 15, 20, 39, 40, 50)}
    assert found == {9: 0, 10: 1, 15: 1, 20: 3, 39: 3, 40: 4, 50: 4}
    world.maintenance = LogMaintenance(checkpoint_commits=1, keep_commits=2)
    world.commit(ms=60, add=[world.write(world.make_rows(1))])
    world.commit(ms=70, add=[world.write(world.make_rows(1))])
    world.commit(ms=80, add=[world.write(world.make_rows(1))])
    assert first_commit(world.store) == 5
    assert world.table.version_at(tick_at(59)) is None
    assert world.table.version_at(tick_at(60)) == 5


def test_a_schema_change_is_one_commit_and_a_renamed_column_keeps_its_name_in_the_files(world: World) -> None:
    file = world.write(world.make_rows(3))
    world.commit(add=[file])
    wider = world.schema.append(pa.field("city", pa.string()))
    world.schema = wider
    world.commit(schema=wider)
    check(world)
    assert world.table.commit_info["schemaVersion"] == 1
    place = wider.get_field_index("name")
    renamed = wider.set(place, pa.field("title", pa.string(), metadata={PHYSICAL_NAME: "name"}))
    world.schema = renamed
    world.commit(schema=renamed, mask={file.path: positions([0])})
    check(world)
    assert world.table.schema.field("title").metadata == {PHYSICAL_NAME.encode(): b"name"}
    assert "columnMapping" in world.table._state.protocol["readerFeatures"]
    fields = json.loads(world.table._state.metadata["schemaString"])["fields"]
    ids = {each["name"]: each["metadata"]["delta.columnMapping.id"] for each in fields}
    world.schema = renamed.append(pa.field("zip", pa.string()))
    world.commit(schema=world.schema)
    again = json.loads(world.table._state.metadata["schemaString"])["fields"]
    assert {each["name"]: each["metadata"]["delta.columnMapping.id"] for each in again} == {
        **ids,
        "zip": max(ids.values()) + 1,
    }
    stats = json.loads(next(iter(world.table.files.values())).stats or "")
    assert "name" in stats["minValues"], "bounds go by the name in the files"


def test_properties_change_with_a_commit_and_only_once(world: World) -> None:
    for _ in range(2):
        world.commit(properties={"delta.deletedFileRetentionDuration": "interval 5 hours"})
    check(world)
    assert world.table.properties["delta.deletedFileRetentionDuration"] == "interval 5 hours"
    assert world.table.properties["delta.enableDeletionVectors"] == "true"
    kinds = [[next(iter(action)) for action in log_of(world.folder, version)] for version in (1, 2)]
    assert kinds == [["commitInfo", "metaData", "txn"], ["commitInfo", "txn"]]


def race(folder: Path | str, writer: int, commits: int) -> None:
    """Add `commits` files, and mask a row of each, planning again whenever another was first."""
    store = LocalStore(folder)
    table = PublishedTable.open(store)
    assert table is not None
    for number in range(commits):
        path = f"_rows/part-{writer}-{number}.parquet"
        while True:
            table.refresh()
            change = PublishedChange(
                table.tick + 1, 1, add=[AddedFile(path, 1, 4, masked=positions([writer]))],
                mask={each: positions({*table.masked(each).tolist(), 3}) for each in list(table.files)[:2]},
            )  # fmt: skip
            try:
                table.commit(change, maintenance=LogMaintenance(checkpoint_commits=5, keep_commits=10))
            except CommitFenced:
                continue
            break


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_committers_that_race_lose_and_repeat_nothing(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path)
    if kind == "threads":
        threads = [threading.Thread(target=race, args=(world.folder, writer, 12)) for writer in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    else:
        paths = os.pathsep.join([str(Path(millrace.__file__).parent.parent), str(ROOT)])
        calls = [
            f"from tests.storage.test_published import race; race({str(world.folder)!r}, {n}, 12)" for n in range(3)
        ]
        running = [
            subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
            for call in calls
        ]
        assert [each.wait(timeout=100) for each in running] == [0, 0, 0]
    world.table.refresh()
    assert world.table.version == 36
    assert set(world.table.files) == {
        f"_rows/part-{writer}-{number}.parquet" for writer in range(3) for number in range(12)
    }
    names = {each.vector.file for each in world.table.files.values() if each.vector is not None}
    assert names <= vector_files(world)
    for path in world.table.files:
        assert int(path.split("-")[1]) in world.table.masked(path)
    ticks = [log_of(world.folder, version) for version in range(first_commit(world.store), 37)]
    stamps = [actions[0]["commitInfo"]["inCommitTimestamp"] for actions in ticks]
    assert stamps == sorted(set(stamps))


def test_put_if_absent_gives_a_name_to_one_of_many_and_leaves_no_draft(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "table")
    won: list[bytes] = []
    start = threading.Barrier(8)

    def put(data: bytes) -> None:
        start.wait()
        if store.put_if_absent("log/0.json", data):
            won.append(data)

    threads = [threading.Thread(target=put, args=(bytes([each]) * 5000,)) for each in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(won) == 1
    assert store.read("log/0.json") == won[0]
    assert store.list("log") == ["0.json"]


def test_a_draft_of_a_killed_process_goes_with_the_next_trimming(world: World) -> None:
    draft = world.folder / "_delta_log" / ".draft-0123"
    draft.write_bytes(b"half of a com")
    check(world)
    world.maintenance = LogMaintenance(checkpoint_commits=1)
    world.commit(add=[world.write(world.make_rows(1))])
    assert not draft.exists()
    assert [name for name in log_files(world.store) if "draft" in name] == []
