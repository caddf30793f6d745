"""What a deployment keeps is its user's alone, whatever the umask of who starts it.

A folder that others can write to is refused.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.base.errors import LogUnavailable
from millrace.base.settings import Settings
from millrace.rpc.remote_log import RemoteLogService

ROOT = Path(__file__).resolve().parents[2]


def process(data: Path, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a Python program of ours as somebody who lets everybody read and write everything."""
    environment = {**os.environ, "MILLRACE_DATA": str(data), "PYTHONPATH": str(ROOT / "include")}
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        umask=0,
    )


def millrace(data: Path, *arguments: str, stdin: str = "") -> str:
    done = process(data, "-m", "millrace", *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home" / "data"
    yield folder
    for each in (folder, tmp_path / "restored"):
        try:
            with RemoteLogService.connect(Settings(data_dir=each).log_path, start=False) as service:
                service.shutdown()
        except LogUnavailable:
            pass


def modes(folder: Path) -> dict[str, str]:
    """What lies in `folder`, itself included, and is open to others than its owner."""
    found = {str(each): each.lstat().st_mode for each in (folder, *folder.rglob("*")) if not each.is_symlink()}
    return {name: oct(mode) for name, mode in found.items() if stat.S_IMODE(mode) & 0o077}


@pytest.mark.slow
def test_nobody_else_can_read_what_processes_make(data: Path, tmp_path: Path) -> None:
    root, restored = tmp_path / "backups", tmp_path / "restored"
    millrace(data, "collections", "create", "users", "--field", "id:int64", "--key", "id")
    millrace(data, "produce", "users", "-", stdin='{"id": 1}\n')
    millrace(data, "backup", "make", "--to", str(root))
    done = process(data, "-m", "millrace.operations", "backup", "--params", json.dumps({"to": str(root)}))
    assert done.returncode == 0, done.stderr
    millrace(restored, "backup", "restore", str(root))
    for folder in (data, root, restored):
        assert (folder / "deployment.json").exists() or folder == root
        assert modes(folder) == {}


@pytest.mark.slow
def test_a_folder_that_others_can_read_is_closed_and_a_line_says_so(data: Path) -> None:
    data.mkdir(parents=True)
    data.chmod(0o755)
    said = millrace(data, "collections", "create", "users", "--field", "id:int64", "--key", "id")
    assert f"{data} was readable by others" in said
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert "was readable" not in millrace(data, "produce", "users", "-", stdin='{"id": 1}\n')


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o770, *(pytest.param(mode, marks=pytest.mark.slow) for mode in (0o702, 0o1777))])
def test_nothing_starts_on_a_folder_that_others_can_write_to(mode: int, data: Path) -> None:
    data.mkdir(parents=True)
    data.chmod(mode)
    command = process(data, "-m", "millrace", "collections", "create", "users", "--field", "id:int64", "--key", "id")
    job = process(data, "-m", "millrace.operations", "backup", "--params", '{"to": "/nowhere"}')
    server = process(data, "-m", "millrace.log.server.main", "--data", str(data))
    assert [each.returncode for each in (command, job, server)] == [1, 1, 1]
    assert command.stderr.startswith("UNSAFE_DATA_FOLDER: ")
    assert json.loads(job.stdout)["error"]["code"] == "UNSAFE_DATA_FOLDER"
    for each in (command.stderr, job.stdout, server.stderr):
        assert f"chmod 700 {data}" in each
    assert list(data.iterdir()) == []
    assert stat.S_IMODE(data.stat().st_mode) == mode
