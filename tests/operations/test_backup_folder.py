"""A folder of backups is shared: with other deployments, with older versions, with whatever people keep there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.base.data_folder import unknown_entries
from millrace.base.errors import BackupBusy, BackupRefused, InvalidArgument
from millrace.base.files import sha256_file
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.deployment_id import DEPLOYMENT_FILE as DEPLOYMENT
from millrace.operations.backup.deployment_id import ensure_deployment_id
from millrace.operations.backup.files import exclusive_lock
from millrace.operations.backup.manifest import MANIFEST_FILE, MARKER_FILE, BackupManifest, list_backups, remove_backup
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import BackupReport, backup
from millrace.operations.backup.verify import verify_backup
from millrace.runtime.progress import Progress
from tests.operations.backup_world import World, settings_in

ROOT = Path(__file__).resolve().parents[2]


def take(world: World, root: Path, **params: object) -> BackupReport:
    return backup(world.settings, world.log, BackupParams.parse({"to": str(root), **params}), Progress())


def tree(folder: Path) -> dict[str, str]:
    """Every file below `folder`, with its digest."""
    return {str(each.relative_to(folder)): sha256_file(each) for each in folder.rglob("*") if each.is_file()}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(settings_in(tmp_path / "data"))
    made.step("insert", 0)
    made.step("flush", 0)
    yield made
    made.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[World]:
    made = World(settings_in(tmp_path / "other"))
    made.step("insert", 0)
    yield made
    made.close()


def of_an_older_version(folder: Path) -> BackupManifest:
    """Make the backup in `folder` what a version that knew no deployments wrote."""
    manifest = BackupManifest.read(folder)
    (folder / MARKER_FILE).unlink()
    document = json.loads((folder / MANIFEST_FILE).read_text())
    del document["body"]["deployment"]
    document["sha256"] = hashlib.sha256(json.dumps(document["body"], sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST_FILE).write_text(json.dumps(document))
    return manifest


def test_nothing_is_removed_that_is_not_this_deployments_own(world: World, other: World, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "backups", tmp_path / "elsewhere"
    theirs = take(other, root)
    mine = take(world, root, keep=1)
    killed = "backup-20261122T101112.131415Z-"
    for name, marker in {
        "backup-home": None,
        "backup-20261122": None,
        killed + "0000": None,  # an older version's
        killed + "0001": {"id": killed + "0001", "deployment": ensure_deployment_id(other.settings)},
        killed + "0002": {"id": mine.id, "deployment": ensure_deployment_id(world.settings)},  # copied from mine
    }.items():
        (root / name / "data").mkdir(parents=True)
        (root / name / "photo.jpg").write_bytes(b"not Millrace's")
        (root / name / "data" / "photo.jpg").write_bytes(b"nor this")
        if marker is not None:
            (root / name / MARKER_FILE).write_text(json.dumps(marker))
    elsewhere.mkdir()
    (elsewhere / MARKER_FILE).write_text(
        json.dumps({"id": killed + "0003", "deployment": ensure_deployment_id(world.settings)})
    )
    (root / (killed + "0003")).symlink_to(elsewhere)
    (root / "notes.txt").write_text("mine")
    before = tree(root)
    found = take(world, root, keep=1)
    assert found.dropped == (mine.id,)
    assert found.left == tuple(killed + each for each in ("0000", "0001", "0002")), "a person is told of them"
    gone = set(before) - set(tree(root))
    assert {name.partition("/")[0] for name in gone} == {mine.id}
    assert tree(elsewhere), "nor is a link followed"
    assert [manifest.id for _, manifest in list_backups(root)] == [found.id, theirs.id]
    assert verify_backup(root / theirs.id).ok


def test_each_deployment_keeps_its_own_number_and_links_its_own_files(
    world: World, other: World, tmp_path: Path
) -> None:
    root = tmp_path / "backups"
    theirs = [take(other, root).id for _ in range(2)]
    mine = take(world, root, keep=1)
    assert (mine.dropped, mine.linked_files) == ((), 0)
    assert take(world, root, dry_run=True).linked_files > 0
    again = take(world, root, keep=1)
    assert again.dropped == (mine.id,)
    assert again.linked_files > 0
    assert take(other, root, keep=1).dropped == tuple(reversed(theirs))


def test_a_backup_of_an_older_version_is_restored_and_never_removed(world: World, tmp_path: Path) -> None:
    root = tmp_path / "backups"
    take(world, root)
    ((folder, _),) = list_backups(root)
    old = of_an_older_version(folder)
    assert verify_backup(root).ok
    for _ in range(2):
        take(world, root, keep=1)
    assert old.id in [manifest.id for _, manifest in list_backups(root)]
    restore_backup(settings_in(tmp_path / "restored"), root / old.id)


def test_a_dropped_backup_keeps_what_somebody_else_put_beside_it(world: World, tmp_path: Path) -> None:
    root = tmp_path / "backups"
    take(world, root)
    ((folder, _),) = list_backups(root)
    (folder / "why.txt").write_text("before the upgrade")
    remove_backup(folder)
    assert tree(root) == {
        f"{folder.name}/why.txt": sha256_file(folder / "why.txt"),
        ".backups.lock": sha256_file(root / ".backups.lock"),
    }


def test_what_is_restored_is_another_deployment_and_leaves_the_first_ones_backups_alone(
    world: World, tmp_path: Path
) -> None:
    root = tmp_path / "backups"
    first = take(world, root)
    settings = settings_in(tmp_path / "restored")
    restore_backup(settings, root)
    assert json.loads((settings.data_dir / DEPLOYMENT).read_text()) == {
        "id": ensure_deployment_id(settings),
        "deployment": ensure_deployment_id(world.settings),
        "backup": first.id,
    }
    assert ensure_deployment_id(settings) != ensure_deployment_id(world.settings)
    restored = World.of(settings, world.model, epoch=world.epoch)
    try:
        assert take(restored, root, keep=1).dropped == ()
    finally:
        restored.close()
    assert take(world, root, keep=1).dropped == (first.id,)


def test_a_deployment_has_one_id_whoever_asks_first(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "data")
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: ensure_deployment_id(settings), range(32)))
    assert len(found) == 1
    assert os.listdir(settings.data_dir) == [DEPLOYMENT]
    (settings.data_dir / DEPLOYMENT).write_text('{"id": 7}')
    with pytest.raises(InvalidArgument, match="put it back"):
        ensure_deployment_id(settings)


def test_a_restore_leaves_a_folder_that_is_in_its_way(world: World, tmp_path: Path) -> None:
    root, target = tmp_path / "backups", settings_in(tmp_path / "restored")
    take(world, root)
    draft = tmp_path / ".restored.restoring"
    draft.mkdir()
    (draft / "photo.jpg").write_bytes(b"not Millrace's")
    with pytest.raises(BackupRefused, match="was not left by a restore"):
        restore_backup(target, root)
    assert (draft / "photo.jpg").exists()
    (draft / "photo.jpg").rename(tmp_path / "photo.jpg")
    draft.rmdir()
    draft.symlink_to(root)
    with pytest.raises(BackupRefused, match="was not left by a restore"):
        restore_backup(target, root)
    draft.unlink()
    draft.mkdir()
    with exclusive_lock(draft / "restore.lock", busy="mine"), pytest.raises(BackupBusy, match="another restore"):
        restore_backup(target, root)
    restore_backup(target, root)
    assert not draft.exists()


def test_everything_in_a_data_folder_is_known_and_what_is_not_is_told(world: World) -> None:
    for kind in ("checkpoint", "compact"):
        world.step(kind, 0)
    ensure_deployment_id(world.settings)
    assert unknown_entries(world.settings.data_dir) == []
    (world.settings.data_dir / "thesis").mkdir()
    assert unknown_entries(world.settings.data_dir) == ["thesis"]


def test_make_clean_data_removes_no_folder_that_holds_something_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "log").mkdir(parents=True)
    (data / "thesis").mkdir()
    environment = {**os.environ, "MILLRACE_DATA": str(data), "YES": "1"}
    command = ["make", "-C", str(ROOT), "clean-data"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "thesis" in refused.stderr
    assert (data / "log").is_dir()
    shutil.rmtree(data / "thesis")
    subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    assert not data.exists()
