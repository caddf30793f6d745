"""What a capture has read and no flow has passed yet, and where the engine continues: one SQLite file.

Changes, the engine's offset and its schema history change in one synced transaction, before the engine gets its
acknowledgement. So a change is in the spool once, whenever anything is killed: a batch that was not acknowledged is
either not there, and the engine reads it again, or there together with the offset after it.

Each change has a number, its position in the lane; numbers never repeat. Readers see changes up to the end of the
newest whole source transaction, and nothing of a snapshot before it is complete: a snapshot that was interrupted begins
anew as another *epoch*, and what was read of it is removed.

One process writes (it holds the lock of the folder); any may read.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import InvalidSettings, StreamBusy, UnsupportedVersion
from millrace.base.failpoint import hit
from millrace.base.files import make_folder

VERSION: Final = 1
"""Of the file's tables."""
_CODEC: Final = pa.Codec("zstd", compression_level=1)
_TABLES: Final = """
create table if not exists state (name text primary key, value text not null);
create table if not exists history (number integer primary key, record text not null);
create table if not exists columns (number integer primary key, name text not null, description text not null);
create table if not exists changes (
    first integer primary key, count integer not null, boundary integer not null, size integer not null,
    bytes integer not null, body blob not null);
"""


class Change(NamedTuple):
    """One change of the table."""

    number: int
    line: bytes
    """As the engine wrote it: :class:`millrace.flows.sources.capture.engine.Event`."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a capture stands."""

    partition: Any = None
    offset: Any = None
    """Of the engine; None: nothing was read."""
    complete: bool = False
    """Whether the snapshot is complete."""
    epoch: int = 0
    low: int = 0
    """After the changes that were removed: the earliest position that can be read."""
    high: int = 0
    """After the newest change that readers see."""
    next: int = 0
    """The number of the next change."""
    bytes: int = 0
    """Compressed, of the changes that are kept."""
    error: str = ""
    """Why the engine ended last; empty while it runs."""
    moment: int = 0
    """Milliseconds since 1970 of the newest change, by the database's clock."""


