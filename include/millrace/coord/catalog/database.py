"""The coordinator's file, `coord.db`: one synced SQLite file.

SQLite provides transactions that survive kill -9 and power loss (`synchronous=FULL`), and serialises the processes of
one machine. The file holds the catalog (millrace.coord.catalog.store) and the broadcasts
(millrace.coord.broadcast.sqlite_ledger), so that one transaction changes both. In a cluster it is a copy of the meta
store's catalog (millrace.coord.catalog.shared).
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar

from millrace.base.backoff import Backoff
from millrace.base.closeable import Closeable
from millrace.base.errors import CatalogBusy, MetaAmbiguous, MetaUnavailable
from millrace.base.files import make_folder
from millrace.base.sqlite_errors import translate_busy
from millrace.catalog.sqlite_file import FORMAT_VERSION, check_format_version, open_read_only

BUSY_SECONDS: Final = 30.0
"""Time that a writer waits for another process's transaction."""
ATTEMPTS: Final = 12
"""Number of attempts of a transaction while other machines change the shared catalog."""
_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5

_SCHEMA: Final = """
create table if not exists pchannel (name text primary key, term integer not null, opened integer not null);
create table if not exists collection (
    id integer primary key, name text not null, state text not null, vchannels text not null,
    schemas text not null, partitions text not null, next_partition integer not null);
create unique index if not exists collection_name on collection (name) where state != 'dropped';
create index if not exists collection_page on collection (name, id);
create index if not exists collection_state on collection (state);
create table if not exists producer (id integer primary key, epoch integer not null);
create table if not exists broadcast (
    id integer primary key autoincrement, collection_id integer not null, kind text not null,
    change text not null, done integer not null default 0);
create table if not exists target (
    broadcast_id integer not null references broadcast, vchannel text not null, pchannel text not null,
    acked integer not null default 0, time_tick integer not null default 0, primary key (broadcast_id, vchannel));
create index if not exists broadcast_open on broadcast (id) where not done;
create table if not exists begun (broadcast_id integer primary key references broadcast, at real not null);
create table if not exists trouble (
    broadcast_id integer primary key references broadcast, at_ms integer not null, words text not null);
create table if not exists request (
    broadcast_id integer primary key references broadcast, name text not null unique, keys text not null);
create table if not exists answered (
    id integer primary key autoincrement, name text not null unique, of text not null, answer integer not null);
create table if not exists alias (name text primary key, collection_id integer not null);
create index if not exists alias_collection on alias (collection_id);
create table if not exists restored (floor integer not null);
create table if not exists shared (catalog text not null, revision integer not null);
create table if not exists shared_commit (name text not null);
"""
"""Files of earlier builds lack the later tables and get them empty; readers interpret an empty table as those builds
did.

Table `shared` names the shared catalog that the file copies, and its revision. Revision 0: not yet shared, and the
row holds the name that the shared catalog will get. No row: the file is a catalog of its own. Table `shared_commit`
names the commit that made the revision.
"""

_PCHANNEL: Final = "substr(rtrim(value, replace(value, '_', '')), 1, length(rtrim(value, replace(value, '_', ''))) - 1)"
"""The PChannel in a VChannel's name, as SQL."""
_COUNT: Final = (
    "insert into vchannel_count select {pchannel}, {sign}count(*) from json_each({row}.vchannels) where true"
    " group by 1 on conflict (pchannel) do update set vchannels = vchannels + excluded.vchannels;"
)
_ADD: Final = _COUNT.format(pchannel=_PCHANNEL, sign="", row="new")
_SUBTRACT: Final = _COUNT.format(pchannel=_PCHANNEL, sign="-", row="old")
_SELECT_COUNTS: Final = (
    f"select {_PCHANNEL} as pchannel, count(*) as vchannels from collection, json_each(collection.vchannels)"
    " where state != 'dropped' group by 1"
)
_VCHANNEL_COUNTS: Final = f"""
begin immediate;
create table if not exists vchannel_count (pchannel text primary key, vchannels integer not null);
create trigger if not exists collection_added after insert on collection when new.state != 'dropped'
    begin {_ADD} end;
create trigger if not exists collection_gone after delete on collection when old.state != 'dropped'
    begin {_SUBTRACT} end;
create trigger if not exists collection_dropped after update of state on collection
    when old.state != 'dropped' and new.state = 'dropped' begin {_SUBTRACT} end;
create trigger if not exists collection_restored after update of state on collection
    when old.state = 'dropped' and new.state != 'dropped' begin {_ADD} end;
delete from vchannel_count;
insert into vchannel_count {_SELECT_COUNTS};
commit;
"""
"""The number of VChannels by PChannel. It follows from the collections, so that it is no part of the catalog: triggers
of the file update it, also where an earlier build writes. The file's first opening counts.
"""

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_P = ParamSpec("_P")
_TABLE: Final = re.compile(r"create table if not exists (\w+) ([^;]+);")


