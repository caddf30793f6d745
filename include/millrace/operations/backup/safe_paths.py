"""What a backup names stays inside of it: names that lead elsewhere are refused, links are not followed.

Whoever restores a backup trusts its manifest with nothing: the names of files and tables, and the paths in the Delta logs that
come with them (which a later VACUUM would remove by), are judged before anything is made of them. A file is opened folder by
folder from the backup's on, without following a link on the way, and only where it is a file: so it does not matter what is
put in its place meanwhile.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from millrace.base.errors import BackupDamaged
from millrace.storage.delta_log import is_log_file, referenced_files

BACKED_UP_FOLDERS: Final = frozenset(
    {
        "bases",
        "checkpoints",
        "collections",
        "coord",
        "deletes",
        "derived",
        "log",
        "quality",
        "recovery_checkpoints",
        "restores",
        "segments",
        "staged",
        "wal",
        "wal_trims",
    }
)
"""What of a data folder a backup has. Nothing else comes out of one: no settings of Airflow, no addresses of servers."""

MAX_NAME_BYTES: Final = 4096
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def is_safe_path(name: object) -> bool:
    """Whether `name` is a relative path of plain parts, which leads nowhere but down."""
    if not isinstance(name, str) or "\0" in name:
        return False
    try:
        fits = len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
    return fits and all(part not in ("", ".", "..") for part in name.split("/"))


def check_paths(where: Path, names: Iterable[object]) -> None:
    """Raises BackupDamaged for the first of a manifest's `names` that leads out of a data folder, or to what is in no backup."""
    for name in names:
        if not is_safe_path(name) or str(name).partition("/")[0] not in BACKED_UP_FOLDERS:
            raise BackupDamaged(
                f"{where} names {str(name)[:200]!r}, which is no place that a backup has: somebody changed it; restore another"
                " backup, and look who can write to that folder"
            )


def open_beneath(root: Path, name: str) -> FileIO:
    """The file `name` below `root`, unbuffered. Raises OSError where it is none, or where a link lies on the way."""
    *folders, last = name.split("/")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = inner
        # Without waiting: a pipe in its place would hold us for ever.
        found = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "it is no file")
    return os.fdopen(found, "rb", buffering=0)


def unsafe_references(names: Iterable[str], opened: Callable[[str], FileIO]) -> Iterator[str]:
    """A sentence for each file among `names` that is part of a Delta log and names files outside of its table."""
    for name in names:
        if not is_log_file(name):
            continue
        try:
            with opened(name) as file:
                wrong = next((str(path) for path in referenced_files(name, file) if not _in_table(path)), "")
        except (OSError, ValueError, AttributeError, pa.ArrowException) as error:
            yield f"{name} does not read as part of a Delta log ({type(error).__name__})"
            continue
        if wrong:
            yield f"{name} names {wrong[:200]!r}, which lies outside of its table"


def _in_table(path: object) -> bool:
    """Whether a path of a Delta log, as it is written and as readers decode it, is relative and stays in its table."""
    if not isinstance(path, str) or _SCHEME.match(path):
        return False
    return is_safe_path(path) and is_safe_path(unquote(path))
