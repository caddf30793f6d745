"""A backup of a running deployment, restored elsewhere.

What was acknowledged before it began is there once, and goes on.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from millrace.base.errors import (
    BackupBusy,
    BackupDamaged,
    BackupNotFound,
    BackupRefused,
    InvalidArgument,
    LogRegressed,
    TableUnavailable,
)
from millrace.flows.range_host.positions import change_positions, positions_of
from millrace.flows.sinks.collection.lane import LaneJournal, forget_lanes
from millrace.log.generations.log import GenerationLog
from millrace.log.generations.service import GenerationsService
from millrace.message.ids import LogId
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.retention.removal_lock import removals_blocked
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.manifest import DATA_FOLDER, BackupManifest, list_backups
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import BackupReport, backup
from millrace.operations.backup.verify import verify_backup
from millrace.operations.verification import verify_channel, verify_collections
from millrace.runtime.progress import Progress
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.collections.layout import earlier_name
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.wal.digest import digest_rows
from tests.failpoints import Act, at_failpoints
from tests.operations.backup_world import SCHEMA, STEPS, Model, World, home, knows, settings_in

SOME = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), max_size=4)
BEFORE = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), min_size=6, max_size=18)
BESIDE = st.lists(st.tuples(st.sampled_from([*STEPS, "compact", "compact"]), st.integers(0, 5)), max_size=5)


def take(world: World, root: Path, *, act: Act = lambda name: None, **params: object) -> BackupReport:
    chosen = BackupParams.parse({"to": str(root), **params})
    with at_failpoints(act):
        return backup(world.settings, world.log, chosen, Progress())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A deployment with 8 rows, 6 of them in its tables, one deleted, and a transaction that is open."""
    made = World(settings_in(tmp_path / "data"))
    for number in range(6):
        made.step("insert", number)
    made.step("flush", 0)
    for kind in ("insert", "begin", "body", "delete", "insert"):
        made.step(kind, 0)
    yield made
    made.close()


def wal_digest(world: World, ends: dict[str, LogId]) -> dict[str, str]:
    """By PChannel a digest over all rows of the WAL that came of the log before `ends`."""
    rows = DeltaTable(str(Path(world.settings.wal_uri))).to_pyarrow_table(filters=[("kind", "!=", "state")])
    found = {}
    for name, end in ends.items():
        mine = [
            i
            for i, (p, e) in enumerate(zip(rows["pchannel"], rows["entry"], strict=True))
            if p.as_py() == name and e.as_py() < end.entry
        ]
        found[name] = str(digest_rows(rows.take(mine)))
    return found


def prove(source: World, target: Path, root: Path, model: Model) -> None:
    """Restore the newest backup into `target`; it must hold `model`, give the same WAL as its source, and go on."""
    assert verify_backup(root).ok
    report = restore_backup(settings_in(target), root)
    (folder, manifest), *_ = list_backups(root)
    ends = {name: LogId(0, int(each.end.partition(":")[2])) for name, each in manifest.channels.items()}
    ingest_to_end(source.settings, source.log)
    found = World.of(settings_in(target), model, epoch=source.epoch)
    try:
        if WalTable.exists(Path(found.settings.wal_uri)):
            restored = WalTable.open(Path(found.settings.wal_uri))
            assert report.ticks == {name: restored.last_tick(name) for name in manifest.channels}
        assert {name: found.log.open(name).describe().end for name in ends} == ends
        ingest_to_end(found.settings, found.log)
        assert wal_digest(found, ends) == wal_digest(source, ends)
        for name in model.rows:
            collection = found.coordinator.collection(name)
            for vchannel in collection.vchannels:
                if vchannel in model.sequences:
                    key = next(key for key in range(1000) if home(collection, key) == vchannel)
                    assert knows(found, collection, key, model.sequences[vchannel]), "its producers continue"
        for number in range(4):
            found.step("insert", number)
        found.step("field", 0)
        made = found.coordinator.create_collection("new", found.coordinator.collection("c1").schemas[0], vchannels=2)
        found.insert(made, 1)
        found.model.rows["new"] = {1: "row 1"}
        found.settle()
        assert found.content() == found.model.rows
        snapshot, wal = WalSnapshot.open(Path(found.settings.wal_uri)), WalTable.open(Path(found.settings.wal_uri))
        assert snapshot is not None
        assert all(verify_channel(snapshot, wal, None, name).ok for name in wal.pchannels())
        assert all(each.ok for each in verify_collections(found.settings).values())
    finally:
        found.close()
    assert verify_backup(folder).ok, "what runs from a backup does not touch it"


