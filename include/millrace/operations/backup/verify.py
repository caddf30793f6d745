"""Verification of a backup: each file exists, matches the manifest, and refers to nothing outside."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from pydantic import Field

from millrace.operations.backup.bucket import BackupPlace
from millrace.operations.backup.manifest import BackupManifest, StoredFile, find_backup, open_stored
from millrace.operations.backup.safe_paths import unsafe_references
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


def verify_backup(path: BackupPlace) -> BackupVerifyReport:
    """Verify the backup at `path`, or the newest in it.

    Raises BackupNotFound, and BackupDamaged if the manifest is invalid.
    """
    started = time.monotonic()
    folder, manifest = find_backup(path)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as pool:
        found = pool.map(lambda each: _problem(folder, manifest, *each), manifest.files.items())
        problems = tuple(words for words in found if words)
    problems += tuple(unsafe_references(manifest.files, lambda name: open_stored(folder, manifest, name)))
    return BackupVerifyReport(
        id=manifest.id,
        folder=str(folder),
        files=len(manifest.files),
        bytes=manifest.bytes,
        problems=problems,
        seconds=round(time.monotonic() - started, 3),
    )


def _problem(folder: BackupPlace, manifest: BackupManifest, name: str, stored: StoredFile) -> str:
    try:
        with open_stored(folder, manifest, name) as file:
            size = file.seek(0, os.SEEK_END)
            if size != stored.size:
                return f"{name} has {size} bytes instead of {stored.size}"
            file.seek(0)
            if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:  # type: ignore[arg-type]
                return f"{name} has changed since it was written"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return ""