class CatalogChanged(MetaUnavailable):
    """Another machine's commit to the shared catalog came in between: the transaction did nothing."""

    code = MetaUnavailable.code


def repeated(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Repeat a method that is one transaction while other machines' commits come in between."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        pauses = Backoff(_PAUSE, _LONGEST_PAUSE)
        for _ in range(ATTEMPTS - 1):
            try:
                return method(*args, **kwargs)
            except CatalogChanged:
                time.sleep(pauses.next_delay())
        return method(*args, **kwargs)

    return call


class SharedStore(Protocol):
    """The shared catalog that the file copies. Each transaction of the file is one transaction there."""

    def attach(self, db: sqlite3.Connection) -> None:
        """Record the changes of this connection from now on."""
        ...

    def begin(self, db: sqlite3.Connection) -> None:
        """Bring the file up to date.

        Raises MetaUnavailable, MetaAmbiguous, UnsupportedVersion, InvalidSettings (the store belongs to another
        deployment).
        """
        ...

    def end(self, db: sqlite3.Connection) -> None:
        """Commit the transaction's changes to the shared catalog. If this raises, the file's transaction is
        rolled back.

        Raises MetaUnavailable (nothing was done), MetaAmbiguous.
        """
        ...

    def close(self) -> None: ...


def detach_from_shared(db: sqlite3.Connection) -> None:
    """Turn a copy into a catalog of its own."""
    if db.execute("select 1 from shared").fetchone() is not None:
        with db:
            db.execute("delete from shared")


class CoordinatorDb(Closeable):
    """One connection to the file. Thread-safe: one caller at a time."""

    def __init__(
        self, path: Path | str, *, busy_seconds: float = BUSY_SECONDS, shared: SharedStore | None = None
    ) -> None:
        """`busy_seconds`: how long to wait for another process's transaction.

        Raises CatalogBusy after that, as every method does: nothing was done.
        With `shared`, which is closed with it, the file is a copy of the shared catalog. If that cannot be reached,
        the copy can still be read; transactions raise MetaUnavailable until it can. Raises what `shared.begin`
        raises.
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
                if not self._db.execute("select 1 from sqlite_master where name = 'vchannel_count'").fetchall():
                    self._db.executescript(_VCHANNEL_COUNTS)
                if self._db.execute("pragma user_version").fetchone() != (FORMAT_VERSION,):
                    self._db.execute(f"pragma user_version = {FORMAT_VERSION}")
            if shared is not None:
                shared.attach(self._db)
                try:
                    with self.transaction():
                        pass
                except (MetaUnavailable, MetaAmbiguous) as error:
                    _log.warning("using this machine's last copy of the catalog: %s", error)
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
        """Enter as the only caller; raise CatalogBusy if another process blocks the file."""
        with self._lock, translate_busy(_busy):
            yield

    @classmethod
    def open_read_only(cls, data_dir: Path) -> Self | None:
        """Open a deployment's file without changing it; None if no coordinator has run yet."""
        db = open_read_only(data_dir)
        if db is None:
            return None
        made = cls.__new__(cls)
        made._open(db)
        there = {name for (name,) in db.execute("select name from sqlite_master")}
        for name, columns in _TABLE.findall(_SCHEMA):
            if name not in there:  # a file of an earlier build: an empty table, for this connection only
                db.execute(f"create temp table {name} {columns}")
        if "vchannel_count" not in there:
            db.execute(f"create temp view vchannel_count as {_SELECT_COUNTS}")
        return made

    @property
    def is_copy(self) -> bool:
        """Whether this connection follows a shared catalog."""
        return self._shared is not None

    def close(self) -> None:
        self._db.close()
        if self._shared is not None:
            self._shared.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a durable transaction. Nested transactions of one thread join the outer one.

        Other processes' writers wait for its end.
        Raises MetaUnavailable and, at its end, MetaAmbiguous if the file is a copy.
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
                self._db.rollback()  # after a failed commit there may be nothing left to roll back
                raise

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._typed():
            return self._db.execute(statement, values).fetchall()

    def fetch_one(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row, or None."""
        return next(iter(self.execute(statement, values)), None)

    def execute_many(self, statement: str, values: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each row of values."""
        with self._typed():
            self._db.executemany(statement, values)

    def with_connection(self, call: Callable[[sqlite3.Connection], _T]) -> _T:
        """Call `call` with the connection; no other statement runs in between."""
        with self._typed():
            return call(self._db)


def _busy(error: sqlite3.OperationalError) -> CatalogBusy:
    return CatalogBusy(
        f"another process locks the catalog's file, coord/coord.db, for too long ({error}): nothing was"
        " done. Retry; if this persists, a process that has the file open is suspended or copies it: let it go"
        " on, or end it (`fuser coord/coord.db` names it)"
    )
