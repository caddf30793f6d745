"""The key index of a collection in the tables' store, for machines that share no data folder.

    <tables>/tables/<collection id>/_index/

The publisher works on its machine's index, and puts what it made beside the tables: its runs, which are immutable, and
then the manifest that names them. Another machine copies them when a reader has to scan many rows for want of an index,
and when a publisher starts there. A copy is never needed and may be old: runs tell which data files they cover. A copy
has the size of the index, and what its manifest no longer names is deleted with the next one.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from millrace.base.files import make_folder, replace_file
from millrace.base.settings import Settings
from millrace.storage.store import TableStore, put_stream, store_at
from millrace.tables.key_index.index import (
    INDEX_FROM_ROWS,
    MANIFEST_FILE,
    MANIFEST_VERSION,
    STRAY_SECONDS,
    WANTED_FILE,
    KeyIndex,
)

LOOK_SECONDS: Final = 60.0
"""Shortest time between two looks of readers at the store for one collection's index."""
_MOST: Final = 1024
_BLOCK_BYTES: Final = 4 << 20
_looks: dict[Path, float] = {}
"""Times at which readers of this process last looked, by folder, for the newest folders."""

_log = logging.getLogger(__name__)


class SharedIndex:
    """The index below a store's URI. Calls raise OSError if the store does not answer."""

    def __init__(self, store: TableStore) -> None:
        self._store = store

    def put(self, folder: Path, runs: Iterable[str]) -> None:
        """Put the index in `folder`, with these files of runs, in place of the one there was."""
        named, there = set(runs), set(self._store.list(""))
        for name in sorted(named - there):
            with (folder / name).open("rb") as file:
                put_stream(self._store, name, file)
        self._store.replace(MANIFEST_FILE, (folder / MANIFEST_FILE).read_bytes())
        if any(name.endswith(".run") for name in there - named):
            # A reader that has just read the last manifest may still copy younger ones.
            old = self._store.list("", age=STRAY_SECONDS)
            self._store.delete([name for name in old if name.endswith(".run") and name not in named])

    def take(self, folder: Path) -> bool:
        """Copy the index to `folder` if it is newer than the one there. Returns whether it was."""
        data = self._store.read(MANIFEST_FILE)
        found, mine = _manifest(data), _manifest(_read(folder / MANIFEST_FILE))
        if data is None or found["table_version"] <= mine["table_version"]:
            return False
        for name in found["runs"]:
            if not (folder / name).exists() and not self._copy(name, folder):
                return False  # the publisher has replaced it: the next look finds the manifest of after that
        replace_file(folder / MANIFEST_FILE, data, synced=True)
        for path in [*folder.glob("*.run"), *folder.glob("*.copy")]:
            if path.name not in found["runs"]:
                path.unlink(missing_ok=True)
        return True

    def _copy(self, name: str, folder: Path) -> bool:
        make_folder(folder)
        draft = folder / f"{uuid.uuid4().hex}.copy"
        try:
            with self._store.filesystem.open_input_stream(name) as source, draft.open("xb") as target:
                while block := source.read(_BLOCK_BYTES):
                    target.write(block)
            draft.replace(folder / name)
        except FileNotFoundError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def request(self) -> None:
        """Ask the publisher, wherever it runs, for an index."""
        self._store.replace(WANTED_FILE, b"")

    def is_wanted(self) -> bool:
        """Return whether there is an index, or a reader of some machine asked for one."""
        return bool({MANIFEST_FILE, WANTED_FILE} & set(self._store.list("")))


def shared_index(settings: Settings, collection_id: int) -> SharedIndex | None:
    """Return the shared index of a collection; None if the tables lie on a disk."""
    scheme, separator, _ = settings.tables_place.partition("://")
    if not separator or scheme == "file":
        return None
    return SharedIndex(store_at(settings.table_uri(f"tables/{collection_id}/_index")))


def request_index(settings: Settings, collection_id: int, index: KeyIndex, rows: int) -> None:
    """Ask for an index because of so many rows that had to be scanned: for a copy of the store's, or of the publisher.

    A hint: failures are ignored. The next read uses the index if it was built.
    """
    shared = shared_index(settings, collection_id) if rows >= INDEX_FROM_ROWS else None
    if shared is None:
        index.request_for(rows)
        return
    now = time.monotonic()
    if now - _looks.get(index.folder, -LOOK_SECONDS) < LOOK_SECONDS:
        return
    _looks.pop(index.folder, None)
    _looks[index.folder] = now
    if len(_looks) > _MOST:
        del _looks[next(iter(_looks))]
    try:
        if not shared.take(index.folder) and not index.is_wanted:
            shared.request()
            index.request()
    except OSError as error:
        _log.warning("the key index of collection %d is not copied: %s", collection_id, error)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _manifest(data: bytes | None) -> dict[str, Any]:
    """Return a manifest; one without runs for none, and for one that cannot be read."""
    try:
        found: dict[str, Any] = json.loads(data or b"")
        runs = [str(each) for each in found["runs"]]
        if found["format"] == MANIFEST_VERSION and all(each == Path(each).name for each in runs):
            return {"table_version": int(found["table_version"]), "runs": runs}
    except (ValueError, LookupError, TypeError):
        pass
    return {"table_version": -1, "runs": []}
