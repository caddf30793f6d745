"""Read the catalog's SQLite file without a coordinator and without changing it.

Reading creates no missing file, and no table that a file of an earlier build lacks. (SQLite's own ``-shm`` and ``-wal``
files may appear: readers and writers coordinate through them.) Reading names alone does not import Arrow.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millrace.base.errors import UnsupportedVersion

if TYPE_CHECKING:
    from millrace.catalog.collection import CollectionInfo

FORMAT_VERSION: Final = 1
"""The format version, in SQLite's ``user_version``. Files of early builds have 0; the first writer sets it to 1.

A build raises it when older builds would misread the file; a table that they may ignore is no reason.
"""

BUSY_TIMEOUT_SECONDS: Final = 5.0
"""How long a read waits for a writer."""


def catalog_path(data_dir: Path) -> Path:
    """Return the path of a deployment's catalog file."""
    return data_dir / "coord" / "coord.db"


def open_read_only(data_dir: Path) -> sqlite3.Connection | None:
    """Open a read-only connection; None if no coordinator has run yet."""
    path = catalog_path(data_dir)
    if not path.exists():
        return None
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        timeout=BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        check_format_version(db, path)
    except BaseException:
        db.close()
        raise
    return db


def check_format_version(db: sqlite3.Connection, path: Path | str) -> None:
    """Check that this build can read the file: tables that it does not know may hold data that it must not ignore.

    Raises UnsupportedVersion if a newer build wrote it. SQLite's own errors are left to the next call.
    """
    try:
        [[found]] = db.execute("pragma user_version")
    except sqlite3.Error:
        return
    if found > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"the catalog {path} has format version {found}, and this build reads version {FORMAT_VERSION}: run the"
            " build"
            " that wrote it, or a newer one"
        )


def collection_names(data_dir: Path) -> list[str]:
    """Return the names of all collections that are not dropped, sorted; empty if the file cannot be read."""
    try:
        db = open_read_only(data_dir)
        if db is None:
            return []
        with closing(db):
            return [row[1] for row in _rows(db, dropped=False)]
    except sqlite3.Error:
        return []


def pchannel_names(data_dir: Path) -> set[str]:
    """Return the names of the deployment's PChannels; empty if the file cannot be read."""
    try:
        db = open_read_only(data_dir)
        if db is None:
            return set()
        with closing(db):
            return {name for (name,) in db.execute("select name from pchannel")}
    except sqlite3.Error:
        return set()


def read_collections(data_dir: Path, *, dropped: bool = False) -> list[CollectionInfo]:
    """Return the collections by name, with `dropped` also the dropped ones; empty if no coordinator has run yet."""
    db = open_read_only(data_dir)
    if db is None:
        return []
    with closing(db):
        return select_collections(db, dropped=dropped)


def select_collections(db: sqlite3.Connection, *, dropped: bool) -> list[CollectionInfo]:
    """Return the same through an open connection to the file."""
    return [collection_from_row(row) for row in _rows(db, dropped=dropped)]


def collection_from_row(row: tuple[Any, ...]) -> CollectionInfo:
    """Build a collection from a row of the file's table of collections."""
    from millrace.catalog.collection import CollectionInfo
    from millrace.message.schema import CollectionSchema

    number, name, state, vchannels, schemas, partitions, next_partition = row
    return CollectionInfo(
        id=number,
        name=name,
        state=state,
        vchannels=tuple(json.loads(vchannels)),
        schemas=tuple(CollectionSchema.from_json(schema) for schema in json.loads(schemas)),
        partitions=json.loads(partitions),
        next_partition=next_partition,
    )


def _rows(db: sqlite3.Connection, *, dropped: bool) -> Iterator[tuple[Any, ...]]:
    where = "" if dropped else "where state != 'dropped'"
    return db.execute(f"select * from collection {where} order by name, id")
