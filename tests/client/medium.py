"""The disk as a power loss would leave it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


class Medium:
    """What a power loss would leave.

    The bytes of files, and the names in folders, as they were when they were last synced.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {}
        """Both by inode: a name may come to stand for another file."""
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._synced(getattr(os, name)))

    def _synced(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            real(fd)
            path, inode = Path(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd).st_ino
            if path.is_dir():
                self.folders[inode] = {each.name: each.inode() for each in os.scandir(path)}
            else:
                self.files[inode] = path.read_bytes()

        return sync

    def has(self, path: Path) -> bool:
        """Whether a power loss leaves the file at `path` as it is now, with its name."""
        synced = self.files.get(path.stat().st_ino) == path.read_bytes()
        return synced and path.name in self.folders.get(path.parent.stat().st_ino, {})

    def restore(self, folder: int, target: Path) -> Path:
        """The folder (its inode) as it would be after the power loss."""
        target.mkdir()
        for name, inode in self.folders[folder].items():
            if inode in self.folders:
                self.restore(inode, target / name)
            elif inode in self.files:
                (target / name).write_bytes(self.files[inode])
        return target
