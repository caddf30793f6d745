"""Verification of a backup: each file exists, matches the manifest, and refers to nothing outside."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pydantic import Field

from millrace.operations.backup.manifest import DATA_FOLDER, StoredFile, find_backup
from millrace.operations.backup.safe_paths import open_beneath, unsafe_references
from millrace.operations.operation import OperationReport

_THREADS: Final = 4


class BackupVerifyReport(OperationReport):
    """The result of a verification. `ok` is True if every file is as it was written."""

    id: str
    folder: str
    files: int
    bytes: int
    problems: tuple[str, ...] = Field(description="A message for each file that has changed.")
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_backup(path: Path) -> BackupVerifyReport:
    """Verify the backup at `path`, or the newest in it.

    Raises BackupNotFound, and BackupDamaged if the manifest is invalid.
    """
    started = time.monotonic()
    folder, manifest = find_backup(path)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        found = pool.map(lambda each: _problem(folder, *each), manifest.files.items())
        problems = tuple(words for words in found if words)
    problems += tuple(unsafe_references(manifest.files, lambda name: open_beneath(folder, f"{DATA_FOLDER}/{name}")))
    return BackupVerifyReport(
        id=manifest.id,
        folder=str(folder),
        files=len(manifest.files),
        bytes=manifest.bytes,
        problems=problems,
        seconds=round(time.monotonic() - started, 3),
    )


def _problem(folder: Path, name: str, stored: StoredFile) -> str:
    try:
        with open_beneath(folder, f"{DATA_FOLDER}/{name}") as file:
            size = os.fstat(file.fileno()).st_size
            if size != stored.size:
                return f"{name} has {size} bytes instead of {stored.size}"
            if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return ""
