"""The changes that a capture has read and no flow has passed yet, and the engine's position: one SQLite file.

Changes, the engine's offset and its schema history change in one synced transaction, before the engine gets its
acknowledgement. So a change is in the spool exactly once, whenever a process is killed: a batch without acknowledgement
is either missing, and the engine reads it again, or stored together with the offset after it.

Changes of all tables are numbered in one sequence, and numbers never repeat. A table's lane has the numbers of its
changes as positions, with gaps. A *mark* is the end of a source transaction: the number after its last change. So lanes
that have passed a mark agree on their content. Readers see changes up to the newest mark, and nothing of a snapshot
before it is complete: an interrupted snapshot begins again as another *epoch*, and its changes are removed.

One process writes (it holds the lock of the folder); any may read, trim and record ticks. With a meta store, each write
goes to the shared spool first (shared_spool.py), from which another machine rebuilds this file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import secrets
import sqlite3
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

import numpy as np
import pyarrow as pa

from millrace.base.closeable import Closeable
from millrace.base.errors import InvalidSettings, MillraceError, StreamBusy, UnsupportedVersion
from millrace.base.failpoint import hit
from millrace.base.files import make_folder
from millrace.client.consume.membership import boot_clock
from millrace.flows.hold import SPOOL_SECONDS
from millrace.flows.sources.capture.shared_spool import Record, RecordingConnection, SharedSpool

FILE: Final = "spool.db"
VERSION: Final = 2
"""The version of the file's tables."""
MAX_TICKS: Final = 10_000
"""The most recorded ticks that are retained, the newest ones."""
_LARGE: Final = "'definitions', 'rereading'"
"""Facts (`Spool.fact`) that grow with the tables. Reading the capture's position does not decode them."""
_SHARED: Final = "shared"
"""The fact with the identity of the shared spool, how much of it this one has, and its position then."""
_SHARED_TICK: Final = "told_tick"
_HELD: Final = "held"
"""The fact of when trims may continue, by the machine's clock since its start. A backup prevents them until then."""
_OWN: Final = frozenset(
    {"bytes", "error", "lag_bytes", "lag_seconds", "read_at", "target", _HELD, _SHARED, _SHARED_TICK}
)
"""Facts of one machine: its storage and state."""
_CODEC: Final = pa.Codec("zstd", compression_level=1)
_TABLES: Final = """
create table if not exists state (name text primary key, value text not null);
create table if not exists history (number integer primary key, record text not null);
create table if not exists columns (
    number integer primary key, name text not null, description text not null, since integer);
create table if not exists parts (
    number integer primary key, name text not null, first integer not null, after integer not null,
    size integer not null, bytes integer not null, places blob, body blob not null, unique (name, first));
create table if not exists marks (
    number integer primary key, source text not null, moment integer not null, whole integer not null);
create table if not exists lanes (name text primary key, trimmed integer not null);
create table if not exists ticks (
    tick integer primary key, number integer not null, source text not null, moment integer not null);
"""
_FROM_1: Final = """
alter table columns add column since integer;
insert into parts (name, first, after, size, bytes, places, body)
    select coalesce((select name from columns limit 1), ''), first, first + count, size, bytes, null, body from changes;
insert into marks select first + boundary, '', 0, 1 from changes where boundary > 0;
insert or ignore into lanes select name, (select value from state where name = 'trimmed') from
    (select name from columns limit 1) where exists (select 1 from state where name = 'trimmed');
insert or replace into state select 'bytes', json(coalesce(sum(bytes), 0)) from parts;
drop table changes;
"""
"""Changes of the single table were numbered without gaps, so their places are known."""

_logger: Final = logging.getLogger(__name__)


class Changes(NamedTuple):
    """Changes of a table, in order."""

    numbers: list[int]
    lines: list[bytes]
    """Lines in the engine's form: :class:`millrace.flows.sources.capture.engine.Event`."""


