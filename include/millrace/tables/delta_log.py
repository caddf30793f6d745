"""The ``_delta_log`` folder of a table on a file system: commits under a lease, clean-up behind Delta checkpoints.

delta-rs lists the whole folder whenever it opens or refreshes a table, so each old entry costs every later commit something
(0.8 µs here). :func:`trim` removes what no checkpoint needs any more. A handle that stands at a removed version goes on from
the newest checkpoint when it is refreshed.

Trimming takes away what the optimistic commit relies on: that the name of a version, once taken, stays taken. A writer that
slept while others committed and trimmed would find the name behind its own version free again, and its commit would
succeed without being part of the table. So every commit is made under :func:`commit_lease`, which is shared, and starts with
:func:`stands`; trimming takes the same lock alone and does nothing where it cannot have it at once. A writer that is
stopped, or asleep with its machine, can only make the clean-up wait. The kernel gives the lock up with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from millrace.failpoint import hit
from millrace.tables.fsync import sync

WAL_COMMITS: Final = 1000
"""Versions of ``wal`` that stay behind: four minutes at the fastest that a streaming node commits."""

TABLE_COMMITS: Final = 5000
"""Versions of the other tables that stay behind: more than an hour at one a second."""

_LOCK: Final = "_commits.lock"
_ENTRY: Final = re.compile(r"(\d{20})\..+")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\.parquet")


@contextmanager
def commit_lease(table: Path) -> Iterator[None]:
    """Keep the log of `table` (its folder) from being trimmed. Any number of writers may hold it at a time."""
    handle = os.open(table / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def stands(table: Path, version: int) -> bool:
    """Whether the log still has `version`. Under the lease: whether a commit made from it can take only its own place."""
    return _entry(table, version).exists()


def moved(table: Path, version: int) -> bool:
    """Whether a handle at `version` has something to catch up with: a later version, or none of its own any more."""
    return _entry(table, version + 1).exists() or not stands(table, version)


def commit_names(table: Path, version: int, file: str) -> bool:
    """Whether the commit of `version` added `file` (relative to the table). Under the lease, which keeps the commit there."""
    with _entry(table, version).open(encoding="utf-8") as lines:
        return any(unquote(json.loads(line).get("add", {}).get("path", "")) == file for line in lines)


def last_checkpoint(table: Path) -> int:
    """The version of the newest Delta checkpoint; 0 where there is none."""
    try:
        return int(json.loads((table / "_delta_log" / "_last_checkpoint").read_bytes())["version"])
    except FileNotFoundError:
        return 0


def trim(table: Path, *, keep: int) -> int:
    """Remove what lies before the newest checkpoint that at least `keep` versions follow; log entries removed.

    Oldest first, so that a kill in between leaves a log without gaps. Does nothing while somebody commits.
    """
    handle = os.open(table / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        return _trim(table / "_delta_log", keep)
    finally:
        os.close(handle)


def _trim(log: Path, keep: int) -> int:
    entries = sorted(name for name in os.listdir(log) if _ENTRY.fullmatch(name))
    newest = max((_version(name) for name in entries if name.endswith(".json")), default=0)
    bases = [name for name in entries if _CHECKPOINT.fullmatch(name) and _version(name) <= newest - keep]
    if not bases:
        return 0
    doomed = [name for name in entries if _version(name) < _version(bases[-1])]
    if doomed:
        # delta-rs syncs nothing. What replaces the entries must be there for good before they go.
        for path in (log / bases[-1], log):
            sync(path)
    for name in doomed:
        (log / name).unlink(missing_ok=True)
        hit("trim.removed")
    return len(doomed)


def _entry(table: Path, version: int) -> Path:
    return table / "_delta_log" / f"{version:020d}.json"


def _version(name: str) -> int:
    return int(name[:20])
