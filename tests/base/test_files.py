"""A file that is replaced whole, and what a reader, a crash and a full disk see of it."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millrace.base.files import replace_file, replace_json


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
