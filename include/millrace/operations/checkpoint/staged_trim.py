"""Removal of staged files once the WAL is trimmed past the Import that names them and no reader expands it any more.

A trim first writes a note of the files that its messages name (:func:`note_trimmed_files`), then commits.
:func:`remove_trimmed_files` removes the files of every note whose commit exists, except files that a remaining message
names, and then the note. A kill at any time leaves a note that the next run completes, or files without a commit. A
file that no trimmed message names is never touched, because a message may be about to name it. Other files beside it,
such as a loader's own notes, stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.failpoint import hit
from millrace.base.files import sync
from millrace.message.bodies import parse_body
from millrace.message.types import MessageType
from millrace.storage.local import LocalStore
from millrace.storage.store import TableStore, store_at
from millrace.tables.collections.staged_files import StagedFiles
from millrace.tables.wal.reader import WalSnapshot

TRIM_NOTES_FOLDER: Final = ".trims"
"""Folder of the notes, inside the staged folder.

An Import cannot name its files: import ids do not begin with a full stop.
"""


def imported_files(messages: pa.Table) -> list[str]:
    """Return the paths that the Imports among accepted `messages` name."""
    imports = messages.filter(pc.equal(messages["type"].cast(pa.utf8()), MessageType.IMPORT.name))
    bodies = (parse_body(MessageType.IMPORT, payload) for payload in imports["payload"].to_pylist())
    return [file["path"] for body in bodies for file in body["files"]]


def note_trimmed_files(staged: object, pchannel: str, tick: int, paths: list[str]) -> None:
    """Record which files may be removed once the WAL of `pchannel` is trimmed to `tick`. Durable before that commit."""
    if not paths:
        return
    note = json.dumps({"pchannel": pchannel, "tick": tick, "paths": paths}).encode()
    store_at(staged).replace(f"{TRIM_NOTES_FOLDER}/{pchannel}-{tick}.json", note)


def remove_trimmed_files(staged: StagedFiles, wal: WalSnapshot) -> int:
    """Remove the files that trims up to the version of `wal` have released, and return their number."""
    found = [store_at(place) for place in (staged.place, staged.earlier) if place is not None]
    notes = [
        (store, f"{TRIM_NOTES_FOLDER}/{name}", value)
        for store in found
        for name in store.list(TRIM_NOTES_FOLDER)
        if name.endswith(".json") and (value := _standing(store, f"{TRIM_NOTES_FOLDER}/{name}", wal)) is not None
    ]
    if not notes:
        return 0
    needed = set(_still_named(wal))
    removed = 0
    for store, note, paths in notes:
        gone = [path for path in dict.fromkeys(paths) if path not in needed]
        removed += sum(_remove(each, path) for path in gone for each in found)
        hit("staged_trim.removed")
        store.delete([note])
        if isinstance(store, LocalStore):
            sync(store.folder / TRIM_NOTES_FOLDER)
    return removed


def _standing(store: TableStore, note: str, wal: WalSnapshot) -> list[str] | None:
    """Return the paths of a note whose trim is committed, or None."""
    text = store.read(note)
    if text is None:
        return None
    value = json.loads(text)
    return list(value["paths"]) if wal.trimmed(value["pchannel"])[0] >= value["tick"] else None


def _still_named(wal: WalSnapshot) -> Iterator[str]:
    for pchannel in wal.pchannels():
        for messages in wal.messages(pchannel, types=[MessageType.IMPORT.name]):
            yield from imported_files(messages)


def _remove(store: TableStore, path: str) -> int:
    if store.size(path) is None:
        return 0
    store.delete([path])
    if not isinstance(store, LocalStore):
        return 1
    target = store.folder / path
    sync(target.parent)
    for folder in target.parents:
        if folder == store.folder:
            break
        with suppress(OSError):  # it holds other files
            folder.rmdir()
            sync(folder.parent)
    return 1
