"""A file that is replaced whole, and what a reader, a crash and a full disk see of it."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.access.grants import Grant, Role
from millrace.access.token_file import TokenFile
from millrace.base.data_folder import prepare_data_folder
from millrace.base.files import replace_file, replace_json
from millrace.client.consume.positions import FilePositions
from millrace.coord.catalog.database import CoordinatorDb
from millrace.log.generations.generation_file import GenerationFile
from millrace.log.rocksmq.service import RocksMQ
from millrace.meta.sql import SqlStore
from millrace.operations.backfill.importer import _State
from millrace.operations.backup.manifest import BackupManifest
from millrace.storage.local import LocalStore
from tests.client.medium import Medium


def test_a_file_is_made_with_its_folders_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "state.json"
    replace_json(path, {"tick": 1})
    replace_json(path, {"tick": 2}, synced=True)
    assert json.loads(path.read_text()) == {"tick": 2}
    assert [each.name for each in path.parent.iterdir()] == ["state.json"]


def test_its_owner_alone_can_read_it_whatever_the_umask_says(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        replace_file(path, "s")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    replace_file(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new", synced=True)
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_synced_means_the_bytes_before_the_name_and_the_folder_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bytes]] = []
    path = tmp_path / "state"
    replace_file(path, b"old")

    def spied(descriptor: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.read_bytes()))

    monkeypatch.setattr(os, "fsync", spied)
    replace_file(path, b"new", synced=True)
    assert seen == [(False, b"old"), (True, b"new")]
    replace_file(path, b"newer")
    assert len(seen) == 2


def test_writers_beside_each_other_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "state"
    values = [bytes([65 + number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(replace_file, path, value) for value in values * 5]:
            done.result(timeout=60)
            assert path.read_bytes() in values
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def durable_folders(medium: Medium, root: Path) -> set[str]:
    """Those below `root` that a power loss leaves."""
    found = set()
    for path in root.rglob("*"):
        above = [path, *(each for each in path.parents if root in each.parents)]
        if path.is_dir() and all(each.name in medium.folders.get(each.parent.stat().st_ino, {}) for each in above):
            found.add(str(path.relative_to(root)))
    return found


def _tokens(data: Path) -> None:
    TokenFile(data).add("shop", (Grant(Role.PRODUCE, ("users",)),))


def _log(data: Path) -> None:
    with RocksMQ(data / "log") as log:
        log.create("p")


MAKERS: dict[str, Callable[[Path], object]] = {
    "claim": prepare_data_folder,
    "log": _log,
    "generations": lambda data: GenerationFile(data / "log", "rocksmq://").change(lambda list: list.with_first("p", 0)),
    "coord": lambda data: CoordinatorDb(data / "coord" / "coord.db").close(),
    "cluster": lambda data: SqlStore.in_file(data / "coord" / "cluster.db", time.monotonic).close(),
    "consumers": lambda data: FilePositions(data / "run").close(),
    "tokens": _tokens,
    "replaced": lambda data: replace_json(data / "parked" / "p.json", {}, synced=True),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_who_makes_the_first_file_of_a_data_folder_makes_that_and_all_between_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str
) -> None:
    medium = Medium(monkeypatch)
    data = tmp_path / "home" / "data"
    MAKERS[maker](data)
    assert (tmp_path / "home").is_dir()
    made = {str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_dir() and each.name != "index"}
    assert durable_folders(medium, tmp_path) >= made


def test_a_file_has_its_name_only_once_its_bytes_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes of a load, and the manifest of a backup.

    A power loss between name and bytes would leave an empty one.
    """
    medium, named = Medium(monkeypatch), []
    replace = Path.replace

    def look(self: Path, target: Path) -> Path:
        named.append((target.name, medium.files.get(self.stat().st_ino) == self.read_bytes()))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", look)
    _State(LocalStore(tmp_path)).keep()
    BackupManifest("id", "", "", "", "", True, {}, {}, {}, {}).write(tmp_path)
    assert named == [("appended.json", True), ("manifest.json", True)]
