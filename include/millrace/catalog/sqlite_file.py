"""Read the catalog's SQLite file without a coordinator and without changing it.

Reading creates no missing file, and no table that a file of an earlier build lacks. (SQLite's own ``-shm`` and ``-wal``
files may appear: readers and writers coordinate through them.) Reading names alone does not import Arrow.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from millrace.base.errors import UnsupportedVersion

if TYPE_CHECKING:
    from millrace.catalog.collection import CollectionInfo, CollectionPage, CollectionQuery

FORMAT_VERSION: Final = 1
"""The format version, in SQLite's ``user_version``. Files of early builds have 0; the first writer sets it to 1.

A build raises it when older builds would misread the file; a table that they may ignore is no reason.
"""

BUSY_TIMEOUT_SECONDS: Final = 5.0
"""Time that a read waits for a writer."""
_EXISTS: Final = "state != 'dropped'"

_T = TypeVar("_T")


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
        return [name for (name,) in _select(data_dir, f"select name from collection where {_EXISTS} order by name")]
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
    """Return all collections by name, with `dropped` also the dropped ones; empty if no coordinator has run yet.

    The cost grows with their number: readers of one collection use :func:`read_collection`, lists :func:`read_page`.
    """
    return _read(data_dir, lambda db: select_collections(db, dropped=dropped), [])


def read_collection(data_dir: Path, name: str) -> CollectionInfo | None:
    """Return the collection with a name or an alias, unless it is dropped; None if there is none."""
    row = _read(data_dir, lambda db: select_row(db, name), None)
    return None if row is None else collection_from_row(row)


def read_aliases(data_dir: Path, collection_id: int | None = None) -> dict[str, int]:
    """Return the ids of collections by alias, sorted by alias; with `collection_id`, the aliases of that one."""

    return _read(data_dir, lambda db: select_aliases(db, collection_id) if _has_aliases(db) else {}, {})


def without_aliases(data_dir: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Return names or ids of collections, with the collection's id in place of each alias."""
    aliases = read_aliases(data_dir)
    return tuple(str(aliases.get(name, name)) for name in names)


def read_collections_by_id(data_dir: Path, ids: Iterable[int]) -> dict[int, CollectionInfo]:
    """Return those collections that exist, also dropped ones, by id."""
    return _read(data_dir, lambda db: select_by_id(db, ids), {})


def read_page(data_dir: Path, query: CollectionQuery) -> CollectionPage:
    """Return one page of the collections; an empty one if no coordinator has run yet."""
    from millrace.catalog.collection import CollectionPage

    return _read(data_dir, lambda db: select_page(db, query), CollectionPage([], 0, ""))


def read_state_counts(data_dir: Path) -> dict[str, int]:
    """Return the number of collections in each state."""
    return dict(_select(data_dir, "select state, count(*) from collection group by state"))


def read_names(data_dir: Path, *, dropped: bool = True) -> dict[int, str]:
    """Return the names of the collections by id; with `dropped`, also of dropped ones."""
    return dict(_select(data_dir, f"select id, name from collection where {'true' if dropped else _EXISTS}"))


def _read(data_dir: Path, ask: Callable[[sqlite3.Connection], _T], absent: _T) -> _T:
    """Return what `ask` reads from the file; `absent` if no coordinator has run yet."""
    db = open_read_only(data_dir)
    if db is None:
        return absent
    with closing(db):
        return ask(db)


def _select(data_dir: Path, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
    return _read(data_dir, lambda db: db.execute(statement, values).fetchall(), [])


def _has_aliases(db: sqlite3.Connection) -> bool:
    """Return whether the file has the table of aliases. Files of earlier builds lack it."""
    return db.execute("select 1 from sqlite_master where name = 'alias'").fetchone() is not None


def select_row(db: sqlite3.Connection, name: str) -> tuple[Any, ...] | None:
    """Return the row of the collection with a name, or else with an alias, through an open connection."""
    named = db.execute(f"select * from collection where name = ? and {_EXISTS}", (name,)).fetchone()
    if named is not None:
        return tuple(named)
    try:
        found = db.execute(
            f"select * from collection where {_EXISTS} and id = (select collection_id from alias where name = ?)",
            (name,),
        ).fetchone()
    except sqlite3.OperationalError:
        if _has_aliases(db):
            raise
        return None  # a file of an earlier build
    return None if found is None else tuple(found)


def select_aliases(db: sqlite3.Connection, collection_id: int | None) -> dict[str, int]:
    """Return the ids of collections by alias, or the aliases of one collection, through an open connection."""
    where, values = ("", ()) if collection_id is None else ("where collection_id = ?", (collection_id,))
    return dict(db.execute(f"select name, collection_id from alias {where} order by name", values).fetchall())


def select_collections(db: sqlite3.Connection, *, dropped: bool) -> list[CollectionInfo]:
    """Return all collections by name, through an open connection to the file."""
    where = "" if dropped else f"where {_EXISTS}"
    return [collection_from_row(row) for row in db.execute(f"select * from collection {where} order by name, id")]


def select_vchannels(db: sqlite3.Connection) -> list[tuple[int, list[str]]]:
    """Return the id and the VChannels of each collection that is not dropped, through an open connection."""
    rows = db.execute(f"select id, vchannels from collection where {_EXISTS}")
    return [(number, json.loads(vchannels)) for number, vchannels in rows]


def select_by_id(db: sqlite3.Connection, ids: Iterable[int]) -> dict[int, CollectionInfo]:
    """Return collections by id, through an open connection to the file."""
    found: Iterator[tuple[Any, ...]] = (
        row for number in dict.fromkeys(ids) for row in db.execute("select * from collection where id = ?", (number,))
    )
    return {row[0]: collection_from_row(row) for row in found}


def select_page(db: sqlite3.Connection, query: CollectionQuery) -> CollectionPage:
    """Return a page of the collections, through an open connection to the file.

    Reads the rows of the page, and of the others their entries in an index of names.
    """
    from millrace.catalog.collection import MAX_PAGE_SIZE, CollectionPage

    where = ["true"] if query.dropped else [_EXISTS]
    values: list[Any] = []
    if query.search:
        where.append("instr(lower(name), lower(?))")
        values.append(query.search)
    (total,) = db.execute(f"select count(*) from collection where {' and '.join(where)}", values).fetchone()
    if query.after:
        number, colon, name = query.after.partition(":")
        where.append("(name, id) > (?, ?)")
        values += [name, int(number)] if colon and number.isdecimal() and len(number) < 19 else [query.after, 1 << 62]
    limit = max(1, min(query.limit, MAX_PAGE_SIZE))
    rows = db.execute(
        f"select * from collection where {' and '.join(where)} order by name, id limit ? offset ?",
        (*values, limit + 1, max(0, query.offset)),
    ).fetchall()
    items = [collection_from_row(row) for row in rows[:limit]]
    return CollectionPage(items, total, f"{items[-1].id}:{items[-1].name}" if len(rows) > limit else "")


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