class Spool(Closeable):
    """The spool in `folder`. A writer holds it. Raises StreamBusy if another process does, UnsupportedVersion."""

    def __init__(self, folder: Path, *, write: bool = False) -> None:
        self._lock: IO[bytes] | None = None
        make_folder(folder)
        if write:
            self._lock = (folder / "lock").open("ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise StreamBusy(f"another process captures into {folder}: stop it first") from None
        path = folder / "spool.db"
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
        path.chmod(0o600)
        self._db.execute("pragma auto_vacuum = incremental")
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        (version,) = self._db.execute("pragma user_version").fetchone()
        if version > VERSION:
            self.close()
            raise UnsupportedVersion(f"{path} has version {version}, and this build supports {VERSION}")
        if version < VERSION:
            self._db.executescript(f"begin immediate; {_TABLES} pragma user_version = {VERSION}; commit;")

    def close(self) -> None:
        """Idempotent."""
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def standing(self) -> Standing:
        """Return where the capture stands, of one moment."""
        rows = self._db.execute(
            "select name, value from state union all select 'bytes', json(coalesce(sum(bytes), 0)) from changes"
        ).fetchall()
        found = {name: json.loads(value) for name, value in rows}
        high = found.get("boundary", 0) if found.get("complete") else found.get("begun", 0)
        return Standing(
            partition=found.get("partition"),
            offset=found.get("offset"),
            complete=found.get("complete", False),
            epoch=found.get("epoch", 0),
            low=found.get("trimmed", 0),
            high=high,
            next=found.get("next", 0),
            bytes=found["bytes"],
            error=found.get("error", ""),
            moment=found.get("moment", 0),
        )

    def history(self) -> list[str]:
        """Return the engine's schema history."""
        return [record for (record,) in self._db.execute("select record from history order by number")]

    def columns(self) -> dict[str, Any] | None:
        """Return the newest description of the table's columns."""
        row = self._db.execute("select description from columns order by number desc limit 1").fetchone()
        return None if row is None else json.loads(row[0])

    def note(self, **state: Any) -> None:
        """Store facts of `Standing`, synced."""
        self._write(state)

    def begin_epoch(self) -> int:
        """Begin a snapshot: forget the offset, the schema history, and what was read of an incomplete snapshot.

        Returns the number of the epoch.
        """
        now = self.standing()
        self._db.execute("begin immediate")
        try:
            if not now.complete:
                self._db.execute("delete from changes where first >= ?", (now.high,))
            self._db.execute("delete from history")
            self._db.execute("delete from state where name in ('partition', 'offset')")
            self._state({"epoch": now.epoch + 1, "complete": False, "begun": now.high, "next": now.next})
            self._db.execute("commit")
        except BaseException:
            self._db.execute("rollback")
            raise
        return now.epoch + 1

    def append(
        self,
        lines: Sequence[bytes],
        boundary: int | None,
        *,
        partition: Any,
        offset: Any,
        history: Sequence[str] = (),
        columns: Sequence[tuple[str, dict[str, Any]]] = (),
        complete: bool | None = None,
        moment: int | None = None,
    ) -> int:
        """Append changes with the offset after them, synced; return the number after the last one.

        After the first `boundary` of them a source transaction ends; None: within one.
        """
        (row,) = self._db.execute("select coalesce(max(value), '0') from state where name = 'next'").fetchone()
        first = int(row)
        state: dict[str, Any] = {"partition": partition, "offset": offset, "next": first + len(lines), "error": ""}
        if boundary is not None:
            state["boundary"] = first + boundary
        if complete is not None:
            state["complete"] = complete
        if moment:
            state["moment"] = moment
        self._db.execute("begin immediate")
        try:
            if lines:
                text = b"\n".join(lines)
                body = _CODEC.compress(text, asbytes=True)
                self._db.execute(
                    "insert into changes values (?, ?, ?, ?, ?, ?)",
                    (first, len(lines), boundary or 0, len(text), len(body), body),
                )
            self._db.executemany("insert into history (record) values (?)", [(each,) for each in history])
            for name, description in columns:
                self._db.execute(
                    "insert into columns (name, description) values (?, ?)", (name, json.dumps(description))
                )
            self._state(state)
            hit("capture.spooling")
            self._db.execute("commit")
        except BaseException:
            self._db.execute("rollback")
            raise
        return first + len(lines)

    def trim(self, position: int) -> None:
        """Remove the changes that lie wholly before `position`."""
        last = "select max(first + count) from changes where first + count <= ?"
        (end,) = self._db.execute(last, (position,)).fetchone()
        if end is None:
            return
        self._db.execute("begin immediate")
        self._db.execute("delete from changes where first < ?", (end,))
        self._state({"trimmed": end})
        self._db.execute("commit")
        self._db.execute("pragma incremental_vacuum(256)").fetchall()

    def read(self, start: int, end: int) -> Iterator[tuple[list[Change], int]]:
        """Yield the changes from `start` on and before `end` in stored portions, each with its last boundary.

        The boundary is the position after the last change that ends a source transaction, 0 without one.
        """
        places = self._db.execute(
            "select first from changes where first + count > ? and first < ? order by first", (start, end)
        ).fetchall()
        for (first,) in places:
            row = self._db.execute("select size, boundary, body from changes where first = ?", (first,)).fetchone()
            if row is None:
                raise InvalidSettings(f"changes from {first} on were removed while they were read")
            size, boundary, body = row
            lines = _CODEC.decompress(body, decompressed_size=size, asbytes=True).split(b"\n")
            found = [Change(first + place, line) for place, line in enumerate(lines) if start <= first + place < end]
            yield found, first + boundary if boundary else 0

    def _write(self, state: dict[str, Any]) -> None:
        self._db.execute("begin immediate")
        self._state(state)
        self._db.execute("commit")

    def _state(self, state: dict[str, Any]) -> None:
        self._db.executemany(
            "insert into state values (?, ?) on conflict (name) do update set value = excluded.value",
            [(name, json.dumps(value)) for name, value in state.items()],
        )
