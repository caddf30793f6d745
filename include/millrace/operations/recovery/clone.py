"""A shallow clone of the tables: logs copied, data files hard-linked, nothing of it seen by the running system.

Diagnosis and rehearsal work on it: what they see stands still, and what they change is thrown away. The checkpoints are taken
before the tables that the flusher commits before them, and ``wal`` behind all: so each table may be ahead of the checkpoint, as
a flusher that died between two commits leaves it, and nothing is ahead of ``wal``. Deletes are taken before rows, because
compaction takes away a delete once the rows that it hit are gone. What is written before a commit to ``wal`` that means it (bases,
trims) is taken last.
"""

from __future__ import annotations

import os
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
from millrace.storage.store import store_at
from millrace.storage.table import table_at, table_exists
from millrace.tables.collections.data_tables import stored_collection_ids


def tables_to_clone(settings: Settings) -> Iterator[str]:
    """The names of all tables that are there, in the order in which a clone takes them: each is looked for when it is its
    turn, for the first trim makes a table that a commit to ``wal`` then means."""
    for name in _known_tables(settings):
        if table_exists(settings.table_uri(name)):
            yield name


def _known_tables(settings: Settings) -> Iterator[str]:
    yield "checkpoints"
    yield "segments"
    for kind in ("deletes", "collections"):
        for number in stored_collection_ids(settings, kind):
            yield f"{kind}/{number}"
    yield "wal"
    yield "bases"
    yield "wal_trims"


def checkpoint_tables(settings: Settings) -> list[str]:
    """What recovery itself begins with, where it is there: the confirmed states."""
    name = "recovery_checkpoints"
    return [name] if table_exists(settings.table_uri(name)) else []


@contextmanager
def clone(settings: Settings) -> Iterator[Settings]:
    """Settings of a clone that is removed in the end. It lies inside the data folder: links need one file system."""
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
    """A folder for a clone, removed in the end; those that killed recoveries left are removed first."""
    folder = ScratchFolder(settings.run_path / "clones" / uuid.uuid4().hex, pattern="[0-9a-f]{32}")
    try:
        yield folder.path
    finally:
        folder.discard()


def clone_staged(settings: Settings, home: Path) -> None:
    """Link the staged files that are there. Before ``wal`` is taken, for a trim of it lets such files go, and behind it, for
    an Import that came meanwhile."""
    for path in sorted(settings.staged_path.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(settings.staged_path).parts):
            link_if_present(path, home / path.relative_to(settings.data_dir))


def clone_table(source: str, target: str) -> None:
    """Clone one table. A live file that is missing is missing in the clone too."""
    here, there = store_at(source), store_at(target)
    with here.lease():  # nothing of the log is cleaned away meanwhile
        for name in here.list(LOG_FOLDER):
            there.take(here, f"{LOG_FOLDER}/{name}", "copy")
    for name in table_at(target).live_files():
        there.take(here, name, "link")


def link_if_present(source: Path, target: Path) -> None:
    """Hard-link a file where it is there, once; the folders come with it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except (FileNotFoundError, FileExistsError):
        pass
