"""Make files and folders durable, and replace small files atomically.

A reader sees the old file or the new one. A crash leaves one of the two.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


def sync(file: Path | int) -> None:
    """Make a file's bytes, or a folder's entries, durable.

    `file` is a path or an open descriptor.
    """
    if isinstance(file, int):
        os.fsync(file)
        return
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_data(file: int) -> None:
    """Make an open file's bytes durable, with the metadata needed to read them back."""
    os.fdatasync(file)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Create `folder` with `mode`, durably, with any missing parents.

    Each new folder is an entry of its parent, so every parent up to the first existing one is synced.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(mode, exist_ok=True)
    sync(folder.parent)


def replace_file(path: Path, data: bytes | str, *, synced: bool = False) -> None:
    """Replace the content of `path` with `data`; only its owner can read it.

    Text is encoded as UTF-8. Missing parents are created.
    `synced` makes the new content survive a power loss once this returns.
    Concurrent writers each write a whole file; the last one wins.
    Raises OSError and leaves the old file unchanged.
    """
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        draft.unlink(missing_ok=True)  # left by a killed process with this id
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if synced:
                file.flush()
                sync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    if synced:
        sync(path.parent)


def replace_json(path: Path, value: Any, *, synced: bool = False) -> None:
    """Replace the content of `path` with `value` as one line of JSON; see :func:`replace_file`."""
    replace_file(path, json.dumps(value) + "\n", synced=synced)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 lower-case hexadecimal digits; memory use is constant."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rotate_log(log: Path, most: int) -> None:
    """Copy a log larger than `most` bytes to ``<name>.1`` and truncate it.

    The writer must append; it continues at the new end.
    """
    if log.stat().st_size > most:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
