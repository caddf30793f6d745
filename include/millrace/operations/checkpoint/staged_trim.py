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
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.failpoint import hit
from millrace.base.files import make_folder, replace_json, sync
from millrace.message.bodies import parse_body
from millrace.message.types import MessageType
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


def note_trimmed_files(staged: Path, pchannel: str, tick: int, paths: list[str]) -> None:
    """Record which files may be removed once the WAL of `pchannel` is trimmed to `tick`. Durable before that commit."""
    if not paths:
        return
    folder = staged / TRIM_NOTES_FOLDER
    make_folder(folder)
    replace_json(folder / f"{pchannel}-{tick}.json", {"pchannel": pchannel, "tick": tick, "paths": paths}, synced=True)


def remove_trimmed_files(staged: Path, wal: WalSnapshot) -> int:
    """Remove the files that trims up to the version of `wal` have released, and return their number."""
    notes = [note for note in sorted((staged / TRIM_NOTES_FOLDER).glob("*.json")) if _stands(note, wal)]
    if not notes:
        return 0
    needed = set(_still_named(wal))
    removed = 0
    for note in notes:
        for path in dict.fromkeys(json.loads(note.read_text())["paths"]):
            if path not in needed:
                removed += _remove(staged, path)
        hit("staged_trim.removed")
        note.unlink(missing_ok=True)
        sync(note.parent)
    return removed


def _stands(note: Path, wal: WalSnapshot) -> bool:
    value = json.loads(note.read_text())
    return bool(wal.trimmed(value["pchannel"])[0] >= value["tick"])


def _still_named(wal: WalSnapshot) -> Iterator[str]:
    for pchannel in wal.pchannels():
        for messages in wal.messages(pchannel, types=[MessageType.IMPORT.name]):
            yield from imported_files(messages)


def _remove(staged: Path, path: str) -> int:
    target = staged / path
    try:
        target.unlink()
    except FileNotFoundError:
        return 0
    sync(target.parent)
    for folder in target.parents:
        if folder == staged:
            break
        with suppress(OSError):  # it holds other files
            folder.rmdir()
            sync(folder.parent)
    return 1
