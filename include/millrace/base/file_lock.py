"""One process at a time, by a lock file; whoever waits for it has a deadline."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import LogBusy, MillraceError

_POLL: Final = 0.01


@contextmanager
def held(path: Path, *, deadline: Deadline, busy: MillraceError | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel releases it with the process. Raises `busy` (LogBusy) at `deadline`."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not deadline.pause(_POLL):
                    raise busy or LogBusy(f"another process holds {path}: it is at work there, try again") from None
        yield
