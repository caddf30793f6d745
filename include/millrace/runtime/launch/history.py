"""The history of operations and failures: bounded JSON lines under ``run/history``.

The first process that sees a run end writes its line. A file that reaches its bound replaces ``<name>.1.jsonl``. A line
is written whole under a lock of the file, so concurrent readers and writers need nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from millrace.base.settings import Settings

OPERATIONS: Final = "operations"
FAILURES: Final = "failures"
MAX_BYTES: Final = 4 << 20
"""Size at which a history file is rotated; one rotated file is kept."""


def history_path(settings: Settings, name: str) -> Path:
    """Return the path of the history `name` (:data:`OPERATIONS` or :data:`FAILURES`)."""
    return settings.run_path / "history" / f"{name}.jsonl"


def append_history(path: Path, line: Mapping[str, Any], *, max_bytes: int = MAX_BYTES) -> None:
    """Append one line; rotate the file first if it has reached `max_bytes`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line, default=str, separators=(",", ":")) + "\n"
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                current = os.stat(path)
            except FileNotFoundError:
                continue  # rotated by another writer between our open and our lock
            if current.st_ino != os.fstat(file.fileno()).st_ino:
                continue
            if current.st_size >= max_bytes:
                path.replace(_older(path))
                continue
            file.write(text.encode())
            return


def read_history(path: Path, *, limit: int = 200) -> list[dict[str, Any]]:
    """Return the newest `limit` lines, newest first. Incomplete lines (after a full disk) are skipped."""
    found: list[dict[str, Any]] = []
    for line in _newest_first(path):
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            found.append(value)
        if len(found) >= limit:
            break
    return found


def _newest_first(path: Path) -> Iterator[bytes]:
    for file in (path, _older(path)):
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        yield from reversed(lines)


def _older(path: Path) -> Path:
    return path.with_suffix(f".1{path.suffix}")
