"""The layout of collections' tables, the move of an earlier build's tables to it, and links by name.

    tables/<id>/          the published table, with its log
    tables/<id>/_rows/    the rows table, a Delta table of its own, whose files the published table names
    tables/by-name/<name> a link to ../<id> (local disks only)
    deletes/<id>/         the deletes table
    collections           the record of this layout, a file

Builds of layout 1 had the rows tables in ``collections/<id>``. On a local disk, the first use of a rows table moves
them, by renaming folders, under a lock. The record takes the folder's name, so that a build of layout 1 fails on it
instead of starting tables anew beside the moved ones. Where folders cannot be renamed (a registered store, a folder
that is a link or a mount, a copy that may only be read), the rows tables stay, and such a deployment cannot publish.

Failpoints: ``layout.renamed``, ``layout.recorded``, ``layout.moved`` after each collection, ``layout.emptied``.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from millrace.base.data_folder import encode_file_name
from millrace.base.deadline import Deadline
from millrace.base.errors import StoreCannotPublish, TableDamaged, TableUnavailable, UnsupportedVersion
from millrace.base.failpoint import hit
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import make_folder, sync
from millrace.base.settings import Settings
from millrace.storage.local import LocalStore
from millrace.storage.store import store_at

LAYOUT_VERSIONS: Final = (1, 2)
"""Layouts that this build reads. Version 1 has no record: its rows tables are in the folder ``collections``."""
TABLES: Final = "tables"
ROWS: Final = "_rows"
RECORD: Final = "collections"
"""Name of the record of layout 2, and of the folder of layout 1."""

_MOVING: Final = "_moving"
"""Folder below ``tables`` that holds the rows tables of layout 1 while they are moved."""
_UNKNOWN: Final = "_unknown"
"""Folder below ``tables`` for what else was in the folder of layout 1."""
_BY_NAME: Final = "by-name"
_LOCK: Final = "_layout.lock"
_LOCK_SECONDS: Final = 300.0
_CANNOT: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV, errno.EBUSY)
"""Errors of a folder that may not be changed, or that has another file system mounted on it."""

_log: Final = logging.getLogger(__name__)


def rows_name(settings: Settings, collection_id: int) -> str:
    """Return the name of a collection's rows table, relative to the root of all tables.

    Moves the tables of an earlier layout first. Raises UnsupportedVersion, TableDamaged, TableUnavailable.
    """
    return f"{RECORD}/{collection_id}" if has_earlier_layout(settings) else f"{TABLES}/{collection_id}/{ROWS}"


def published_name(settings: Settings, collection_id: int) -> str:
    """Return the name of a collection's published table, relative to the root of all tables.

    Raises StoreCannotPublish in a deployment whose rows tables could not be moved below it.
    """
    if has_earlier_layout(settings):
        raise StoreCannotPublish(
            f"the rows tables of {settings.tables_uri} are in {RECORD}/, where an earlier build put them, and cannot be"
            f" renamed to {TABLES}/<id>/{ROWS}: restore a backup of it into a new data folder, which publishes"
        )
    return f"{TABLES}/{collection_id}"


def earlier_name(name: str) -> str:
    """Return the name in layout 1 of a file or folder of a rows table; other names are the same in both layouts."""
    folder, _, rest = name.partition("/")
    number, _, inner = rest.partition("/")
    if folder == TABLES and (inner == ROWS or inner.startswith(f"{ROWS}/")):
        return f"{RECORD}/{number}{inner.removeprefix(ROWS)}"
    return name


def stored_collection_ids(settings: Settings, kind: str) -> list[int]:
    """Return the ids of collections that may have a rows table (`kind`: ``rows``) or a deletes table (``deletes``)."""
    folder = kind if kind != "rows" else RECORD if has_earlier_layout(settings) else TABLES
    return sorted(int(name) for name in store_at(settings.table_uri(folder)).folders() if name.isdecimal())


def has_earlier_layout(settings: Settings) -> bool:
    """Return whether the rows tables are in layout 1 and stay there. Moves them if that is possible.

    Costs two looks at the root folder, and on other stores one listing of the root per process.
    """
    root = _local_root(settings)
    if root is None:
        return _is_earlier_store(settings.tables_uri)
    return not _is_settled(root) and not _moved(Path(root))


def record_layout(settings: Settings) -> None:
    """Move the tables of an earlier layout, and write the record of the layout in a new deployment on a local disk."""
    root = _local_root(settings)
    if not has_earlier_layout(settings) and root is not None:
        make_folder(Path(root))
        _write_record(Path(root))


def _local_root(settings: Settings) -> str | None:
    """Return the folder of all tables, or None if they are in another store. Cheap: each use of a table asks."""
    uri = settings.tables_uri
    if "://" not in uri:
        return uri
    store = store_at(uri)
    return str(store.folder) if isinstance(store, LocalStore) else None


@cache
def _is_earlier_store(tables_uri: str) -> bool:
    names = set(store_at(tables_uri).folders())
    return RECORD in names and TABLES not in names


def _is_settled(root: str) -> bool:
    """Return whether nothing has to be moved. Raises UnsupportedVersion for the record of a newer layout."""
    # The order matters: the folder of layout 1 disappears only once the moving one is there.
    try:
        found = os.stat(f"{root}/{RECORD}")
    except (FileNotFoundError, NotADirectoryError):
        return not os.path.exists(f"{root}/{TABLES}/{_MOVING}")
    if stat.S_ISDIR(found.st_mode):
        return False
    _check_record(f"{root}/{RECORD}", found.st_dev, found.st_ino, found.st_mtime_ns)
    return not os.path.exists(f"{root}/{TABLES}/{_MOVING}")


@lru_cache(maxsize=64)
def _check_record(path: str, *_mark: int) -> None:
    """Check a record once for each of its marks: device, number and time of the file."""
    try:
        version = json.loads(Path(path).read_bytes())["layout"]
    except (ValueError, LookupError, TypeError) as error:
        raise TableDamaged(
            f'{path} is not the record of a layout ({error}): replace it by a file with the text {{"layout": 2}}'
        ) from error
    if version not in LAYOUT_VERSIONS:
        raise UnsupportedVersion(
            f"the tables of {os.path.dirname(path)} have layout {version}, this build knows {LAYOUT_VERSIONS}: run the"
            " build that wrote them, or a newer one"
        )


def _moved(root: Path) -> bool:
    """Move the tables of layout 1, one process at a time. Returns False if they have to stay where they are."""
    try:
        if os.path.realpath(root / RECORD) != os.path.join(os.path.realpath(root), RECORD):
            return False  # a link
        make_folder(root / TABLES)
        busy = TableUnavailable(f"another process has moved the tables of {root} for {_LOCK_SECONDS:.0f} s: try again")
        with exclusive_lock(root / TABLES / _LOCK, deadline=Deadline.after(_LOCK_SECONDS), busy=busy):
            if not _is_settled(str(root)):
                _move(root)
        return True
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        if (root / TABLES / _MOVING).exists():
            raise TableUnavailable(
                f"the tables of {root} are half moved to {TABLES}/ and cannot be changed ({error.strerror}): open that"
                " deployment once where it may be written"
            ) from error
        return False


def _move(root: Path) -> None:
    earlier, moving = root / RECORD, root / TABLES / _MOVING
    while True:  # a build of layout 1 that ran after a kill has made the earlier folder again
        if moving.is_dir():
            _write_record(root)
            hit("layout.recorded")
            _distribute(moving)
            hit("layout.emptied")
        elif earlier.is_dir():
            earlier.rename(moving)
            sync(moving.parent)
            sync(root)
            hit("layout.renamed")
        else:
            return


def _distribute(moving: Path) -> None:
    """Give each rows table its own place. Each rename is whole or not at all, so a kill leaves the rest for later."""
    tables, touched = moving.parent, set()
    for name in sorted(os.listdir(moving)):
        if name.isdecimal():
            target = tables / name / ROWS
        else:
            target = tables / _UNKNOWN / name
            _log.warning("%s is not a table: moved to %s", moving / name, target)
        target.parent.mkdir(exist_ok=True)
        try:
            (moving / name).rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise TableDamaged(
                f"there are two rows tables, {moving / name} and {target}: a build of the earlier layout ran on"
                f" {tables.parent} after a later one. Move the first aside, and run the operation recovery"
            ) from error
        hit("layout.moved")
        touched.add(target.parent)
    for folder in (*touched, moving, tables):
        sync(folder)
    moving.rmdir()
    sync(tables)


def _write_record(root: Path) -> None:
    """Write the record of the layout, unless something has its name."""
    path = root / RECORD
    if path.exists():
        return
    draft = root / f".{RECORD}.{secrets.token_hex(4)}"
    draft.write_text(json.dumps({"layout": LAYOUT_VERSIONS[-1]}) + "\n")
    sync(draft)
    try:
        os.link(draft, path)  # whole or not at all, and never in place of a folder
    except FileExistsError:
        pass
    finally:
        draft.unlink(missing_ok=True)
    sync(root)


# -- names ----------------------------------------------------------------------------------------------------------


def link_name(settings: Settings, name: str, collection_id: int) -> None:
    """Make ``tables/by-name/<name>`` lead to the collection's tables. Does nothing where the store has no links."""
    folder = _names_folder(settings)
    if folder is None:
        return
    make_folder(folder)
    draft = folder / f".{collection_id}.{secrets.token_hex(4)}"
    draft.symlink_to(_target(collection_id))
    draft.replace(folder / _link_file(name))


