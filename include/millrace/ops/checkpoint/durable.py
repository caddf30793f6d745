"""What stands before the log's end is on the disk: files, log entries and folders of every table up to its version now.

Streaming node and flusher fsync what they commit. Others that write here may not, and truncation must not depend on them:
so before the log gives anything up, what was committed since the last time is synced once more. Its cost is that of the
commits since. Which versions are known to be synced stands in a file that may be lost: then all live files are synced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from deltalake import DeltaTable

from millrace.ops.operation import write_json
from millrace.settings import Settings
from millrace.tables.delta_files import live_files, open_table
from millrace.tables.fsync import sync

MEMORY: Final = "checkpoint-synced.json"


def tables(settings: Settings) -> dict[str, Path]:
    """The tables that the log's truncation rests on, by name."""
    found = {"wal": settings.wal_path, "segments": settings.segments_path, "checkpoints": settings.checkpoints_path}
    for kind in ("collections", "deletes"):
        folder = settings.data_dir / kind
        if folder.is_dir():
            found |= {f"{kind}/{each.name}": each for each in sorted(folder.iterdir()) if each.name.isdigit()}
    return found


def sync_tables(settings: Settings) -> int:
    """Sync what came since the last call; how many files that was."""
    memory = settings.run_path / MEMORY
    known = _read(memory)
    reached: dict[str, int] = {}
    count = 0
    for name, path in tables(settings).items():
        table = open_table(path)
        if table is not None:
            reached[name] = int(table.version())
            count += _sync_table(table, path, known.get(name))
    write_json(memory, reached)
    return count


def _sync_table(table: DeltaTable, path: Path, known: int | None) -> int:
    if known == int(table.version()):
        return 0
    entries = _entries(path, known, int(table.version()))
    files = live_files(table) if entries is None else _added(entries)
    log = path / "_delta_log"
    folders = {log, path}
    count = 0
    for name in files:
        folders.update(_folders(path, name))
        count += _sync(path / name)
    for entry in entries if entries is not None else sorted(log.glob("*.json")):
        count += _sync(entry)
    for folder in folders:
        _sync(folder)
    return count


def _entries(path: Path, known: int | None, version: int) -> list[Path] | None:
    """The log entries behind `known` up to `version`; None where some are gone, or nothing is known."""
    if known is None or known > version:
        return None
    found = [path / "_delta_log" / f"{number:020d}.json" for number in range(known + 1, version + 1)]
    return found if all(each.exists() for each in found) else None


def _added(entries: list[Path]) -> Iterator[str]:
    """Files that the commits added, the removed ones among them included (they are skipped where they are gone)."""
    for entry in entries:
        for line in entry.read_text().splitlines():
            if line.startswith('{"add"'):
                yield unquote(json.loads(line)["add"]["path"])


def _folders(path: Path, name: str) -> Iterator[Path]:
    """The folders from a file's own up to the table's."""
    parent = (path / name).parent
    while parent != path and path in parent.parents:
        yield parent
        parent = parent.parent


def _sync(path: Path) -> int:
    """fsync; 0 where there is nothing any more."""
    try:
        sync(path)
    except FileNotFoundError:
        return 0
    return 1


def _read(path: Path) -> dict[str, int]:
    try:
        value = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}
    return (
        {name: version for name, version in value.items() if isinstance(version, int)}
        if isinstance(value, dict)
        else {}
    )
