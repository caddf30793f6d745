"""Removal of old files below a folder, which never leaves that folder.

Folders are opened one below the other without following links (as in backup/safe_paths), so a link that somebody puts
in the place of a folder leads nowhere. Links themselves stay. Memory is bounded by the entries of the folders on one
path, not by those of the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Removed:
    """Files that were removed, or would be in a dry run."""

    files: int = 0
    bytes: int = 0

    def __iadd__(self, other: Removed) -> Removed:
        self.files += other.files
        self.bytes += other.bytes
        return self


def remove_old_files(
    folder: Path, *, before: float, dry_run: bool = False, wanted: Callable[[str], bool] = lambda name: True
) -> Removed:
    """Remove the files below `folder` that were last written before `before` (Unix seconds), and folders left empty.

    `wanted` chooses by the file's name. A folder is removed only if it, too, was last changed before that: another
    process may be about to write to a newer one. Files that vanish meanwhile are not counted.

    Raises OSError if `folder` is a link, or cannot be read.
    """
    try:
        top = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return Removed()
    try:
        return _sweep(top, before, dry_run, wanted)
    finally:
        os.close(top)


def newest_write(folder: Path) -> float:
    """Return when the newest file below `folder` was last written, in Unix seconds; 0 if there is none."""
    newest = 0.0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(place, name)).st_mtime)
    return newest


def _sweep(folder: int, before: float, dry_run: bool, wanted: Callable[[str], bool]) -> Removed:
    found = Removed()
    for entry in _entries(folder):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        old = status.st_mtime < before
        if stat.S_ISDIR(status.st_mode):
            with _opened(folder, entry.name) as inner:
                if inner is None:
                    continue
                found += _sweep(inner, before, dry_run, wanted)
            if old and not dry_run:
                with suppress(OSError):  # not empty, or gone
                    os.rmdir(entry.name, dir_fd=folder)
        elif stat.S_ISREG(status.st_mode) and old and wanted(entry.name):
            with suppress(FileNotFoundError):
                if not dry_run:
                    os.unlink(entry.name, dir_fd=folder)
                found += Removed(1, status.st_size)
    return found


def _entries(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(found)


@contextmanager
def _opened(parent: int, name: str) -> Iterator[int | None]:
    """Open the folder `name`, unless it is gone or no folder any more."""
    try:
        handle = os.open(name, _FOLDER, dir_fd=parent)
    except OSError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)
