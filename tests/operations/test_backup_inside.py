"""A backup that somebody changed, with digests that fit: nothing of it is read or written outside of its folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.base.errors import BackupDamaged, BackupRefused
from millrace.base.files import sha256_file
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.manifest import DATA_FOLDER, BackupManifest, StoredFile, list_backups
from millrace.operations.backup.restore import restore_backup
from millrace.operations.backup.run import backup
from millrace.operations.backup.safe_paths import is_safe_path, open_beneath, unsafe_references
from millrace.operations.backup.verify import verify_backup
from millrace.runtime.progress import Progress
from tests.operations.backup_world import World, settings_in

HOSTILE = [
    "../x",
    "/etc/x",
    "log/../../x",
    "log//x",
    "log/./x",
    "log/x/",
    "",
    ".",
    "..",
    "log/a\0b",
    "log/\ud800",
    "log/" + "x" * 5000,
]
IN_NO_BACKUP = ["x", "airflow/airflow.cfg", "run/operations/r/declaration.json", "deployment.json", "spark/x"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a backup."""
    folder = tmp_path_factory.mktemp("inside")
    world = World(settings_in(folder / "data"))
    for kind in ("insert", "insert", "import", "flush"):
        world.step(kind, 0)
    backup(world.settings, world.log, BackupParams(to=str(folder / "backups")), Progress())
    world.close()
    ((found, _),) = list_backups(folder / "backups")
    return found


@pytest.fixture
def changed(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(whole, tmp_path / whole.name))


def refused(folder: Path, tmp_path: Path, match: str) -> None:
    """A restore refuses it, and nothing is left beside the backup."""
    target, before = tmp_path / "to" / "restored", sorted(tmp_path.rglob("*"))
    target.parent.mkdir()
    with pytest.raises(BackupDamaged, match=match):
        restore_backup(settings_in(target), folder)
    target.parent.rmdir()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [*HOSTILE, *IN_NO_BACKUP])
def test_a_file_or_table_with_a_name_that_leads_elsewhere_is_refused(name: str, changed: Path, tmp_path: Path) -> None:
    manifest = BackupManifest.read(changed)
    (tmp_path / "secret").write_text("x")
    stored = StoredFile(1, sha256_file(tmp_path / "secret"))
    for forged in (
        replace(manifest, files={**manifest.files, name: stored}),
        replace(manifest, tables={**manifest.tables, name: 0}),
    ):
        forged.write(changed)
        with pytest.raises(BackupDamaged, match="which no backup contains"):
            verify_backup(changed)
        refused(changed, tmp_path, "which no backup contains")


