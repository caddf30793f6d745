"""Tables pinned at one version each, in the order that makes them consistent, with the part of their Delta logs that names it.

The order is that of a clone (millrace.ops.recovery.clone), with what says something about the tables before them: verified states
(``recovery_checkpoints``) and records of rebuilt slices are never ahead of what they are about. Of a Delta log the newest
checkpoint up to the version goes along, with the commits behind it; they name the files that follow later. Those stay on
disk for a day after they were replaced (VACUUM), and may be linked without haste.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deltalake import DeltaTable

from millrace.errors import Malformed
from millrace.ops.backfill.derived import SLICES, derived_path
from millrace.ops.backup.files import Files
from millrace.ops.backup.manifest import DATA
from millrace.ops.checkpoint.store import checkpoints_path as recovery_checkpoints_path
from millrace.ops.quality.quarantine import quarantine_path
from millrace.ops.recovery.clone import table_name, table_paths
from millrace.settings import Settings
from millrace.tables.delta_files import live_files, open_table
from millrace.tables.delta_log import commit_lease
from millrace.tables.quality_state import results_path

_ENTRY: Final = re.compile(r"(\d{20})\..+")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint\.parquet")
_HINT: Final = "_last_checkpoint"


@dataclass(frozen=True, slots=True)
class Pinned:
    """One table at one version."""

    path: Path
    name: str
    version: int
    files: dict[str, int]
    """Live files, relative to the table, with their sizes in bytes."""


def all_tables(settings: Settings) -> Iterator[Path]:
    """The folders of all tables that are there, in the order in which they are pinned."""
    slices = derived_path(settings, SLICES)
    derived = sorted(slices.parent.iterdir()) if slices.parent.is_dir() else []
    about = [slices, *(each for each in derived if each != slices), results_path(settings), quarantine_path(settings)]
    for path in [*about, recovery_checkpoints_path(settings)]:
        if DeltaTable.is_deltatable(str(path)):
            yield path
    yield from table_paths(settings)


def pin(settings: Settings, files: Files | None) -> dict[str, Pinned]:
    """Pin all tables; their logs go into `files` (None: a dry run, nothing is written). By name, in the order of pinning.

    The caller holds back what is given up (millrace.node.removal).
    """
    found = {}
    for path in all_tables(settings):
        with commit_lease(path):  # nothing of the Delta log is cleaned away meanwhile
            table = open_table(path)
            if table is None:
                continue
            name, version = table_name(settings, path), int(table.version())
            if files is not None:
                _take_log(path, name, version, files)
        found[name] = Pinned(path, name, version, live_files(table))
        if files is not None:
            _check(files.folder / DATA / name, found[name])
    return found


def _take_log(path: Path, name: str, version: int, files: Files) -> None:
    log = path / "_delta_log"
    entries = [
        entry.name for entry in log.iterdir() if (match := _ENTRY.fullmatch(entry.name)) and int(match[1]) <= version
    ]
    start = max((int(entry[:20]) for entry in entries if _CHECKPOINT.fullmatch(entry)), default=0)
    for entry in sorted(entries):
        if int(entry[:20]) >= start:
            files.copy(log / entry, f"{name}/_delta_log/{entry}")
    try:
        hinted = int(json.loads((log / _HINT).read_bytes())["version"])
    except (FileNotFoundError, ValueError, KeyError):
        return
    if hinted == start:  # a hint that may be missing, but may not point behind the version
        files.copy(log / _HINT, f"{name}/_delta_log/{_HINT}")


def _check(copy: Path, pinned: Pinned) -> None:
    """The copied log must name the same files at the same version. Raises Malformed."""
    table = open_table(copy)
    if table is None or int(table.version()) != pinned.version or live_files(table) != pinned.files:
        raise Malformed(
            f"the Delta log of {pinned.path} does not give version {pinned.version} from its last checkpoint on"
        )