class Mark(NamedTuple):
    """The end of a source transaction."""

    number: int
    """The number after its last change."""
    source: str
    """The database's name of the transaction (a GTID), or a poller's position; empty for a snapshot."""
    moment: int
    """When its last change was made, in milliseconds since 1970 by the database's clock."""
    whole: bool = True
    """Whether the changes up to here equal a state of the database. False while a table is read again."""


class Recorded(NamedTuple):
    """A tick at which the collections hold exactly the transactions up to one of the source."""

    tick: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class Standing:
    """The position of a capture."""

    partition: Any = None
    offset: Any = None
    """The engine's offset; None if nothing was read."""
    complete: bool = False
    """Whether the snapshot is complete."""
    epoch: int = 0
    high: int = 0
    """The position after the newest change that readers see."""
    next: int = 0
    """The number of the next change."""
    bytes: int = 0
    """Compressed bytes of the stored changes."""
    error: str = ""
    """Why the engine last ended; empty while it runs."""
    moment: int = 0
    """When the newest change was made, in milliseconds since 1970 by the database's clock."""
    tables: tuple[str, ...] = ()
    """The tables whose snapshot was begun; empty in a spool of version 1."""
    unread: tuple[str, ...] = ()
    """The tables whose rows are to be read beside the changes, because they were added or DDL changed them."""
    lag_bytes: int | None = None
    """Bytes of the database's log after the engine's offset, at the last measurement; None if unknown."""
    lag_seconds: float = 0.0
    """The age of the engine's offset then, by the database's clock; 0 if nothing came after it."""
    identity: str = ""
    """The unique identity of this spool; empty before an engine's first start."""