# Without shrinking: an example takes about two seconds.
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])
@given(BEFORE, BESIDE, BESIDE, SOME)
def test_whatever_goes_on_the_restored_deployment_holds_what_was_acknowledged_before(
    before: list[tuple[str, int]],
    while_pinned: list[tuple[str, int]],
    while_copied: list[tuple[str, int]],
    behind: list[tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = World(settings_in(folder / "data"))
        try:
            for step in before:
                world.step(*step)
            held: list[Model] = []

            def meanwhile(place: str) -> None:
                for step in {"backup.pinned": while_pinned, "backup.log": while_copied}.get(place, []):
                    world.step(*step)
                if place == "backup.pinned":
                    held.append(deepcopy(world.model))

            take(world, folder / "backups", act=meanwhile)
            for step in behind:
                world.step(*step)
            prove(world, folder / "restored", folder / "backups", held[-1])
            world.settle()
            assert world.content() == world.model.rows, "and the source goes on"
        finally:
            world.close()


@pytest.mark.slow
def test_the_next_backup_links_what_the_one_before_has_and_old_ones_go(world: World, tmp_path: Path) -> None:
    root = tmp_path / "backups"
    planned = take(world, root, dry_run=True)
    assert (planned.id, list(list_backups(root))) == ("", [])
    first = take(world, root, keep=2)
    assert first.linked_files == 0
    again = take(world, root, keep=2)
    assert again.linked_files >= planned.files
    assert again.new_bytes < first.new_bytes
    third = take(world, root, keep=2, verify=True)
    assert third.dropped == (first.id,)
    assert third.verified
    assert [manifest.id for _, manifest in list_backups(root)] == [third.id, again.id]
    assert verify_backup(root / again.id).ok, "what was dropped took nothing with it"
    prove(world, tmp_path / "restored", root, world.model)


@pytest.mark.slow
def test_the_log_is_held_back_while_a_backup_copies_it(world: World, tmp_path: Path) -> None:
    begins: list[LogId] = []

    def truncate(place: str) -> None:
        if place == "backup.pinned":
            for number in range(40):
                world.step("insert", number)
            world.step("checkpoint", 0)
            begins.append(world.log.open("dml_0").describe().begin)
            held.append(deepcopy(world.model))

    held: list[Model] = []
    before = world.log.open("dml_0").describe().begin
    take(world, tmp_path / "backups", act=truncate)
    assert begins == [before]
    world.step("checkpoint", 0)
    assert world.log.open("dml_0").describe().begin > before
    prove(world, tmp_path / "restored", tmp_path / "backups", held[0])


@pytest.mark.slow
def test_a_file_that_is_gone_begins_the_backup_anew(world: World, tmp_path: Path) -> None:
    times: list[str] = []

    def compact_and_vacuum(place: str) -> None:
        if place == "backup.log":
            times.append(place)
            if len(times) < 3 or endless:
                world.step("insert", 0)
                world.step("flush", 0)
                world.step("compact", 0)
                table = DeltaTable(str(Path(rows_uri(world.settings, 1))))
                # As a VACUUM of another day does.
                assert table.vacuum(0, dry_run=False, enforce_retention_duration=False)

    endless = False
    root = tmp_path / "backups"
    take(world, root, act=compact_and_vacuum)
    assert len(times) == 3
    prove(world, tmp_path / "restored", root, world.model)
    endless = True
    other = tmp_path / "others"  # not beside a backup that has the file
    with pytest.raises(TableUnavailable, match="was removed during"):
        take(world, other, act=compact_and_vacuum)
    assert list(other.glob("backup-*")) == [], "nothing is left of it"


def test_a_backup_that_was_changed_is_found_and_not_restored(world: World, tmp_path: Path) -> None:
    root = tmp_path / "backups"
    take(world, root)
    (folder, manifest), *_ = list_backups(root)
    target = settings_in(tmp_path / "restored")
    names = sorted(manifest.files)
    for name in (next(n for n in names if n.endswith(".log")), next(n for n in names if n.endswith(".parquet"))):
        path = folder / DATA_FOLDER / name
        whole = path.read_bytes()
        path.unlink()  # the file may be the deployment's, too
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert [words.split()[0] for words in verify_backup(folder).problems] == [name]
        with pytest.raises(BackupDamaged, match="has changed since it was written"):
            restore_backup(target, folder)
        path.unlink()
        assert "cannot be read" in verify_backup(folder).problems[0]
        with pytest.raises(BackupDamaged, match="has no"):
            restore_backup(target, folder)
        path.write_bytes(whole)
    assert verify_backup(folder).ok
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace(manifest.id, manifest.id[:-1] + "x"))
    with pytest.raises(BackupDamaged):
        restore_backup(target, folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(BackupNotFound):
        restore_backup(target, folder)
    with pytest.raises(BackupNotFound):
        verify_backup(root)
    assert not target.data_dir.exists()
    assert [each.name for each in tmp_path.glob(".*")] == []


def test_what_cannot_be_right_is_refused(world: World, tmp_path: Path) -> None:
    root = tmp_path / "backups"
    with pytest.raises(InvalidArgument, match="in the data folder"):
        take(world, world.settings.data_dir / "backups")
    with pytest.raises(InvalidArgument, match="backup_dir"):
        backup(world.settings, world.log, BackupParams(), Progress())
    with pytest.raises(InvalidArgument, match="absolute"):
        BackupParams.parse({"to": "backups"})
    take(world, root)
    with pytest.raises(BackupRefused, match="is not empty"):
        restore_backup(world.settings, root)
    elsewhere = replace(settings_in(tmp_path / "restored"), log="kafka://127.0.0.1:9/millrace")
    with pytest.raises(BackupRefused, match="MILLRACE_LOG=rocksmq"):
        restore_backup(elsewhere, root)
    with (
        removals_blocked(world.settings, deadline=1.0),
        pytest.raises(BackupBusy),
        removals_blocked(world.settings, deadline=0.05),
    ):
        pass


def test_a_log_older_than_the_tables_is_told(world: World, tmp_path: Path) -> None:
    root = tmp_path / "backups"
    take(world, root)
    (older, _), *_ = list_backups(root)
    for number in range(4):
        world.step("insert", number)
    world.step("node", 0)
    take(world, root)
    (newer, manifest), *_ = list_backups(root)
    files = {name: stored for name, stored in manifest.files.items() if not name.startswith("log/")}
    files |= {name: stored for name, stored in BackupManifest.read(older).files.items() if name.startswith("log/")}
    for name in files:
        if name.startswith("log/"):
            (newer / DATA_FOLDER / name).unlink(missing_ok=True)
            (newer / DATA_FOLDER / name).write_bytes((older / DATA_FOLDER / name).read_bytes())
    replace(manifest, files=files).write(newer)
    assert verify_backup(newer).ok
    with pytest.raises(LogRegressed):
        restore_backup(settings_in(tmp_path / "restored"), newer)
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize("included", [True, False], ids=["in the data folder", "elsewhere"])
def test_a_log_that_was_switched_is_restored_where_it_lies(world: World, tmp_path: Path, included: bool) -> None:
    world.switch("rocksmq" if included else f"rocksmq://{tmp_path / 'other'}")
    world.step("insert", 1)
    root = tmp_path / "backups"
    assert take(world, root).log_included is included
    if included:
        restored = restore_and_open(world, tmp_path / "restored", root)
        restored.settle()
        assert restored.content() == restored.model.rows
        restored.close()
        return
    world.close()  # the log has one owner
    restore_backup(settings_in(tmp_path / "restored"), root)
    again = World.of(world.settings, world.model, epoch=world.epoch)
    again.step("insert", 2)
    again.close()
    with pytest.raises(BackupRefused, match="has entries after the backup's end"):
        restore_backup(settings_in(tmp_path / "late"), root)


def restore_and_open(source: World, target: Path, root: Path) -> World:
    restore_backup(settings_in(target), root)
    return World.of(settings_in(target), source.model, epoch=source.epoch)


def test_a_manifest_says_what_the_backup_holds(world: World, tmp_path: Path) -> None:
    take(world, tmp_path / "backups")
    (folder, manifest), *_ = list_backups(tmp_path / "backups")
    assert {"wal", "checkpoints", "segments", "tables/1/_rows"} <= set(manifest.tables)
    for part in manifest.channels.values():
        assert part.tick >= part.flushed_tick > 0
        assert part.begin <= part.position <= part.end
    document = json.loads((folder / "manifest.json").read_text())
    assert document["version"] == 2
    on_disk = {
        str(path.relative_to(folder / DATA_FOLDER)) for path in (folder / DATA_FOLDER).rglob("*") if path.is_file()
    }
    assert on_disk == set(manifest.files)


def test_the_first_backup_after_the_move_of_an_earlier_layout_links_the_rows(world: World, tmp_path: Path) -> None:
    world.step("insert", 1)
    world.settle()
    root, data = tmp_path / "backups", world.settings.data_dir
    take(world, root)
    (old, manifest), *_ = list_backups(root)
    for moved in (old / DATA_FOLDER, data):  # as an earlier build left both
        (moved / "collections").unlink(missing_ok=True)
        for number in [each.name for each in (moved / "tables").iterdir() if each.name.isdecimal()]:
            (moved / "collections").mkdir(exist_ok=True)
            (moved / "tables" / number / "_rows").rename(moved / "collections" / number)
        shutil.rmtree(moved / "tables")
    files = {earlier_name(name): each for name, each in manifest.files.items()}
    tables = {earlier_name(name): version for name, version in manifest.tables.items()}
    replace(manifest, files=files, tables=tables).write(old)
    assert json.loads((old / "manifest.json").read_text())["version"] == 1
    take(world, root)
    (new, again), *_ = list_backups(root)
    rows = [name for name in again.files if "/_rows/_date=" in name]
    assert rows
    for name in rows:
        there = (old / DATA_FOLDER / earlier_name(name)).stat()
        assert (new / DATA_FOLDER / name).stat().st_ino == there.st_ino, name
    restored = restore_and_open(world, tmp_path / "restored", old)
    restored.settle()
    assert restored.content() == restored.model.rows
    restored.close()


def test_coordinator_and_log_are_of_one_moment(world: World, tmp_path: Path) -> None:
    def ddl() -> None:
        world.coordinator.create_collection("late", SCHEMA, vchannels=2)
        world.coordinator.alter("c1", [AddField(FieldSpec("late", "int64", True))])

    late = threading.Thread(target=ddl)
    waited: list[bool] = []

    class Looked(GenerationsService):
        """The deployment's log; DDL begins when the backup asks for the ends that count."""

        def __init__(self) -> None:
            self.asked = 0

        def names(self) -> list[str]:
            self.asked += 1
            if self.asked == 2:
                late.start()
                late.join(0.3)
                waited.append(late.is_alive())
            return world.log.names()

        def open(self, pchannel: str) -> GenerationLog:
            return world.log.open(pchannel)

    root = tmp_path / "backups"
    backup(world.settings, Looked(), BackupParams(to=str(root)), Progress())
    late.join(30)
    assert waited == [True], "DDL waits until the coordinator's file is copied"
    assert len(world.coordinator.collection("c1").schema.fields) == 3
    restored = restore_and_open(world, tmp_path / "restored", root)
    assert [each.name for each in restored.coordinator.collections()] == ["c1"]
    made = restored.coordinator.create_collection("late", SCHEMA, vchannels=2)
    restored.insert(made, 1)
    restored.step("insert", 0)
    restored.close()


def test_what_loads_and_restores_have_noted_is_not_newer_than_the_log(world: World, tmp_path: Path) -> None:
    notes = [world.settings.data_dir / name for name in ("restores/c1.json", "staged/load/appended.json")]
    for path in notes:
        path.parent.mkdir(parents=True)
        path.write_text("sent before")

    def note(place: str) -> None:
        if place == "backup.log":
            for path in notes:
                path.write_text("sent behind it")

    take(world, tmp_path / "backups", act=note)
    restore_backup(settings_in(tmp_path / "restored"), tmp_path / "backups")
    for path in notes:
        copied = tmp_path / "restored" / path.relative_to(world.settings.data_dir)
        assert copied.read_text() == "sent before"


def test_a_backup_has_the_positions_of_flows_and_the_newest_journal_of_each_lane(world: World, tmp_path: Path) -> None:
    """Positions are of a moment before that of the journals, and both are in the log or are sent again."""
    change_positions(world.settings, "flights", {"in-0": 7})

    def claimed() -> LaneJournal:
        return LaneJournal(world.settings, "flights", "in/0", collection=1, generation=None)

    lane = claimed()
    lane.withdraw(12)

    def act(name: str) -> None:
        if name == "backup.pinned":
            change_positions(world.settings, "flights", {"in-0": 50})
            claimed().withdraw(40)

    take(world, tmp_path / "backups", act=act)
    ((folder, manifest),) = list_backups(tmp_path / "backups")
    assert json.loads((folder / "manifest.json").read_text())["version"] == 3
    assert [name for name in manifest.tables if name.startswith("pipelines/")] == ["pipelines/flights"]
    restored = settings_in(tmp_path / "restored")
    restore_backup(restored, folder)
    assert positions_of(restored, "flights")["in-0"].position == 7
    assert LaneJournal(restored, "flights", "in/0", collection=1, generation=None).position == 40
    forget_lanes(restored, "flights")
    assert LaneJournal(restored, "flights", "in/0", collection=1, generation=None).position == 0
