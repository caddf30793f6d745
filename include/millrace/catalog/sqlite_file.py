"""The catalog's file, to look at: what the coordinator keeps of collections, without a coordinator and without a change to the file.

Who looks makes no file where there is none, and no table that a file of an earlier build lacks. (SQLite's own ``-shm`` and ``-wal``
may appear beside it: readers and writers meet there.) Names alone are read without Arrow.
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
"""Of the file, in SQLite's ``user_version``; 0 is a file of an earlier build, which the first writer makes 1. A build that changes what
others have to know raises it; a table that they may ignore is no reason to."""

BUSY_TIMEOUT_SECONDS: Final = 5.0
"""How long a look waits for a writer."""


def catalog_path(data_dir: Path) -> Path:
    """The file of a deployment."""
    return data_dir / "coord" / "coord.db"


def open_read_only(data_dir: Path) -> sqlite3.Connection | None:
    """A connection that can write nothing; None where no coordinator was at work yet."""
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
    """Raise UnsupportedVersion if a newer build made the file. Tables that this build does not know may hold what it must not forget.

    What keeps SQLite from saying it is left to the call that comes next.
    """
    try:
        [[found]] = db.execute("pragma user_version")
    except sqlite3.Error:
        return
    if found > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"the catalog {path} has form {found}, and this build knows {FORMAT_VERSION}: run the build that made it, or a newer one"
        )


def collection_names(data_dir: Path) -> list[str]:
    """Of the collections that are there and not dropped, sorted; none where they cannot be told."""
    try:
        db = open_read_only(data_dir)
        if db is None:
            return []
        with closing(db):
            return [row[1] for row in _rows(db, dropped=False)]
    except sqlite3.Error:
        return []


def pchannel_names(data_dir: Path) -> set[str]:
    """The PChannels of a deployment; none where they cannot be told."""
    try:
        db = open_read_only(data_dir)
        if db is None:
            return set()
        with closing(db):
            return {name for (name,) in db.execute("select name from pchannel")}
    except sqlite3.Error:
        return set()


def read_collections(data_dir: Path, *, dropped: bool = False) -> list[CollectionInfo]:
    """The collections by name; with `dropped` those too that are gone. None where no coordinator was at work yet."""
    db = open_read_only(data_dir)
    if db is None:
        return []
    with closing(db):
        return select_collections(db, dropped=dropped)


def select_collections(db: sqlite3.Connection, *, dropped: bool) -> list[CollectionInfo]:
    """The same by a connection to the file."""
    return [collection_from_row(row) for row in _rows(db, dropped=dropped)]


def collection_from_row(row: tuple[Any, ...]) -> CollectionInfo:
    """A row of the file's table of collections."""
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
