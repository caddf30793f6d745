"""A folder that a process works in and removes in the end; what one that was killed left goes when the next one is made.

Its maker holds a lock on it, which the kernel releases with the process, whatever its id is elsewhere or was before: a folder whose
lock is free has nobody any more. Each sweep removes at the most `MOST_SWEPT`, the oldest, and what cannot be removed stays.
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
    """A new folder of this process; one that it moves elsewhere stays."""

    def __init__(self, path: Path, *, pattern: str) -> None:
        """Make `path`, with the parents it lacks; first remove those beside it whose names match `like` and that nobody holds."""
        assert re.fullmatch(pattern, path.name), "else nobody would sweep it"
        self.path = path
        sweep(path.parent, pattern=pattern)
        for _ in range(_TRIES):
            path.mkdir(parents=True)
            held = _held(path)
            if held is not None:
                self._descriptor = held
                return
            shutil.rmtree(path, ignore_errors=True)  # swept before it was ours
        raise OSError(errno.EBUSY, "swept by others over and over: try again", str(path))

    def discard(self) -> None:
        """Remove it, unless it was moved. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def sweep(parent: Path, *, pattern: str) -> int:
    """Remove the folders in `parent` whose names match `like` and that no process holds; how many."""
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
    """The descriptor of a folder that is ours from now on; None where another process holds it, or it is gone."""
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
