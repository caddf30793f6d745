"""A meta store in a SQL database, through SQLAlchemy: SQLite in one file that processes of a machine share, or MariaDB.

Writers take turns: in SQLite by its own lock, in MariaDB by the lock on the one row of `meta_state`.

Leases do not depend on a wall clock. Each renewal increments a counter. Every open store watches the counters, and ends
a lease whose counter did not change for its whole length on the store's monotonic clock. So a lease lives at least as
long as it says, whatever the machine's clocks do, and somewhat longer if no store was open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from millrace.base.closeable import Closeable
from millrace.base.errors import LeaseNotFound
from millrace.base.files import make_folder
from millrace.meta.sql_engine import (
    mariadb_engine,
    on_a_new_connection,
    sqlite_engine,
    transaction,
    upgrade_exclusively,
)
from millrace.meta.store import (
    RETAINED_REVISIONS,
    Delete,
    Entry,
    Event,
    EventBatch,
    Listing,
    Mutation,
    Put,
    RevisionEquals,
    check_commit,
    check_revision,
    check_seconds,
)
from millrace.meta.tables import ENTRY, HISTORY, LEASE, STATE

WATCH_SECONDS: Final = 0.1
"""Minimum time between two looks at the leases' counters."""
_COMPACT_EVERY: Final = 256
"""Revisions between two checks for old history."""


