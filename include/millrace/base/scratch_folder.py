"""Scratch folders: a process removes its own when done, and the next process removes those of killed processes.

The creator holds a lock on its folder, which the kernel releases when the process ends, whatever happens to process
ids. A folder whose lock is free is abandoned. Each sweep removes at most `MOST_SWEPT` folders, oldest first; a folder
that cannot be removed stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

MOST_SWEPT: Final = 32
_TRIES: Final = 5


class ScratchFolder:
    """A new folder of this process. A folder that the process moves elsewhere is kept."""

    def __init__(self, path: Path, *, pattern: str) -> None:
        """Create `path` and missing parents, after removing abandoned siblings whose names match `pattern`.

        Raises OSError (EBUSY) if other processes keep sweeping it.
        """
        assert re.fullmatch(pattern, path.name), "otherwise no sweep would remove it"
        self.path = path
        sweep(path.parent, pattern=pattern)
        for _ in range(_TRIES):
            path.mkdir(parents=True)
            held = _held(path)
            if held is not None:
                self._descriptor = held
                return
            shutil.rmtree(path, ignore_errors=True)  # another process swept it before we locked it
        raise OSError(errno.EBUSY, "other processes keep removing it: try again", str(path))

    def discard(self) -> None:
        """Remove the folder unless it was moved. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def sweep(parent: Path, *, pattern: str) -> int:
    """Remove abandoned folders in `parent` whose names match `pattern`.

    Returns the number of removed folders.
    """
    found: list[tuple[float, Path]] = []
    with suppress(FileNotFoundError), os.scandir(parent) as entries:
        for entry in entries:
            if re.fullmatch(pattern, entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, parent / entry.name))
    swept = 0
    for _, path in sorted(found)[:MOST_SWEPT]:
        held = _held(path)
        if held is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)
            swept += 1
    return swept


def _held(path: Path) -> int | None:
    """Lock a folder and return its descriptor; None if another process holds it or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
