"""Scratch folders: gone with their maker's work, or with the next one's where the maker was killed.

Nobody else's ever.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.base.scratch_folder import MOST_SWEPT, ScratchFolder

LIKE = "[0-9a-f]{4}"
MAKER = """
import sys
from pathlib import Path
from millrace.base.scratch_folder import ScratchFolder
folder = ScratchFolder(Path(sys.argv[1]), pattern=sys.argv[2])
(folder.path / "file").write_text("x")
print("made", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_swept_by_the_next_and_not_before_it_is_dead(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKER, str(tmp_path / "aaaa"), LIKE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "made\n"
        ScratchFolder(tmp_path / "bbbb", pattern=LIKE).discard()
        assert (tmp_path / "aaaa" / "file").exists(), "its maker works in it"
        maker.send_signal(signal.SIGKILL)
        maker.wait(30)
    mine = ScratchFolder(tmp_path / "cccc", pattern=LIKE)
    assert [path.name for path in tmp_path.iterdir()] == ["cccc"]
    mine.discard()
    assert not any(tmp_path.iterdir())
    mine.discard()


def test_only_folders_of_its_own_kind_are_swept(tmp_path: Path) -> None:
    keep = [tmp_path / "photos", tmp_path / "aaaa0", tmp_path / "elsewhere" / "aaaa"]
    for path in keep:
        path.mkdir(parents=True)
    (tmp_path / "bbbb").write_text("a file")
    (tmp_path / "cccc").symlink_to(tmp_path / "photos")
    (tmp_path / "dddd").mkdir()
    ScratchFolder(tmp_path / "eeee", pattern=LIKE)
    assert all(path.is_dir() for path in keep)
    assert (tmp_path / "bbbb").is_file()
    assert (tmp_path / "cccc").is_symlink()
    assert not (tmp_path / "dddd").exists()


def test_one_sweep_removes_a_bounded_number(tmp_path: Path) -> None:
    for number in range(MOST_SWEPT + 3):
        (tmp_path / f"{number:04x}").mkdir()
    ScratchFolder(tmp_path / "ffff", pattern=LIKE).discard()
    assert len(list(tmp_path.iterdir())) == 3
    ScratchFolder(tmp_path / "ffff", pattern=LIKE).discard()
    assert not any(tmp_path.iterdir())


def test_one_that_was_moved_stays(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path / "aaaa", pattern=LIKE)
    folder.path.rename(tmp_path / "published")
    folder.discard()
    ScratchFolder(tmp_path / "bbbb", pattern=LIKE).discard()
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_one_that_another_swept_in_the_moment_it_was_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path.mkdir
    times = 0

    def mkdir(path: Path, *args: object, **words: object) -> None:
        nonlocal times
        made(path, *args, **words)  # type: ignore[arg-type]
        times += 1
        if path.name == "aaaa" and times == 1:
            ScratchFolder(tmp_path / "bbbb", pattern=LIKE).discard()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    folder = ScratchFolder(tmp_path / "aaaa", pattern=LIKE)
    assert folder.path.is_dir()
    monkeypatch.undo()
    ScratchFolder(tmp_path / "cccc", pattern=LIKE).discard()
    assert folder.path.is_dir(), "it is held"
