"""Files and folders made durable; small files replaced whole: a reader sees the old one or the new one, and a crash leaves one of the two."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any


def sync(file: Path | int) -> None:
    """Make a file's bytes, or a folder's entries, durable; of a path, or of an open descriptor."""
    if isinstance(file, int):
        os.fsync(file)
        return
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_data(file: int) -> None:
    """Make the bytes of an open file durable, and of its metadata what it takes to find them again."""
    os.fdatasync(file)


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make `folder`, durable up to the first parent that was there: each new level is an entry of the level above. `mode` is its own."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(mode, exist_ok=True)
    sync(folder.parent)


def replace_file(path: Path, data: bytes | str, *, synced: bool = False) -> None:
    """Make `data` the content of `path`, which its owner alone can read; text as UTF-8. Makes the parents that are missing.

    `synced`: it stands after a power loss too, as soon as this returns. Writers beside each other each write a whole file, and the
    last one stands. Raises OSError, with the old file as it was.
    """
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
    try:
        draft.unlink(missing_ok=True)  # of a process that had this id and was killed
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
    """The same with `value` as one line of JSON."""
    replace_file(path, json.dumps(value) + "\n", synced=synced)