def unlink_name(settings: Settings, name: str, collection_id: int) -> None:
    """Remove the link of a dropped collection, unless another collection has the name by now."""
    folder = _names_folder(settings)
    if folder is None:
        return
    link = folder / _link_file(name)
    try:
        if os.readlink(link) == _target(collection_id):
            link.unlink()
    except FileNotFoundError:
        pass


def link_names(settings: Settings, named: Callable[[], Iterable[tuple[str, int]]]) -> None:
    """Make the links of all collections, (name, id) as `named` returns them, where a data folder has none yet."""
    folder = _names_folder(settings)
    if folder is None or folder.is_dir():
        return
    draft = folder.with_name(f".{_BY_NAME}.{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    for name, number in named():
        (draft / _link_file(name)).symlink_to(_target(number))
    try:
        draft.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was first
            raise
        shutil.rmtree(draft)


def _names_folder(settings: Settings) -> Path | None:
    root = _local_root(settings)
    return None if root is None or has_earlier_layout(settings) else Path(root) / TABLES / _BY_NAME


def _target(collection_id: int) -> str:
    return f"../{collection_id}"


def _link_file(name: str) -> str:
    """Return the file of a name. The chain accepts any text; a leading dot would hide it, or lead elsewhere."""
    file = encode_file_name(name)
    return f"%2E{file[1:]}" if file.startswith(".") else file