class Spool(Closeable):
    """The spool in `folder`. A writer locks it. Raises StreamBusy if another process does, UnsupportedVersion."""

    def __init__(self, folder: Path, *, write: bool = False, shared: SharedSpool | None = None) -> None:
        """Open the spool. A writer takes over `shared`, if given, makes this spool equal to it, and closes it later.

        Raises the errors of SharedSpool.
        """
        self._lock: IO[bytes] | None = None
        self._shared = shared
        self._behind = False
        """Whether the shared spool may have a record that this one lacks."""
        self._facts: dict[str, str] | None = None
        """Facts of the current transaction, if it is to be shared."""
        self.folder = folder
        make_folder(folder)
        if write:
            self._lock = (folder / "lock").open("ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                if shared is not None:
                    shared.close()
                raise StreamBusy(f"another process captures into {folder}: stop it first") from None
        self._opened()
        if shared is not None:
            try:
                self._take_over(shared)
            except BaseException:
                self.close()
                raise
        if write and not self.standing().identity:
            self.note(identity=secrets.token_hex(8))

    def _opened(self) -> None:
        path = self.folder / FILE
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
            with self._local():
                self._upgrade()

    def _upgrade(self) -> None:
        (version,) = self._db.execute(
            "pragma user_version"
        ).fetchone()  # another process may have upgraded it in the meantime
        if version == VERSION:
            return
        for statement in _TABLES.split(";"):
            self._db.execute(statement)
        for statement in _FROM_1.split(";") if version else ():
            self._db.execute(statement)
        self._db.execute(f"pragma user_version = {VERSION}")

    # --- the shared spool --------------------------------------------------------------------------------------------

    def _take_over(self, shared: SharedSpool) -> None:
        shared.take_over()
        known = self.fact(_SHARED)
        chain, number, place = known or (shared.chain, 0, None)
        first = shared.is_new and self._has_something()
        # A build without shared spools has fed this one since, so the others have nothing newer.
        alone = known is not None and place != self._place()
        if chain == shared.chain and number == shared.next and (first or alone):
            self._mark_shared(shared, number)
            if not self._share_whole(shared):
                raise StreamBusy(f"a backup reads the spools: {self.folder} is shared when it is done")
        else:
            self._catch_up(shared)

    def resume(self) -> None:
        """Make this spool equal to the shared one after a failure. Raises the errors of SharedSpool."""
        if self._shared is not None and self._behind:
            self._shared.look()
            self._catch_up(self._shared)

    def _has_something(self) -> bool:
        return bool(self._db.execute("select exists (select 1 from state)").fetchone()[0])

    def _catch_up(self, shared: SharedSpool) -> None:
        """Apply the records that this spool lacks; rebuild it if it is not a prefix of the shared one."""
        chain, number, _ = self.fact(_SHARED) or ("", 0, None)
        base = shared.base()
        based = int(base.partition("-")[0]) if base else 0
        if chain != shared.chain or number < based:
            self._replace(shared, base)
            number = based
        for record in shared.records(number):
            number += 1
            with self._local():
                self._apply(record)
                self._state({_SHARED: [shared.chain, number, self._place()]})
        (size,) = self._db.execute("select coalesce(sum(bytes), 0) from parts").fetchone()
        self.note(bytes=size, **{_SHARED: [shared.chain, number, self._place()]})
        self._behind = False

    def _replace(self, shared: SharedSpool, base: str) -> None:
        path = self.folder / FILE
        draft = path.with_name(f"{FILE}.whole")
        draft.unlink(missing_ok=True)
        if base:
            shared.download(base, draft)
        self._db.close()
        for name in (FILE, f"{FILE}-wal", f"{FILE}-shm"):
            (self.folder / name).unlink(missing_ok=True)
        if base:
            draft.replace(path)
        self._opened()
        with self._local():
            self._db.execute(f"delete from state where name in ({', '.join('?' * len(_OWN))})", sorted(_OWN))

    def _share_whole(self, shared: SharedSpool) -> bool:
        """Return False if a backup does not let the files be replaced."""
        draft = self.folder / f"{FILE}.whole"
        draft.unlink(missing_ok=True)
        try:
            self._db.execute("vacuum into ?", (str(draft),))
            return shared.put_whole(draft)
        finally:
            draft.unlink(missing_ok=True)

    def _mark_shared(self, shared: SharedSpool, number: int) -> None:
        self.note(**{_SHARED: [shared.chain, number, self._place()]})

    def _place(self) -> list[Any]:
        now = self.standing()
        return [now.next, now.offset, now.epoch]

    def close(self) -> None:
        """Idempotent."""
        if self._shared is not None:
            self._shared.close()
        self._db.close()
        if self._lock is not None:
            self._lock.close()

    def standing(self) -> Standing:
        """Return the capture's position, read in one statement."""
        rows = self._db.execute(f"select name, value from state where name not in ({_LARGE})")
        found = {name: json.loads(value) for name, value in rows}
        high = found.get("boundary", 0) if found.get("complete") else found.get("begun", 0)
        return Standing(
            partition=found.get("partition"),
            offset=found.get("offset"),
            complete=found.get("complete", False),
            epoch=found.get("epoch", 0),
            high=high,
            next=found.get("next", 0),
            bytes=found.get("bytes", 0),
            error=found.get("error", ""),
            moment=found.get("moment", 0),
            tables=tuple(found.get("tables", ())),
            unread=tuple(found.get("unread", ())),
            lag_bytes=found.get("lag_bytes"),
            lag_seconds=found.get("lag_seconds", 0.0),
            identity=found.get("identity", ""),
        )

    def version(self) -> tuple[int, int]:
        """Return a value that differs after each change of the file."""
        (version,) = self._db.execute("pragma data_version").fetchone()
        return version, self._db.total_changes

    def history(self) -> list[str]:
        """Return the engine's schema history."""
        return [record for (record,) in self._db.execute("select record from history order by number")]

    def replace_history(self, records: Sequence[str]) -> None:
        """Replace the engine's stored schema history, synced."""
        with self._writing():
            self._db.execute("delete from history")
            self._db.executemany("insert into history (record) values (?)", [(each,) for each in records])

    def columns(self, table: str, number: int) -> tuple[dict[str, Any] | None, int | None]:
        """Return the columns of a table at the change `number`, and the change from which on it has others."""
        row = self._db.execute(
            "select description from columns where name = ? and coalesce(since, 0) <= ? order by number desc limit 1",
            (table, number),
        ).fetchone()
        later = "select min(since) from columns where name = ? and since > ?"
        (change,) = self._db.execute(later, (table, number)).fetchone()
        return None if row is None else json.loads(row[0]), change

    def note(self, **state: Any) -> None:
        """Store facts, those of `Standing` or others, synced."""
        with self._local() if state.keys() <= _OWN else self._writing():
            self._state(state)

    def begin_epoch(self) -> int:
        """Begin a snapshot: forget the offset, the schema history, and the changes of an incomplete snapshot.

        Returns the number of the epoch.
        """
        with self._writing():
            now = self.standing()
            if not now.complete:
                self._remove("first >= ?", now.high)
                self._db.execute("delete from columns where since > ?", (now.high,))
            self._db.execute("delete from marks where number > ?", (now.high,))
            self._db.execute("delete from history")
            self._db.execute("delete from state where name in ('partition', 'offset')")
            self._state({"epoch": now.epoch + 1, "complete": False, "begun": now.high, "next": now.next})
            self._state({"tables": [], "unread": []})
        return now.epoch + 1

    def append(
        self,
        changes: Sequence[tuple[str, bytes]],
        marks: Sequence[Mark],
        *,
        partition: Any,
        offset: Any,
        history: Sequence[str] = (),
        columns: Sequence[tuple[str, dict[str, Any], int]] = (),
        complete: bool | None = None,
        moment: int | None = None,
        also: Callable[[sqlite3.Connection], None] | None = None,
        **state: Any,
    ) -> int:
        """Append changes, each with its table, and the offset after them, synced; return the number after the last one.

        The number of a mark in `marks` counts the changes before it in `changes`. `columns` are descriptions of tables,
        each with the place in `changes` from which it applies. `also` writes the feeder's own tables in the same
        transaction; `state` are additional facts.
        """
        with self._writing():
            (row,) = self._db.execute("select coalesce(max(value), '0') from state where name = 'next'").fetchone()
            first = int(row)
            state |= {"partition": partition, "offset": offset, "next": first + len(changes), "error": ""}
            if marks:
                state["boundary"] = first + marks[-1].number
            if complete is not None:
                state["complete"] = complete
            if moment:
                state["moment"] = moment
            self._db.executemany(
                "insert into marks values (?, ?, ?, ?) on conflict (number) do update set whole = excluded.whole,"
                " source = case excluded.source when '' then source else excluded.source end,"
                " moment = max(moment, excluded.moment)",
                [(first + each.number, each.source, each.moment, each.whole) for each in marks],
            )
            state["bytes"] = self._stored_bytes() + self._add(changes, first)
            self._db.executemany("insert into history (record) values (?)", [(each,) for each in history])
            for name, description, place in columns:
                found, _ = self.columns(name, first + place)
                if found != description:
                    self._db.execute(
                        "insert into columns (name, description, since) values (?, ?, ?)",
                        (name, json.dumps(description), first + place),
                    )
            self._state(state)
            if also is not None:
                also(self._db)
            hit("capture.spooling")
        return first + len(changes)

    def _add(self, changes: Sequence[tuple[str, bytes]], first: int) -> int:
        """Store the changes by table; return their bytes."""
        places: dict[str, list[int]] = {}
        for place, (name, _) in enumerate(changes):
            places.setdefault(name, []).append(place)
        total = 0
        for name, mine in places.items():
            text = b"\n".join(changes[place][1] for place in mine)
            body = _CODEC.compress(text, asbytes=True)
            begin, after = first + mine[0], first + mine[-1] + 1
            gaps = None
            if after - begin != len(mine):
                gaps = _CODEC.compress((np.array(mine, np.uint32) - np.uint32(mine[0])).tobytes(), asbytes=True)
                gaps = len(mine).to_bytes(4, "big") + gaps
            total += len(body)
            self._db.execute(
                "insert into parts (name, first, after, size, bytes, places, body) values (?, ?, ?, ?, ?, ?, ?)",
                (name, begin, after, len(text), len(body), gaps, body),
            )
        return total

    def rows_of(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Read the feeder's own tables (`append`)."""
        return self._db.execute(statement, values).fetchall()

    def fact(self, name: str) -> Any:
        """Return a fact that the feeder stored (`append`, `note`) and that is not part of `Standing`, or None."""
        row = self._db.execute("select value from state where name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def forget(self, tables: Sequence[str]) -> None:
        """Remove the changes of all tables except `tables`."""
        with self._writing():
            marks = ", ".join("?" * len(tables))
            self._remove(f"name not in ({marks})", *tables)

    # --- lanes -------------------------------------------------------------------------------------------------------

    def low(self, table: str) -> int:
        """Return the earliest position of a table that can be read, after the removed changes."""
        row = self._db.execute("select trimmed from lanes where name = ?", (table,)).fetchone()
        return 0 if row is None else int(row[0])

    def end_of(self, table: str, number: int) -> int:
        """Return the position after the last change of a table before `number`."""
        row = self._db.execute(
            "select first, after, places from parts where name = ? and first < ? order by first desc limit 1",
            (table, number),
        ).fetchone()
        if row is None:
            return self.low(table)
        first, after, gaps = row
        if after <= number:
            return int(after)
        places = _places(gaps, after - first)
        return first + int(places[np.searchsorted(places, number - first) - 1]) + 1

    def next_of(self, table: str, number: int) -> int | None:
        """Return where the next part of a table begins from `number` on."""
        found = self._db.execute("select min(first) from parts where name = ? and first >= ?", (table, number))
        (first,) = found.fetchone()
        return None if first is None else int(first)

    def last_source(self) -> str:
        """Return the source of the newest mark that has one, or an empty text."""
        row = self._db.execute("select source from marks where source <> '' order by number desc limit 1").fetchone()
        return "" if row is None else str(row[0])

    def has_before(self, number: int) -> bool:
        """Return whether the spool has parts before `number` that lanes can pass."""
        (found,) = self._db.execute("select exists (select 1 from parts where after <= ?)", (number,)).fetchone()
        return bool(found)

    def mark(self, after: int, until: int) -> Mark | None:
        """Return the last mark that is greater than `after`, and at most `until`."""
        row = self._db.execute(
            "select number, source, moment, whole from marks where number > ? and number <= ?"
            " order by number desc limit 1",
            (after, until),
        ).fetchone()
        if row is None:
            return None
        number, source, moment, whole = row
        return Mark(number, source, moment, bool(whole))

    def is_marked(self, table: str, position: int) -> bool:
        """Return whether a transaction ends at a position of a table (no change of it is before the next mark)."""
        return (end := self._end(table, position)) is not None and end <= position

    def transaction_end(self, table: str, number: int, stop: int, most: int) -> int | None:
        """Return the position of a table after the transaction with the change `number`.

        None if it is after `stop`, or if parts of more than `most` bytes are between.
        """
        end = self._end(table, number + 1)
        if end is None or end > stop:
            return None
        (size,) = self._db.execute(
            "select coalesce(sum(size), 0) from parts where name = ? and after > ? and first < ?", (table, number, end)
        ).fetchone()
        return end if size <= most else None

    def _end(self, table: str, number: int) -> int | None:
        """Return the position of a table at the first mark from `number` on, or None."""
        (mark,) = self._db.execute("select min(number) from marks where number >= ?", (number,)).fetchone()
        return None if mark is None else self.end_of(table, mark)

    def trim(self, table: str, position: int) -> None:
        """Remove the changes of a table in parts before `position`, and marks that no table needs."""
        last = "select max(after) from parts where name = ? and after <= ?"
        (end,) = self._db.execute(last, (table, position)).fetchone()
        if end is None:
            return
        with self._local():
            if 0 < (self.fact(_HELD) or 0) - boot_clock() <= SPOOL_SECONDS:
                return
            self._remove("name = ? and first < ?", table, end)
            self._db.execute(
                "insert into lanes values (?, ?) on conflict (name) do update set trimmed = excluded.trimmed",
                (table, end),
            )
            (oldest,) = self._db.execute(
                "select coalesce(min(first), (select value from state where name = 'next')) from parts"
            ).fetchone()
            self._db.execute(
                "delete from marks where number < ? and number < (select max(number) from marks)", (oldest,)
            )
            self._db.execute(
                "delete from columns where name = ? and exists (select 1 from columns as newer where"
                " newer.name = columns.name and newer.number > columns.number and newer.since <= ?)",
                (table, end),
            )
        self._db.execute("pragma incremental_vacuum(256)").fetchall()

    def hold(self, *, seconds: float = SPOOL_SECONDS) -> None:
        """Let nothing be trimmed for so long: a backup has read positions of lanes, and reads their changes next."""
        self.note(**{_HELD: boot_clock() + seconds})

    def read(self, table: str, start: int, end: int) -> Iterator[Changes]:
        """Yield the changes of a table from `start` on and before `end` in stored parts."""
        parts = self._db.execute(
            "select number from parts where name = ? and after > ? and first < ? order by first", (table, start, end)
        ).fetchall()
        for (part,) in parts:
            row = self._db.execute(
                "select first, after, size, places, body from parts where number = ?", (part,)
            ).fetchone()
            if row is None:
                raise InvalidSettings(f"changes of {table} from {start} on were removed while they were read")
            first, after, size, gaps, body = row
            lines = _CODEC.decompress(body, decompressed_size=size, asbytes=True).split(b"\n")
            numbers = (first + _places(gaps, after - first)).tolist()
            assert len(numbers) == len(lines), "they are stored together"
            begin, stop = bisect_left(numbers, start), bisect_left(numbers, end)
            yield Changes(numbers[begin:stop], lines[begin:stop])

    # --- ticks -------------------------------------------------------------------------------------------------------

    def target(self) -> int | None:
        """Return the mark at which all lanes must stop, or None if they are not limited."""
        row = self._db.execute("select value from state where name = 'target'").fetchone()
        return None if row is None else json.loads(row[0])

    def aim(self, number: int | None) -> None:
        """Set the target."""
        self.note(target=number)

    def record(self, tick: int, mark: Mark) -> None:
        """Record that the collections hold at `tick` exactly what the source held at `mark`."""
        with self._local():
            self._db.execute("insert or replace into ticks values (?, ?, ?, ?)", (tick, *mark[:3]))
            self._db.execute(
                "delete from ticks where tick < (select min(tick) from"
                " (select tick from ticks order by tick desc limit ?))",
                (MAX_TICKS,),
            )

    def ticks(self, *, limit: int = MAX_TICKS, before: int | None = None) -> list[Recorded]:
        """Return the newest recorded ticks, of those `before` a tick, oldest first."""
        rows = self._db.execute(
            "select tick, number, source, moment from ticks where ? is null or tick < ? order by tick desc limit ?",
            (before, before, limit),
        ).fetchall()
        return [Recorded(tick, Mark(number, source, moment)) for tick, number, source, moment in reversed(rows)]

    # --- the file ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run a transaction of the feeder: durable in the shared spool, if there is one, before it is stored here.

        Raises the errors of SharedSpool; `resume` then determines the outcome.
        """
        shared = self._shared
        if shared is None:
            with self._local():
                yield
            return
        self.resume()
        recording, plain = RecordingConnection(self._db), self._db
        self._db, self._facts = cast(sqlite3.Connection, recording), {}
        plain.execute("begin immediate")
        try:
            stored_bytes = self._stored_bytes()
            yield
            facts, grown = self._facts, self._stored_bytes() - stored_bytes
        finally:
            # Lanes trim and record ticks in the meantime, so do not lock the file while the other stores are written.
            self._db, self._facts = plain, None
            if plain.in_transaction:
                plain.execute("rollback")
        ticks = self._new_ticks()
        if ticks:
            recording.statements.append(("insert or replace into ticks values (?, ?, ?, ?)", ticks))
        own = {name: json.loads(facts.pop(name)) for name in _OWN & facts.keys()}
        record = Record(recording.statements, facts)
        if record.statements or facts:
            self._behind = True
            shared.put(record)
        with self._local():
            stored_bytes = self._stored_bytes()
            self._apply(record)
            self._state(own | {"bytes": stored_bytes + grown, _SHARED: [shared.chain, shared.next, self._place()]})
            if ticks:
                self._state({_SHARED_TICK: ticks[-1][0]})
        self._behind = False
        if shared.is_due(self._stored_bytes()):
            self._behind = True
            try:
                self._share_whole(shared)
                self._behind = False
            except (MillraceError, OSError) as error:  # retried after the next record
                _logger.warning("%s is not stored whole: %s", self.folder, error)

    def _apply(self, record: Record) -> None:
        for statement, rows in record.statements:
            self._db.executemany(statement, rows)
        self._state({name: json.loads(value) for name, value in record.facts.items()})

    def _new_ticks(self) -> list[list[Any]]:
        """Return the ticks that lanes recorded since the last record; the mark of the last one may have changed."""
        since = self.fact(_SHARED_TICK) or 0
        rows = self._db.execute("select * from ticks where tick >= ? order by tick", (since,)).fetchall()
        new = [list(each) for each in rows]
        return [] if len(new) == 1 and new[0][0] == since else new

    @contextmanager
    def _local(self) -> Iterator[None]:
        """Run a transaction of this machine's spool only."""
        self._db.execute("begin immediate")
        try:
            yield
            self._db.execute("commit")
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled it back
                self._db.execute("rollback")
            raise

    def _stored_bytes(self) -> int:
        row = self._db.execute("select value from state where name = 'bytes'").fetchone()
        return 0 if row is None else int(json.loads(row[0]))

    def _remove(self, where: str, *values: Any) -> None:
        found = self._db.execute(f"select coalesce(sum(bytes), 0) from parts where {where}", values)
        (gone,) = found.fetchone()
        self._db.execute(f"delete from parts where {where}", values)
        self._state({"bytes": self._stored_bytes() - gone})

    def _state(self, state: dict[str, Any]) -> None:
        pairs = {name: json.dumps(value) for name, value in state.items()}
        connection = self._db
        if self._facts is not None:
            self._facts |= {name: value for name, value in pairs.items() if name in _OWN or self._differs(name, value)}
            connection = cast(RecordingConnection, self._db).connection
        connection.executemany(
            "insert into state values (?, ?) on conflict (name) do update set value = excluded.value",
            list(pairs.items()),
        )

    def _differs(self, name: str, value: str) -> bool:
        row = self._db.execute("select value from state where name = ?", (name,)).fetchone()
        return row is None or row[0] != value


def is_fed_here(folder: Path) -> bool:
    """Return whether a process of this machine captures into `folder`."""
    try:
        with (folder / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def copy_shared_spool(shared: SharedSpool, folder: Path) -> None:
    """Make a spool in `folder`, which is empty, of all records that `shared` has now.

    Raises CaptureLost, MetaUnavailable, OSError.
    """
    shared.read()
    with Spool(folder) as spool:
        spool._catch_up(shared)


def release_copy(db: sqlite3.Connection) -> None:
    """Let a copy of a spool's file forget its machine and the shared spool: another deployment begins with it."""
    with db:
        db.execute(f"delete from state where name in ({', '.join('?' * len(_OWN))})", sorted(_OWN))
        (size,) = db.execute("select coalesce(sum(bytes), 0) from parts").fetchone()
        db.execute("insert into state values ('bytes', ?)", (json.dumps(size),))


def _places(gaps: bytes | None, count: int) -> np.ndarray:
    """Return the numbers of a part's changes, relative to the first one."""
    if gaps is None:
        return np.arange(count, dtype=np.int64)
    size = 4 * int.from_bytes(gaps[:4], "big")
    raw = _CODEC.decompress(gaps[4:], decompressed_size=size, asbytes=True)
    return np.frombuffer(raw, np.uint32).astype(np.int64)
