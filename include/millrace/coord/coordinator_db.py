"""The coordinator's file, `coord.db`: one SQLite file, synced, with what must not be forgotten.

SQLite gives what is needed and no more: transactions that survive kill -9 and power loss (`synchronous=FULL`), and several
processes of one machine that write in turn. What lies in it is the catalog's (millrace.coord.catalog_store) and the broadcasts'
(millrace.coord.broadcast.sqlite_ledger), so that one transaction takes both. In a cluster it is a copy of what the meta store has
(millrace.coord.shared_catalog).
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar

from millrace.base.closeable import Closeable
from millrace.base.errors import CatalogBusy, MetaAmbiguous, MetaUnavailable
from millrace.base.files import make_folder
from millrace.base.sqlite_errors import translate_busy
from millrace.catalog.sqlite_file import FORMAT_VERSION, check_format_version, open_read_only

BUSY_SECONDS: Final = 30.0
"""How long a writer waits for another process's transaction."""

_SCHEMA: Final = """
create table if not exists pchannel (name text primary key, term integer not null, opened integer not null);
create table if not exists collection (
    id integer primary key, name text not null, state text not null, vchannels text not null,
    schemas text not null, partitions text not null, next_partition integer not null);
create unique index if not exists collection_name on collection (name) where state != 'dropped';
create table if not exists producer (id integer primary key, epoch integer not null);
create table if not exists broadcast (
    id integer primary key autoincrement, collection_id integer not null, kind text not null,
    change text not null, done integer not null default 0);
create table if not exists target (
    broadcast_id integer not null references broadcast, vchannel text not null, pchannel text not null,
    acked integer not null default 0, time_tick integer not null default 0, primary key (broadcast_id, vchannel));
create table if not exists begun (broadcast_id integer primary key references broadcast, at real not null);
create table if not exists trouble (
    broadcast_id integer primary key references broadcast, at_ms integer not null, words text not null);
create table if not exists request (
    broadcast_id integer primary key references broadcast, name text not null unique, keys text not null);
create table if not exists answered (
    id integer primary key autoincrement, name text not null unique, of text not null, answer integer not null);
create table if not exists restored (floor integer not null);
create table if not exists shared (catalog text not null, revision integer not null);
"""
"""Files of earlier builds lack the tables at the end, and get them empty: what reads them takes that for what those builds meant. In
`shared` is of which catalog the file is a copy, and of which revision; 0: of none yet, and this is the name that its own will have; no
row where it is a catalog of its own."""

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_TABLE: Final = re.compile(r"create table if not exists (\w+) ([^;]+);")


class SharedStore(Protocol):
    """Of what the file is a copy: each transaction of it is one there."""

    def attach(self, db: sqlite3.Connection) -> None:
        """From now on what changes by this connection is noted."""
        ...

    def begin(self, db: sqlite3.Connection) -> None:
        """Make the file as new as that is. Raises MetaUnavailable, MetaAmbiguous, InvalidSettings where that is another deployment's,
        UnsupportedVersion."""
        ...

    def end(self, db: sqlite3.Connection) -> None:
        """Make there what the transaction changed. Raises MetaUnavailable where nothing was done, MetaAmbiguous; the file's is rolled
        back then."""
        ...

    def close(self) -> None: ...


def detach_from_shared(db: sqlite3.Connection) -> None:
    """Make a file that was a copy a catalog of its own."""
    if db.execute("select 1 from shared").fetchone() is not None:
        with db:
            db.execute("delete from shared")


class CoordinatorDb(Closeable):
    """One connection to the file. Thread-safe: one caller at a time."""

    def __init__(
        self, path: Path | str, *, busy_seconds: float = BUSY_SECONDS, shared: SharedStore | None = None
    ) -> None:
        """`busy_seconds`: how long another process's transaction is waited for. Raises CatalogBusy where it lasts longer, here as in
        each call below: nothing was done.

        With `shared`, which is closed with it, the file is a copy of what that has. Where that cannot be reached as the file is
        opened, the copy can be read as it is; a transaction raises MetaUnavailable until it can. Raises what `shared.begin` does.
        """
        if isinstance(path, Path):
            make_folder(path.parent)
        self._open(sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False), shared)
        try:
            with self._typed():
                check_format_version(self._db, path)
                self._db.execute("pragma journal_mode=wal")
                self._db.execute("pragma synchronous=full")
                self._db.executescript(_SCHEMA)
                if self._db.execute("pragma user_version").fetchone() != (FORMAT_VERSION,):
                    self._db.execute(f"pragma user_version = {FORMAT_VERSION}")
            if shared is not None:
                shared.attach(self._db)
                try:
                    with self.transaction():
                        pass
                except (MetaUnavailable, MetaAmbiguous) as error:
                    _log.warning("the catalog is as this machine knew it last: %s", error)
        except BaseException:
            self._db.close()
            if shared is not None:
                shared.close()
            raise

    def _open(self, db: sqlite3.Connection, shared: SharedStore | None = None) -> None:
        self._db = db
        self._shared = shared
        self._lock = threading.RLock()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """One caller at a time inside; what another process keeps from it is an error that says so."""
        with self._lock, translate_busy(_busy):
            yield

    @classmethod
    def open_read_only(cls, data_dir: Path) -> Self | None:
        """The file of a deployment, of which nothing is changed; None where no coordinator was at work yet."""
        db = open_read_only(data_dir)
        if db is None:
            return None
        made = cls.__new__(cls)
        made._open(db)
        there = {name for (name,) in db.execute("select name from sqlite_master")}
        for name, columns in _TABLE.findall(_SCHEMA):
            if name not in there:  # a file of an earlier build: the table is empty, in this connection alone
                db.execute(f"create temp table {name} {columns}")
        return made

    def close(self) -> None:
        self._db.close()
        if self._shared is not None:
            self._shared.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, durable at its end; writers of other processes wait. Inside another one of this thread it is part of it.

        Raises MetaUnavailable, and at its end MetaAmbiguous, where the file is a copy.
        """
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            with self._typed():
                self._db.execute("begin immediate")
            try:
                if self._shared is not None:
                    self._shared.begin(self._db)
                yield
                if self._shared is not None:
                    self._shared.end(self._db)
                with self._typed():
                    self._db.execute("commit")
            except BaseException:
                self._db.rollback()  # where the commit itself failed there may be nothing left to roll back
                raise

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._typed():
            return self._db.execute(statement, values).fetchall()

    def fetch_one(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """The first row, or None."""
        return next(iter(self.execute(statement, values)), None)

    def execute_many(self, statement: str, values: Sequence[Sequence[Any]]) -> None:
        """A statement for each of several rows of values."""
        with self._typed():
            self._db.executemany(statement, values)

    def with_connection(self, call: Callable[[sqlite3.Connection], _T]) -> _T:
        """Call `call` with the connection, and nobody else's statement in between."""
        with self._typed():
            return call(self._db)


def _busy(error: sqlite3.OperationalError) -> CatalogBusy:
    return CatalogBusy(
        f"another process holds the catalog's file, coord/coord.db, and did not let go of it in time ({error}): nothing was"
        " done. Call it again; where it stays so, a process that has the file open is suspended, or copies it: let it go"
        " on, or end it (`fuser coord/coord.db` names it)"
    )
