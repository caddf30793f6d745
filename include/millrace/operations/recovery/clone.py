"""A shallow clone of the tables: logs copied, data files hard-linked, invisible to the running system.

Diagnosis and rehearsal work on a clone: it does not change under them, and their changes are discarded.

The order of cloning: the checkpoints come before the tables that the flusher commits before them, and ``wal`` comes
after all of these. Each table may thus be ahead of its checkpoint, as after a flusher that died between two commits,
but nothing is ahead of ``wal``. Deletes come before rows, because compaction removes a delete after the rows that it
hit. Tables that are written before the commit to ``wal`` that refers to them (bases, trims) come last.
"""

from __future__ import annotations

import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

from millrace.base.files import make_folder
from millrace.base.scratch_folder import ScratchFolder
from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path, open_read_only
from millrace.storage.delta_log import LOG_FOLDER
from millrace.storage.store import list_below, store_at
from millrace.storage.table import table_at, table_exists
from millrace.tables.collections.layout import rows_name, stored_collection_ids
from millrace.tables.collections.staged_files import StagedFiles


def tables_to_clone(settings: Settings) -> Iterator[str]:
    """Yield the names of all existing tables in the order of cloning.

    Each table is looked up when its turn comes: the first trim creates a table that a commit to ``wal`` then refers to.
    """
    for name in _known_tables(settings):
        if table_exists(settings.table_uri(name)):
            yield name


def _known_tables(settings: Settings) -> Iterator[str]:
    yield "checkpoints"
    yield "segments"
    for number in stored_collection_ids(settings, "deletes"):
        yield f"deletes/{number}"
    for number in stored_collection_ids(settings, "rows"):
        yield rows_name(settings, number)
    yield "wal"
    yield "bases"
    yield "wal_trims"


def checkpoint_tables(settings: Settings) -> list[str]:
    """Return the table of verified states that a recovery starts from, if it exists."""
    name = "recovery_checkpoints"
    return [name] if table_exists(settings.table_uri(name)) else []


@contextmanager
def clone(settings: Settings) -> Iterator[Settings]:
    """Yield the settings of a clone, which is removed at the end.

    It lies in the data folder: links need one file system.
    """
    with clone_folder(settings) as home:
        clone_staged(settings, home)
        scratch = settings.with_data_dir(home)
        for name in chain(tables_to_clone(settings), checkpoint_tables(settings)):
            clone_table(settings.table_uri(name), scratch.table_uri(name))
        clone_staged(settings, home)
        if (source := open_read_only(settings.data_dir)) is not None:
            copy = catalog_path(scratch.data_dir)
            make_folder(copy.parent)
            with closing(source), closing(sqlite3.connect(copy)) as target:
                source.backup(target)
        if settings.parked_path.is_dir():
            shutil.copytree(settings.parked_path, home / settings.parked_path.relative_to(settings.data_dir))
        yield scratch


@contextmanager
def clone_folder(settings: Settings) -> Iterator[Path]:
    """Yield a folder for a clone, removed at the end. First removes the folders of killed recoveries."""
    folder = ScratchFolder(settings.run_path / "clones" / uuid.uuid4().hex, pattern="[0-9a-f]{32}")
    try:
        yield folder.path
    finally:
        folder.discard()


def clone_staged(settings: Settings, home: Path) -> None:
    """Link the staged files.

    Called twice: before ``wal`` is cloned, because a trim of it releases files, and after it, for an Import that
    arrived meanwhile.
    """
    staged, target = StagedFiles.of(settings), store_at(home / "staged")
    for source in (store_at(place) for place in (staged.place, staged.earlier) if place is not None):
        for name in list_below(source):
            if not any(part.startswith(".") for part in name.split("/")) and target.size(name) is None:
                target.take(source, name, "link")


def clone_table(source: str, target: str) -> None:
    """Clone one table. A missing live file is missing in the clone too."""
    here, there = store_at(source), store_at(target)
    with here.lease():  # no log cleanup meanwhile
        for name in here.list(LOG_FOLDER):
            there.take(here, f"{LOG_FOLDER}/{name}", "copy")
    for name in table_at(target).live_files():
        there.take(here, name, "link")