def as_link(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def as_pipe(path: Path, elsewhere: Path) -> None:
    path.rename(elsewhere)
    os.mkfifo(path)


@pytest.mark.parametrize("change", [as_link, as_pipe])
@pytest.mark.parametrize("what", ["file", "folder", "data", "manifest.json"])
def test_what_is_a_link_or_no_file_is_refused_although_its_bytes_fit(
    what: str, change: Callable[[Path, Path], None], changed: Path, tmp_path: Path
) -> None:
    name = next(name for name in sorted(BackupManifest.read(changed).files) if name.endswith(".parquet"))
    place = {"file": changed / DATA_FOLDER / name, "folder": (changed / DATA_FOLDER / name).parent}.get(
        what, changed / what
    )
    change(place, tmp_path / "elsewhere")
    if what == "manifest.json":
        with pytest.raises(BackupDamaged, match="is invalid"):
            verify_backup(changed)
    else:
        assert any("cannot be read" in words for words in verify_backup(changed).problems)
    refused(changed, tmp_path, "is invalid" if what == "manifest.json" else "cannot be read")


def test_a_folder_that_becomes_a_link_on_the_way_is_not_followed(tmp_path: Path) -> None:
    inner, outer = tmp_path / "backup" / "log", tmp_path / "outer"
    inner.mkdir(parents=True)
    outer.mkdir()
    for folder in (inner, outer):
        (folder / "f").write_bytes(folder.name.encode())
    opened, real = [], os.open

    def swap(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "log":
            found = real(path, flags, mode, dir_fd=dir_fd)
            inner.rename(tmp_path / "gone")
            inner.symlink_to(outer)
            opened.append(path)
            return found
        return real(path, flags, mode, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", swap)
        with open_beneath(tmp_path / "backup", "log/f") as file:
            assert file.read() == b"log"
    assert opened == ["log"]
    with pytest.raises(OSError):
        open_beneath(tmp_path / "backup", "log/f")


def write_again(folder: Path, name: str, data: bytes) -> None:
    """Give a file of the backup other bytes, and the manifest the digest that fits."""
    path = folder / DATA_FOLDER / name
    path.unlink()
    path.write_bytes(data)
    manifest = BackupManifest.read(folder)
    replace(manifest, files={**manifest.files, name: StoredFile(len(data), sha256_file(path))}).write(folder)


ADD = {"partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}


@pytest.mark.parametrize(
    "action",
    [
        {"add": {**ADD, "path": "../../../etc/passwd"}},
        {"add": {**ADD, "path": "%2E%2E/%2e%2e/passwd"}},
        {"add": {**ADD, "path": "/etc/passwd"}},
        {"add": {**ADD, "path": "%2Fetc/passwd"}},
        {"add": {**ADD, "path": "file:///etc/passwd"}},
        {"add": {**ADD, "path": "s3://bucket/x"}},
        {"add": ADD},
        {"remove": {"path": "../coord/coord.db", "dataChange": True}},
        {"cdc": {"path": "a/../../x"}},
        {"sidecar": {"path": "/x"}},
        {"add": {**ADD, "path": "a", "deletionVector": {"storageType": "p", "pathOrInlineDv": "file:///etc/passwd"}}},
    ],
)
def test_a_delta_log_that_names_a_file_elsewhere_is_refused(
    action: dict[str, Any], changed: Path, tmp_path: Path
) -> None:
    entries = [name for name in BackupManifest.read(changed).files if "tables/1/_rows/_delta_log/" in name]
    name = max(each for each in entries if each.endswith(".json"))
    whole = (changed / DATA_FOLDER / name).read_bytes()
    write_again(changed, name, whole.rstrip() + b"\n" + json.dumps(action).encode())
    (problem,) = verify_backup(changed).problems
    assert problem.startswith(name)
    refused(changed, tmp_path, "outside of its table")


@pytest.mark.parametrize("kind", ["add", "remove"])
@pytest.mark.parametrize("path", ["../../../etc/passwd", "%2e%2e/x", "/etc/passwd"])
def test_a_delta_checkpoint_that_names_a_file_elsewhere_is_found(kind: str, path: str, tmp_path: Path) -> None:
    file = tmp_path / "t" / "_delta_log" / "00000000000000000003.checkpoint.parquet"
    file.parent.mkdir(parents=True)
    columns = {kind: [None, {"path": "part-0.parquet"}, {"path": path}, None]}
    pq.write_table(pa.table(columns), file)
    name = str(file.relative_to(tmp_path))
    assert path in next(unsafe_references([name], lambda each: open_beneath(tmp_path, each)))
    pq.write_table(pa.table({kind: columns[kind][:2]}), file)
    assert list(unsafe_references([name], lambda each: open_beneath(tmp_path, each))) == []
    file.write_bytes(b"no Parquet")
    assert "cannot be read" in next(unsafe_references([name], lambda each: open_beneath(tmp_path, each)))


def test_a_log_elsewhere_that_is_not_there_is_not_made(changed: Path, tmp_path: Path) -> None:
    name, place = "log/generations.json", tmp_path / "made"
    from millrace.log.generations.generation_file import Generation, GenerationFile, Generations

    made = GenerationFile(changed / DATA_FOLDER / "log", "rocksmq")
    made.change(lambda found: Generations((*found.items, Generation(f"rocksmq://{place}"))))
    manifest = BackupManifest.read(changed)
    path = changed / DATA_FOLDER / name
    replace(manifest, files={**manifest.files, name: StoredFile(path.stat().st_size, sha256_file(path))}).write(changed)
    with pytest.raises(BackupRefused, match="holds no log"):
        restore_backup(settings_in(tmp_path / "restored"), changed)
    assert not place.exists()


def test_plain_names_are_names() -> None:
    for name in (
        "log/channels/~dml_0/00000000000000000001.log",
        "staged/.trims/dml_0-1.json",
        "wal/p=..a/%2E/ü.parquet",
    ):
        assert is_safe_path(name)