class SqlStore(Closeable):
    """A MetaStore in a SQL database. Thread-safe; each call is one transaction.

    A call whose connection the server had ended is repeated once, on a new connection.
    """

    def __init__(
        self,
        url: str,
        monotonic: Callable[[], float],
        *,
        username: str = "",
        password: str = "",
        retained_revisions: int = RETAINED_REVISIONS,
    ) -> None:
        """Open the store at `url` (``sqlite:////path`` or ``mariadb://host:port/database``); create or migrate its
        tables.

        Raises MetaUnavailable.
        Raises UnsupportedVersion if a newer build wrote the tables.
        """
        self._monotonic = monotonic
        self._retained = retained_revisions
        self._lock = threading.Lock()
        self._watched: dict[int, tuple[int, float]] = {}
        """Renewal counter of each lease, and the time since which it has that value."""
        self._watch_at = monotonic()
        self._engine = sqlite_engine(url) if url.startswith("sqlite") else mariadb_engine(url, username, password)
        try:
            self._upgrade()
        except BaseException:
            self._engine.dispose()
            raise

    @classmethod
    def in_file(
        cls, path: Path, monotonic: Callable[[], float], *, retained_revisions: int = RETAINED_REVISIONS
    ) -> SqlStore:
        """Open the embedded store in the SQLite file at `path`, creating it if needed."""
        make_folder(path.parent)
        return cls(f"sqlite:///{path}", monotonic, retained_revisions=retained_revisions)

    @on_a_new_connection
    def _upgrade(self) -> None:
        with self._transaction(reads=self._engine.dialect.name != "sqlite") as db:
            upgrade_exclusively(db)

    def close(self) -> None:
        self._engine.dispose()

    def _transaction(self, *, reads: bool = False) -> AbstractContextManager[sa.Connection]:
        return transaction(self._engine, read_only=reads)

    @on_a_new_connection
    def get(self, key: str) -> Entry | None:
        self._watch_leases()
        with self._transaction(reads=True) as db:
            row = db.execute(sa.select(ENTRY).where(ENTRY.c.key == key)).first()
        return None if row is None else _entry(row)

    @on_a_new_connection
    def list(self, prefix: str, *, revision: int | None = None) -> Listing:
        self._watch_leases()
        with self._transaction(reads=True) as db:
            state = _state(db)
            if revision is None or revision == state.revision:
                rows = db.execute(sa.select(ENTRY).where(*_under(ENTRY, prefix)).order_by(ENTRY.c.key)).all()
                return Listing(state.revision, tuple(_entry(row) for row in rows))
            check_revision(revision, newest=state.revision, compacted=state.compacted)
            newest = (
                sa.select(HISTORY.c.key, sa.func.max(HISTORY.c.modified).label("modified"))
                .where(*_under(HISTORY, prefix), HISTORY.c.modified <= revision)
                .group_by(HISTORY.c.key)
                .subquery()
            )
            on = sa.and_(HISTORY.c.key == newest.c.key, HISTORY.c.modified == newest.c.modified)
            query = sa.select(HISTORY).join(newest, on).where(HISTORY.c.value.is_not(None)).order_by(HISTORY.c.key)
            return Listing(revision, tuple(_entry(row) for row in db.execute(query)))

    @on_a_new_connection
    def commit(self, then: Sequence[Mutation], *, when: Sequence[RevisionEquals] = ()) -> int | None:
        check_commit(then, when)
        self._watch_leases()
        with self._transaction() as db:
            for condition in when:
                query = sa.select(ENTRY.c.modified).where(ENTRY.c.key == condition.key)
                if (db.execute(query).scalar() or 0) != condition.revision:
                    return None
            for lease in {change.lease for change in then if isinstance(change, Put) and change.lease}:
                if db.execute(sa.select(LEASE.c.id).where(LEASE.c.id == lease)).first() is None:
                    raise LeaseNotFound(f"the lease {lease} has ended: nothing was written")
            return self._write(db, then)

    def _write(self, db: sa.Connection, then: Sequence[Mutation]) -> int:
        db.execute(sa.update(STATE).values(revision=STATE.c.revision + 1))
        state = _state(db)
        revision: int = state.revision
        for change in then:
            created = db.execute(sa.select(ENTRY.c.created).where(ENTRY.c.key == change.key)).scalar()
            if isinstance(change, Delete):
                if created is not None:
                    db.execute(sa.delete(ENTRY).where(ENTRY.c.key == change.key))
                    gone = {"value": None, "created": created, "modified": revision, "lease": 0}
                    db.execute(sa.insert(HISTORY).values(key=change.key, **gone))
                continue
            row = {"value": change.value, "created": created or revision, "modified": revision, "lease": change.lease}
            if created is None:
                db.execute(sa.insert(ENTRY).values(key=change.key, **row))
            else:
                db.execute(sa.update(ENTRY).where(ENTRY.c.key == change.key).values(**row))
            db.execute(sa.insert(HISTORY).values(key=change.key, **row))
        if revision % _COMPACT_EVERY == 0 and revision - state.compacted > 2 * self._retained:
            _compact(db, revision - self._retained)
        return revision

    @on_a_new_connection
    def grant(self, seconds: float) -> int:
        check_seconds(seconds)
        with self._transaction() as db:
            db.execute(sa.update(STATE).values(leases=STATE.c.leases + 1))
            lease: int = _state(db).leases
            db.execute(sa.insert(LEASE).values(id=lease, seconds=seconds, renewals=0))
        return lease

    @on_a_new_connection
    def renew(self, lease: int) -> None:
        self._watch_leases()
        with self._transaction() as db:
            found = db.execute(sa.update(LEASE).where(LEASE.c.id == lease).values(renewals=LEASE.c.renewals + 1))
            if found.rowcount == 0:
                raise LeaseNotFound(f"the lease {lease} has ended")

    @on_a_new_connection
    def revoke(self, lease: int) -> None:
        with self._transaction() as db:
            self._end(db, lease)

    def _end(self, db: sa.Connection, lease: int) -> None:
        if db.execute(sa.delete(LEASE).where(LEASE.c.id == lease)).rowcount:
            keys = (
                db.execute(sa.select(ENTRY.c.key).where(ENTRY.c.lease == lease).order_by(ENTRY.c.key)).scalars().all()
            )
            if keys:
                self._write(db, [Delete(key) for key in keys])

    def _watch_leases(self) -> None:
        """End the leases whose renewal counter did not change for their whole length while this process watched."""
        with self._lock:
            now = self._monotonic()
            if now < self._watch_at:
                return
            self._watch_at = now + WATCH_SECONDS
            with self._transaction(reads=True) as db:
                rows = db.execute(sa.select(LEASE.c.id, LEASE.c.seconds, LEASE.c.renewals)).all()
            now = self._monotonic()
            self._watched = {
                lease: known if (known := self._watched.get(lease)) and known[0] == renewals else (renewals, now)
                for lease, _, renewals in rows
            }
            ended = [(lease, renewals) for lease, seconds, renewals in rows if now - self._watched[lease][1] >= seconds]
        for lease, renewals in ended:
            with self._transaction() as db:
                if db.execute(sa.select(LEASE.c.renewals).where(LEASE.c.id == lease)).scalar() == renewals:
                    self._end(db, lease)

    @on_a_new_connection
    def changes(self, prefix: str, *, after: int) -> EventBatch:
        self._watch_leases()
        with self._transaction(reads=True) as db:
            state = _state(db)
            check_revision(after, newest=state.revision, compacted=state.compacted)
            query = sa.select(HISTORY).where(*_under(HISTORY, prefix), HISTORY.c.modified > after)
            rows = db.execute(query.order_by(HISTORY.c.modified, HISTORY.c.key)).all()
            found = (Event(row.modified, row.key, None if row.value is None else _entry(row)) for row in rows)
            return EventBatch(state.revision, tuple(found))

    @on_a_new_connection
    def compact(self, revision: int) -> None:
        with self._transaction() as db:
            state = _state(db)
            if revision > state.compacted:
                check_revision(revision, newest=state.revision, compacted=state.compacted)
                _compact(db, revision)


def _under(table: sa.Table, prefix: str) -> list[sa.ColumnElement[bool]]:
    return [table.c.key >= prefix, table.c.key < prefix + "\x7f"]


def _entry(row: Any) -> Entry:
    return Entry(row.key, row.value, row.created, row.modified, row.lease)


def _state(db: sa.Connection) -> Any:
    return db.execute(sa.select(STATE)).one()


def _compact(db: sa.Connection, revision: int) -> None:
    """Delete history before `revision`, except each key's last put: later listings are built from it."""
    later = HISTORY.alias()
    covered = sa.exists().where(
        later.c.key == HISTORY.c.key, later.c.modified > HISTORY.c.modified, later.c.modified <= revision
    )
    db.execute(sa.delete(HISTORY).where(HISTORY.c.modified <= revision, sa.or_(covered, HISTORY.c.value.is_(None))))
    db.execute(sa.update(STATE).values(compacted=revision))
