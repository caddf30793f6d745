"""Confines a backup to its own files: rejects names that lead elsewhere, and follows no links.

A restore does not trust a manifest. The names of files and tables, and the paths in their Delta logs (a later VACUUM
would delete by them), are checked before they are used. A file is opened folder by folder from the root of the backup,
without following links, and only if it is a regular file. What is put in its place meanwhile therefore does not matter.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import unquote

import pyarrow as pa

from millrace.base.errors import BackupDamaged
from millrace.storage.delta_log import is_log_file, referenced_files

FLOW_FOLDERS: Final = frozenset({"flow-lanes", "pipelines", "pipelines-out"})
"""Those of flows' positions, their journals, and their tables."""
STATE_FOLDERS: Final = frozenset({"captures", "flow-documents", "streams"})
"""Those of what flows keep besides tables and journals."""
BACKED_UP_FOLDERS: Final = (
    FLOW_FOLDERS
    | STATE_FOLDERS
    | frozenset(
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
            "tables",
            "wal",
            "wal_trims",
        }
    )
)
"""Folders of a data folder that a backup contains. It holds no Airflow settings and no server addresses."""

_EXACT: Final = {
    "flow-documents": re.compile(r"[^/]+/(wanted\.json|skip\.json|suspects/[^/]+\.json)"),
    "captures": re.compile(r"[^/]+/spool\.db"),
}
"""What a backup has of these folders."""
MAX_NAME_BYTES: Final = 4096
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def is_safe_path(name: object) -> bool:
    """Return whether `name` is a relative path of plain parts that only leads downwards."""
    if not isinstance(name, str) or "\0" in name:
        return False
    try:
        fits = len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
    return fits and all(part not in ("", ".", "..") for part in name.split("/"))


def check_paths(where: object, names: Iterable[object]) -> None:
    """Check the `names` of a manifest.

    Raises BackupDamaged for the first that leads out of a data folder, or to a folder that no backup contains.
    """
    for name in names:
        if not is_safe_path(name) or not _is_backed_up(str(name)):
            raise BackupDamaged(
                f"{where} names {str(name)[:200]!r}, which no backup contains: the manifest was altered. Restore "
                "another backup, and check who can write to that folder"
            )


def _is_backed_up(name: str) -> bool:
    """Return whether a backup may contain `name`: of a flow's folder these documents only, since others run code."""
    first, _, rest = name.partition("/")
    exact = _EXACT.get(first)
    return first in BACKED_UP_FOLDERS and (exact is None or exact.fullmatch(rest) is not None)


def open_beneath(root: Path, name: str) -> FileIO:
    """Open the file `name` below `root`, unbuffered.

    Raises OSError if it is not a regular file, or if there is a link on the way.
    """
    *folders, last = name.split("/")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = inner
        # O_NONBLOCK: opening a pipe in its place would block forever.
        found = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(found, "rb", buffering=0)


def unsafe_references(names: Iterable[str], opened: Callable[[str], BinaryIO]) -> Iterator[str]:
    """Yield a message for each file of a Delta log among `names` that refers to files outside of its table."""
    for name in names:
        if not is_log_file(name):
            continue
        try:
            with opened(name) as file:
                wrong = next((str(path) for path in referenced_files(name, file) if not _in_table(path)), "")
        except (OSError, ValueError, AttributeError, pa.ArrowException) as error:
            yield f"{name} cannot be read as part of a Delta log ({type(error).__name__})"
            continue
        if wrong:
            yield f"{name} refers to {wrong[:200]!r}, which lies outside of its table"


def _in_table(path: object) -> bool:
    """Return whether a path in a Delta log, as written and as decoded, is relative and stays in its table."""
    if not isinstance(path, str) or _SCHEME.match(path):
        return False
    return is_safe_path(path) and is_safe_path(unquote(path))
