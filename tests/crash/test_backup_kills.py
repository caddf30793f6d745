"""A backup that is killed at any of its steps is none, and the next one is whole.

A restore that is killed made nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import millrace
from millrace.base.failpoint import VARIABLE
from millrace.base.settings import Settings
from millrace.log.generations.service import open_deployment_log
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.manifest import list_backups
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import backup
from millrace.operations.backup.verify import verify_backup
from millrace.runtime.progress import Progress
from tests.operations.backup_world import World, settings_in

BACKUP = """
import sys
from millrace.log.generations.service import open_deployment_log
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.run import backup
from millrace.runtime.progress import Progress
from millrace.base.settings import Settings
settings = Settings.load()
with open_deployment_log(settings.log_path) as log:
    backup(settings, log, BackupParams(to=sys.argv[1], keep=1), Progress())
"""
RESTORE = """
import sys
from pathlib import Path
from millrace.operations.backup.restore import restore_backup
from millrace.base.settings import Settings
restore_backup(Settings.load(), Path(sys.argv[1]))
"""


def killed(code: str, settings: Settings, place: str, *arguments: Path) -> None:
    env = {**os.environ, **settings.environment(), VARIABLE: place}
    env["PYTHONPATH"] = str(Path(millrace.__file__).resolve().parent.parent)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()


def grown(settings: Settings, world: World | None = None) -> World:
    """The deployment with another row in its log; closed."""
    made = World(settings) if world is None else World.of(settings, world.model, epoch=world.epoch)
    for number in range(30):
        made.step("insert", number)
    if world is None:
        made.step("flush", 0)
    made.close()
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        pytest.param("backup.begun", marks=pytest.mark.slow),
        pytest.param("backup.pinned", marks=pytest.mark.slow),
        "backup.log",
        pytest.param("backup.copied", marks=pytest.mark.slow),
    ],
)
def test_a_killed_backup_is_none_and_the_next_one_is_whole(place: str, tmp_path: Path) -> None:
    root, settings = tmp_path / "backups", settings_in(tmp_path / "data")
    world = grown(settings)
    (root / "backup-home").mkdir(parents=True)
    (root / "backup-home" / "photo.jpg").write_bytes(b"not a backup's")
    killed(BACKUP, settings, place, root)
    assert len(list(root.glob("backup-*Z-*"))) == 1
    assert list(list_backups(root)) == []
    world = World.of(settings, world.model, epoch=world.epoch)
    begin = world.log.open("dml_0").describe().begin
    world.step("flush", 0)
    world.step("checkpoint", 0)
    assert world.log.open("dml_0").describe().begin > begin, "what it held back goes on"
    report = backup(settings, world.log, BackupParams(to=str(root), keep=1), Progress())
    world.close()
    assert sorted(folder.name for folder in root.iterdir()) == [".backups.lock", report.id, "backup-home"]
    assert (root / "backup-home" / "photo.jpg").exists(), "what the killed one left is gone, and nothing else"
    assert verify_backup(root).ok


@pytest.mark.slow
@pytest.mark.parametrize("place", ["backup.written", "backup.dropping", "backup.dropped"])
def test_a_backup_that_was_killed_behind_its_manifest_is_whole(place: str, tmp_path: Path) -> None:
    root, settings = tmp_path / "backups", settings_in(tmp_path / "data")
    world = grown(settings)
    with open_deployment_log(settings.log_path) as log:
        first = backup(settings, log, BackupParams(to=str(root)), Progress())
    grown(settings, world)
    killed(BACKUP, settings, place, root)
    found = [manifest.id for _, manifest in list_backups(root)]
    assert found[1:] == [first.id] if place == "backup.written" else first.id not in found
    assert verify_backup(root).ok
    with open_deployment_log(settings.log_path) as log:
        last = backup(settings, log, BackupParams(to=str(root), keep=1), Progress())
    assert sorted(path.name for path in root.iterdir()) == [".backups.lock", last.id], "nor is half of one left"


@pytest.mark.slow
def test_a_killed_restore_made_nothing_and_the_next_one_does(tmp_path: Path) -> None:
    root, settings, target = tmp_path / "backups", settings_in(tmp_path / "data"), settings_in(tmp_path / "restored")
    world = grown(settings)
    with open_deployment_log(settings.log_path) as log:
        backup(settings, log, BackupParams(to=str(root)), Progress())
    killed(RESTORE, target, "restore_backup.copied", root)
    assert not target.data_dir.exists()
    restore_backup(target, root)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    again = World.of(target, world.model, epoch=world.epoch)
    again.settle()
    assert again.content() == again.model.rows
    again.close()
