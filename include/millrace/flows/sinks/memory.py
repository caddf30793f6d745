"""A sink's memory: its state for recovery after a crash, in a folder next to the position of its lane.

For a Spark query the folder is in the query's checkpoint and belongs to it: a query with a new checkpoint numbers other
rows, and a sink with the old memory would leave rows out.

A folder is a path, or a URI in the tables' object store, where the next driver finds it on any machine.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from millrace.base.backoff import Backoff
from millrace.base.deadline import Deadline
from millrace.base.errors import DeadlineExceeded, StoreCannotPublish
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import make_folder, replace_json
from millrace.flows.sinks.sink import Verdicts
from millrace.storage.store import StoreUnreachable, conditional, store_at, tagged

Folder: TypeAlias = Path | str
"""A path, or a URI in an object store."""

_CHANGE_SECONDS: Final = 60.0
_WIDTH: Final = 120
"""The length of a note that is overwritten in place: enough for three numbers, so that each write covers the last."""


def below(folder: Folder, name: str) -> Folder:
    """Return the folder or file `name` in `folder`."""
    return folder / name if isinstance(folder, Path) else f"{folder}/{name}"


def create_folder(folder: Folder) -> None:
    """Create `folder` durably; an object store has no folders."""
    if isinstance(folder, Path):
        make_folder(folder)


def read_note(folder: Folder, file: str) -> dict[str, Any] | None:
    """Return the JSON of a small file; None if it does not exist. Raises ValueError for a torn one."""
    data = store_at(folder).read(file)
    if data is None:
        return None
    value: dict[str, Any] = json.loads(data)
    return value


def keep_note(folder: Folder, file: str, value: Any, *, synced: bool = True) -> None:
    """Replace a small file by `value` as JSON, as a whole. In an object store it is always durable."""
    if isinstance(folder, Path):
        replace_json(folder / file, value, synced=synced)
    else:
        store_at(folder).replace(file, f"{json.dumps(value)}\n".encode())


def change_note(folder: Folder, file: str, change: Callable[[dict[str, Any] | None], dict[str, Any]]) -> None:
    """Replace the JSON of a small file by what `change` returns for it, which several processes may do at once.

    `change` may be called several times, also for its own result; it gets None if the file does not exist, and may
    raise. In a store without compare-and-set, the last of two changes that are made at the same time wins.
    Raises StoreUnreachable, and DeadlineExceeded if others keep changing it.
    """
    create_folder(folder)
    deadline = Deadline.after(_CHANGE_SECONDS)
    busy = DeadlineExceeded(f"others keep changing {below(folder, file)}: try again")
    if isinstance(folder, Path):
        with exclusive_lock(folder / f".{file}.lock", deadline=deadline, busy=busy):
            keep_note(folder, file, change(read_note(folder, file)))
        return
    try:
        store = tagged(store_at(folder))
        store.require_tagged_puts()
    except StoreCannotPublish:
        keep_note(folder, file, change(read_note(folder, file)))
        return
    pauses = Backoff(0.02, 1.0)
    while not deadline.expired():
        data, tag = store.read_tagged(file) or (b"", "")
        value = f"{json.dumps(change(json.loads(data) if data else None))}\n".encode()
        if value == data:
            return
        # After a lost answer, the next turn finds the change made.
        with suppress(StoreUnreachable):
            if (store.replace_tagged(file, value, tag) if tag else store.put_new(file, value)) is not None:
                return
        time.sleep(pauses.next_delay())
    raise busy


def create_note(folder: Folder, file: str, value: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a small file, which is created with `value` if it does not exist.

    In an object store it is created once, even if several drivers begin at the same time.
    """
    create_folder(folder)
    found = read_note(folder, file)
    if found is not None:
        return found
    if isinstance(folder, Path):
        keep_note(folder, file, value)
        return value
    try:
        created = conditional(store_at(folder)).put_if_absent(file, f"{json.dumps(value)}\n".encode())
    except OSError:
        created = False  # it may be there
    found = value if created else read_note(folder, file)
    if found is None:
        raise StoreUnreachable(f"{folder}/{file}: the store did not create it")
    return found


def name_in(folder: Folder, file: str) -> str:
    """Return the random name in `file` of `folder`. It is created with the folder."""
    return str(create_note(folder, file, {"name": uuid.uuid4().hex})["name"])


def begun(folder: Folder, *, at: int | None = None) -> int:
    """Return when the memory in `folder` was created, in Unix seconds; `at` is used if it is created now.

    It identifies and orders the incarnations of a query, each of which counts its batches from 0.
    """
    file = "opensearch.json"  # an earlier build's name: only that sink had it
    return int(create_note(folder, file, {"begun": int(time.time()) if at is None else at})["begun"])


@dataclass(frozen=True, slots=True)
class Noted:
    """The newest batch that a sink need not write again, and its counts; in ``<folder>/taken.json``."""

    batch_id: int = -1
    """The batch's `start`."""
    acknowledged: int = 0
    rejected: int = 0

    @classmethod
    def load(cls, folder: Folder) -> Self:
        """Load it from `folder`. Raises ValueError if a crash left a torn file."""
        value = read_note(folder, "taken.json")
        return cls() if value is None else cls(value["batch"], value["rows"], value["rejected"])

    def keep(self, folder: Folder, *, synced: bool = True) -> None:
        """Write it to the folder. Unless `synced`, it is written in place, without waiting for the disk.

        A crash, above all of the machine, may then leave a file for which :meth:`load` raises ValueError.
        """
        value = {"batch": self.batch_id, "rows": self.acknowledged, "rejected": self.rejected}
        path = folder / "taken.json" if isinstance(folder, Path) else None
        if synced or path is None or not path.exists():
            keep_note(folder, "taken.json", value, synced=synced)
            return
        with path.open("r+b") as file:
            file.write(f"{json.dumps(value):<{_WIDTH}}\n".encode())

    def again(self, batch_id: int) -> Verdicts | None:
        """Return the verdicts on a batch that was written before; None if it is new."""
        if batch_id > self.batch_id:
            return None
        if batch_id < self.batch_id:
            return Verdicts(again=True)
        return Verdicts(self.acknowledged, self.rejected, again=True)
