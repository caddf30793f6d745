"""Backups between disks and buckets: what was acknowledged is restored wherever the tables and the backup lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import BackupDamaged, BackupRefused, InvalidArgument
from millrace.base.settings import Settings
from millrace.flows.sinks.collection.lane import LANES
from millrace.operations.backup import bucket as buckets
from millrace.operations.backup.bucket import BucketFolder, backup_place
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.manifest import BackupManifest, list_backups
from millrace.operations.backup.restore import RESTORING, _mark, restore_backup
from millrace.operations.backup.run import BackupReport, backup, backup_folder
from millrace.operations.backup.verify import verify_backup
from millrace.operations.verification import verify_collections
from millrace.runtime.progress import Progress
from millrace.storage.store import list_below, store_at
from tests.failpoints import Act, at_failpoints
from tests.operations.backup_world import Model, World, settings_in
from tests.s3_server import bucket

STEPS = ["insert", "insert", "insert", "flush", "begin", "body", "delete", "import", "field", "insert", "node"]


class Killed(BaseException):
    pass


def killed_at(place: str) -> Act:
    def act(name: str) -> None:
        if name == place:
            raise Killed

    return act


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    with bucket(monkeypatch) as uri:
        yield uri


@pytest.fixture
def open_world(tmp_path: Path) -> Iterator[Callable[[str], World]]:
    made: list[World] = []

    def opened(tables: str) -> World:
        world = World(replace(settings_in(tmp_path / "data"), tables=tables))
        made.append(world)
        for number, kind in enumerate(STEPS):
            world.step(kind, number)
        return world

    yield opened
    for world in made:
        world.close()


def take(world: World, root: str, *, act: Act = lambda name: None, **params: object) -> BackupReport:
    with at_failpoints(act):
        return backup(world.settings, world.log, BackupParams.parse({"to": root, **params}), Progress())


def target(tmp_path: Path, tables: str) -> Settings:
    return replace(settings_in(tmp_path / "restored"), tables=tables)


def prove(source: World, settings: Settings, model: Model) -> None:
    """The restored deployment holds `model`, continues, and its tables are what its log says."""
    found = World.of(settings, model, epoch=source.epoch)
    try:
        for number in range(3):
            found.step("insert", number)
        found.step("import", 1)
        found.settle()
        assert found.content() == found.model.rows
        assert all(each.ok for each in verify_collections(settings).values())
    finally:
        found.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("tables", "backups", "restored"),
    [
        ("s3", "s3", "s3"),
        ("disk", "s3", "disk"),
        ("disk", "s3", "s3"),
        ("s3", "disk", "s3"),
        ("s3", "s3", "disk"),
        ("disk", "disk", "s3"),
        ("disk", "disk", "other disk"),
    ],
)
def test_a_backup_is_restored_between_disk_and_bucket(
    tables: str, backups: str, restored: str, box: str, tmp_path: Path, open_world: Callable[[str], World]
) -> None:
    world = open_world(f"{box}/tables" if tables == "s3" else "")
    root = f"{box}/backups" if backups == "s3" else str(tmp_path / "backups")
    store_at(world.settings.tables_uri).replace(f"{LANES}/flow/lane/000001", b"journal")
    take(world, root, verify=True)
    for number in range(3):
        world.step("insert", number)
    world.step("compact", 0)
    model = deepcopy(world.model)
    report = take(world, root)
    assert report.linked_files > 0, "what the first backup has is shared"
    world.step("insert", 0)
    place = backup_place(root)
    assert verify_backup(place).ok
    there = {"s3": f"{box}/again", "disk": "", "other disk": str(tmp_path / "tables")}[restored]
    settings = target(tmp_path, there)
    restore_backup(settings, place)
    assert store_at(settings.tables_uri).read(f"{LANES}/flow/lane/000001") == b"journal"
    if there:
        assert store_at(there).read(RESTORING) is None
        assert not (settings.data_dir / "wal").exists()
        assert not (settings.data_dir / "staged").exists()
    prove(world, settings, model)
    assert verify_backup(place).ok, "what runs from a backup does not touch it"


def test_contents_of_a_bucket_stay_while_a_backup_names_them(
    box: str, tmp_path: Path, open_world: Callable[[str], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "UNUSED_SECONDS", -5.0)
    world, root = open_world(f"{box}/tables"), BucketFolder(f"{box}/backups")

    def contents() -> int:
        return len(list_below(store_at(f"{root}/{buckets.POOL_FOLDER}")))

    def named() -> int:
        return len({each.sha256 for _, manifest in list_backups(root) for each in manifest.files.values()})

    for turn in range(3):
        world.step("insert", turn)
        world.step("flush", 0)
        take(world, str(root), keep=2)
        assert contents() == named()
    assert len(list(list_backups(root))) == 2
    with pytest.raises(Killed):
        take(world, str(root), keep=1, act=killed_at("backup.copied"))
    world.step("insert", 0)
    with pytest.raises(Killed):
        take(world, str(root), keep=1, act=killed_at("backup.dropping"))
    take(world, str(root), keep=1)
    assert len(list(list_backups(root))) == 1
    assert contents() == named()
    assert sorted(store_at(str(root)).folders())[0].startswith("backup-")
    assert len(store_at(str(root)).folders()) == 2, "killed backups leave nothing"
    assert verify_backup(root).ok


def test_a_content_that_changed_or_is_gone_is_found_and_not_restored(
    box: str, tmp_path: Path, open_world: Callable[[str], World]
) -> None:
    world, root = open_world(""), BucketFolder(f"{box}/backups")
    take(world, str(root))
    ((folder, manifest),) = list_backups(root)
    name = next(each for each in manifest.files if each.endswith(".parquet"))
    place = buckets.content_name(manifest.deployment, manifest.files[name].sha256)
    whole = root.store.read(place)
    assert whole is not None
    settings = target(tmp_path, f"{box}/again")
    for data in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), None):
        root.store.delete([place])
        if data is not None:
            root.store.replace(place, data)
        found = verify_backup(folder)
        assert not found.ok
        assert all(name in words for words in found.problems), "one file has that content"
        with pytest.raises(BackupDamaged):
            restore_backup(settings, root)
        assert list_below(store_at(settings.tables)) == {}
    root.store.replace(place, whole)
    document = folder.open("manifest.json").read().replace(b'"tables/', b'"../tabl')
    folder.store.replace("manifest.json", document)
    with pytest.raises(BackupDamaged, match="changed after it was written"):
        BackupManifest.read(folder)


def test_a_killed_restore_into_a_bucket_starts_again_and_takes_no_place_of_another(
    box: str, tmp_path: Path, open_world: Callable[[str], World]
) -> None:
    world, root = open_world(""), backup_place(f"{box}/backups")
    take(world, str(root))
    model, settings = deepcopy(world.model), target(tmp_path, f"{box}/again")
    with at_failpoints(killed_at("restore_backup.copied")), pytest.raises(Killed):
        restore_backup(settings, root)
    assert list_below(store_at(settings.tables)) == {}, "a failure leaves nothing"
    store = store_at(settings.tables)
    store.replace("wal/stray", b"of a killed restore")
    with pytest.raises(BackupRefused, match="has files"):
        restore_backup(settings, root)
    store.replace(RESTORING, _mark(settings.data_dir))  # a kill leaves both
    with at_failpoints(killed_at("restore_backup.complete")), pytest.raises(Killed):
        restore_backup(settings, root)
    assert store.size("wal/stray") is None
    with pytest.raises(BackupRefused, match="a finished restore"):
        restore_backup(settings, root)
    store.delete(list_below(store))
    restore_backup(replace(settings, data_dir=tmp_path / "else"), root)
    with pytest.raises(BackupRefused, match="has files"):
        restore_backup(settings, root)
    restore_backup(replace(settings, tables=f"{box}/third"), root)
    prove(world, replace(settings, tables=f"{box}/third"), model)


def test_backups_and_tables_do_not_lie_in_each_other(box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(data_dir=tmp_path / "data", tables=f"{box}/some/tables")
    for root in (f"{box}/some/tables/backups", f"{box}/some/tables", f"{box}/some"):
        with pytest.raises(InvalidArgument, match="lie in each other"):
            backup_folder(settings, BackupParams.parse({"to": root}))
    assert str(backup_folder(settings, BackupParams.parse({"to": f"{box}/some/tables2"}))) == f"{box}/some/tables2"
    monkeypatch.setattr("millrace.operations.backup.run.started_by_launcher", lambda: True)
    allowed = replace(settings, backup_dir=f"{box}/daily", backup_roots=f"/mnt/b:{box}/more:/mnt/c")
    for root in (f"{box}/daily", f"{box}/daily/of/mine", f"{box}/more"):
        assert str(backup_folder(allowed, BackupParams.parse({"to": root}))) == root
    for root in (f"{box}/daily2", f"{box}/daily/../x", f"{box}"):
        with pytest.raises(InvalidArgument):
            backup_folder(allowed, BackupParams.parse({"to": root}))
