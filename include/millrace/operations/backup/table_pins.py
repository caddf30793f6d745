"""Tables pinned at one version each, in the order that makes them consistent, with the part of their Delta logs that names it.

The order is that of a clone (millrace.operations.recovery.clone), with what says something about the tables before them: verified states
(``recovery_checkpoints``) and records of rebuilt slices are never ahead of what they are about. Of a Delta log the newest
checkpoint up to the version goes along, with the commits behind it; they name the files that follow later. Those stay on
disk for a day after they were replaced (VACUUM), and may be linked without haste.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace.base.errors import Malformed
from millrace.base.settings import Settings
from millrace.operations.backfill.derived import SLICES, derived_names
from millrace.operations.backup.files import BackupFiles
from millrace.operations.backup.manifest import DATA_FOLDER
from millrace.operations.recovery.clone import tables_to_clone
from millrace.storage.delta_log import log_files_of_version
from millrace.storage.store import store_at
from millrace.storage.table import open_table, table_exists


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """One table at one version."""

    uri: str
    name: str
    version: int
    files: dict[str, int]
    """Live files, relative to the table, with their sizes in bytes."""


def tables_to_pin(settings: Settings) -> Iterator[str]:
    """The names of all tables that are there, in the order in which they are pinned."""
    slices = f"derived/{SLICES}"
    derived = [f"derived/{name}" for name in derived_names(settings)]
    about = [slices, *(each for each in derived if each != slices), "quality/results", "quality/quarantine"]
    for name in [*about, "recovery_checkpoints"]:
        if table_exists(settings.table_uri(name)):
            yield name
    yield from tables_to_clone(settings)


def pin_tables(settings: Settings, files: BackupFiles | None) -> dict[str, PinnedTable]:
    """Pin all tables; their logs go into `files` (None: a dry run, nothing is written). By name, in the order of pinning.

    The caller holds back what is given up (millrace.node.retention.removal_lock).
    """
    found = {}
    for name in tables_to_pin(settings):
        uri = settings.table_uri(name)
        with store_at(uri).lease():  # nothing of the Delta log is cleaned away meanwhile
            table = open_table(uri)
            if table is None:
                continue
            if files is not None:
                for part in log_files_of_version(table.store, table.version):
                    files.copy_table_file(table.store, part, name)
        found[name] = PinnedTable(uri, name, table.version, table.live_files())
        if files is not None:
            _check(files.folder / DATA_FOLDER / name, found[name])
    return found


def _check(copy: Path, pinned: PinnedTable) -> None:
    """The copied log must name the same files at the same version. Raises Malformed."""
    table = open_table(copy)
    if table is None or table.version != pinned.version or table.live_files() != pinned.files:
        raise Malformed(
            f"the Delta log of {pinned.uri} does not give version {pinned.version} from its last checkpoint on"
        )
