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
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

from deltalake import DeltaTable

from millrace.ops.checkpoint.store import checkpoints_path
from millrace.settings import Settings
from millrace.tables.bases import bases_path
from millrace.tables.delta_files import live_files, open_table
from millrace.tables.delta_log import commit_lease
from millrace.tables.wal_trims import trims_path


def table_paths(settings: Settings) -> Iterator[Path]:
    """The folders of all tables that are there, in the order in which a clone takes them: each is looked for when it is its
    turn, for the first trim makes a table that a commit to ``wal`` then means."""
    for path in _known_paths(settings):
        if DeltaTable.is_deltatable(str(path)):
            yield path


def _known_paths(settings: Settings) -> Iterator[Path]:
    yield settings.checkpoints_path
    yield settings.segments_path
    for parent in (settings.deletes_path(0).parent, settings.collections_path(0).parent):
        yield from sorted(parent.iterdir()) if parent.is_dir() else []
    yield settings.wal_path
    yield bases_path(settings.wal_path)
    yield trims_path(settings.wal_path)


def recovery_tables(settings: Settings) -> list[Path]:
    """What recovery itself begins with, where it is there: the confirmed states."""
    path = checkpoints_path(settings)
    return [path] if DeltaTable.is_deltatable(str(path)) else []


def table_name(settings: Settings, path: Path) -> str:
    """A table's folder relative to the data folder."""
    return str(path.relative_to(settings.data_dir))


@contextmanager
def clone(settings: Settings) -> Iterator[Settings]:
    """Settings of a clone that is removed in the end. It lies inside the data folder: links need one file system."""
    home = settings.run_path / "clones" / uuid.uuid4().hex
    try:
        clone_staged(settings, home)
        for path in chain(table_paths(settings), recovery_tables(settings)):
            clone_table(path, home / path.relative_to(settings.data_dir))
        clone_staged(settings, home)
        if settings.parked_path.is_dir():
            shutil.copytree(settings.parked_path, home / settings.parked_path.relative_to(settings.data_dir))
        yield replace(settings, data_dir=home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def clone_staged(settings: Settings, home: Path) -> None:
    """Link the staged files that are there. Before ``wal`` is taken, for a trim of it lets such files go, and behind it, for
    an Import that came meanwhile."""
    for path in sorted(settings.staged_path.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(settings.staged_path).parts):
            link(path, home / path.relative_to(settings.data_dir))


def clone_table(source: Path, target: Path) -> None:
    """Clone one table. A live file that is missing is missing in the clone too."""
    (target / "_delta_log").mkdir(parents=True)
    with commit_lease(source):  # nothing of the log is cleaned away meanwhile
        for entry in sorted((source / "_delta_log").iterdir()):
            if entry.is_file():
                shutil.copyfile(entry, target / "_delta_log" / entry.name)
    table = open_table(target)
    assert table is not None
    for name in live_files(table):
        link(source / name, target / name)


def link(source: Path, target: Path) -> None:
    """Hard-link a file where it is there, once; the folders come with it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except (FileNotFoundError, FileExistsError):
        pass
