"""The catalog of a cluster: the meta store has the truth, and each machine's coordinator file is a copy of it.

If MILLRACE_META_STORE names a store, each transaction of the file (millrace.coord.catalog.database) first brings the
copy up to date, by the documents that others have changed, and ends with one commit to the store, which succeeds only
if no other commit came in between. So the file alone is never the truth: a lost file is recreated, and a crash between
the two commits leaves a copy that is read anew.

In the store, rows are documents under ``catalog/``, zlib-compressed JSON: one per collection, one per broadcast with
its targets, and PChannels, producers and answers by a hash. ``catalog/guard`` changes with every commit; its revision
is the catalog's.

Aliases are documents by a hash of their name. A catalog that has any says so by its version, which builds without
aliases refuse.
"""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from millrace.base.backoff import jittered
from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import (
    InvalidArgument,
    InvalidSettings,
    MetaAmbiguous,
    MetaUnavailable,
    RevisionCompacted,
    UnsupportedVersion,
)
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.coord.catalog.database import CatalogChanged
from millrace.coord.clock import SystemClock
from millrace.coord.store_factory import CATALOG_GUARD_KEY, CATALOG_PREFIX, open_cluster_store
from millrace.meta.factory import ClosableMetaStore
from millrace.meta.store import Delete, Entry, Mutation, Put, RevisionEquals

DOCUMENT_VERSION: Final = 2
"""Version of the documents. A store with a newer one is refused. 2: the catalog has aliases; without any, it says 1."""
BUCKETS: Final = 256
"""Number of documents that PChannels are spread over; producers and answers likewise."""
MAX_CHANGES_PER_COMMIT: Final = 100
"""Changes per commit; a store accepts 128."""
MAX_BYTES_PER_COMMIT: Final = 512 * 1024
"""Bytes of changes per commit; etcd accepts 1.5 MiB per request."""
RETRY_SECONDS: Final = 15.0
_PAUSE: Final = 0.1

_TABLES: Final = {
    "pchannel": ("pchannel", "bucket({row}.name)"),
    "producer": ("producer", "bucket({row}.id)"),
    "collection": ("collection", "{row}.id"),
    "broadcast": ("broadcast", "{row}.id"),
    "target": ("broadcast", "{row}.broadcast_id"),
    "begun": ("broadcast", "{row}.broadcast_id"),
    "trouble": ("broadcast", "{row}.broadcast_id"),
    "request": ("broadcast", "{row}.broadcast_id"),
    "answered": ("answer", "bucket({row}.id)"),
    "restored": ("restored", "0"),
    "alias": ("alias", "bucket({row}.name)"),
}
"""For each table of the file, the kind of its documents, and the document that a row belongs to."""
_ROWS_OF: Final = {"insert": ("new",), "update": ("old", "new"), "delete": ("old",)}

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def open_shared_catalog(settings: Settings) -> SharedCatalog | None:
    """Open the deployment's shared catalog; None if no meta store is configured.

    Raises what opening the store raises.
    """
    return (
        SharedCatalog(open_cluster_store(settings, SystemClock()), retry_seconds=RETRY_SECONDS)
        if settings.meta_store
        else None
    )


class SharedCatalog(Closeable):
    """The SharedStore on a meta store. Not thread-safe: it runs inside the file's transactions."""

    def __init__(self, meta: ClosableMetaStore, *, retry_seconds: float = 0.0, follow_only: bool = False) -> None:
        """`meta` is closed with it. `retry_seconds`: how long to retry an unavailable store; a restart closes its
        connections. `follow_only`: never put the file's catalog into a store that has none.
        """
        self._meta = meta
        self._patience = retry_seconds
        self._follow_only = follow_only

    def close(self) -> None:
        self._meta.__exit__(None, None, None)

    def attach(self, db: sqlite3.Connection) -> None:
        """Record changes by triggers, and store a name for the file's own catalog.

        The name is durable before the catalog is put into a store, so that it is recognised if the answer is lost.
        """
        if _copy(db) is None:
            db.execute(
                "insert into shared select ?, 0 where not exists (select 1 from shared)", (secrets.token_hex(16),)
            )
        db.create_function("bucket", 1, lambda value: zlib.crc32(str(value).encode()) % BUCKETS, deterministic=True)
        # Temporary tables and triggers exist in this connection only: the file's own schema stays the same.
        db.execute("create temp table touched (kind text, number integer)")
        for table, (kind, number) in _TABLES.items():
            for change, rows in _ROWS_OF.items():
                notes = "".join(f"insert into touched values ('{kind}', {number.format(row=row)});" for row in rows)
                db.execute(f"create temp trigger {table}_{change} after {change} on main.{table} begin {notes} end")

    def begin(self, db: sqlite3.Connection) -> None:
        """Bring the file up to date. A store without a catalog gets the file's."""
        guard = self._patiently(lambda: self._meta.get(CATALOG_GUARD_KEY))
        catalog, revision = _copy(db)
        if guard is None and self._follow_only:
            return
        if guard is None and revision:
            _log.warning("the meta store has lost the catalog: restoring it from the coordinator's file")
            # Under a new name, stored first: if the old store comes back, it must not mistake this catalog for its own.
            db.execute("update shared set catalog = ?, revision = 0", (secrets.token_hex(16),))
            db.execute("commit")
            db.execute("begin immediate")
            self.begin(db)
            return
        if guard is None:
            self._create_shared(db, catalog)
        elif _guard_fields(guard)["catalog"] != catalog and (revision or any(_numbers(db))):
            raise InvalidSettings(
                "the meta store in MILLRACE_META_STORE has the catalog of another deployment than this data folder:"
                " use the"
                " store that holds this deployment's catalog, or an empty one (another database, another prefix of"
                " etcd)"
            )
        # Another coordinator has written since: the store is the truth, the file a copy.
        elif guard.modified != revision and not (revision and self._follow(db, catalog, revision)):
            self._take(db)
        db.execute("delete from touched")

    def end(self, db: sqlite3.Connection) -> None:
        touched = db.execute("select distinct kind, number from touched order by kind, number").fetchall()
        if not touched:
            return
        catalog, revision = _copy(db)
        changes = [_change(db, kind, number) for kind, number in touched]
        # There are many changes only if many closed broadcasts are removed at once; their order does not matter.
        forgotten = [change for change in changes if isinstance(change, Delete)]
        later = forgotten[MAX_CHANGES_PER_COMMIT // 2 :]
        for piece in _pieces(later):
            revision = self._commit(db, piece, catalog, revision)
        self._commit(db, [change for change in changes if change not in later], catalog, revision)
        hit("catalog.shared")

    def _commit(self, db: sqlite3.Connection, changes: list[Mutation], catalog: str, base: int) -> int:
        """Commit the changes on top of revision `base` (0: no catalog); return the new revision."""
        guard = _guard(catalog, _form(db))
        try:
            revision = self._patiently(
                lambda: self._meta.commit([*changes, guard], when=[RevisionEquals(CATALOG_GUARD_KEY, base)])
            )
        except MetaAmbiguous:
            revision = self._settled(guard, catalog, base)
        if revision is None:
            raise CatalogChanged("the catalog was changed concurrently: nothing was done, retry")
        _record(db, Entry(guard.key, guard.value, 0, revision))
        return revision

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """Retry a call that raises MetaUnavailable: it was not done."""
        end = Deadline.after(self._patience)
        while True:
            try:
                return call()
            except MetaUnavailable:
                if not end.pause(jittered(_PAUSE)):
                    raise

    def _settled(self, guard: Put, catalog: str, base: int) -> int | None:
        """Determine the outcome of a commit whose answer was lost, and make sure that it cannot succeed later.

        Raises MetaAmbiguous.
        """
        try:
            another = _guard(catalog, json.loads(guard.value)["form"])
            if self._meta.commit([another], when=[RevisionEquals(CATALOG_GUARD_KEY, base)]) is not None:
                return None
            there = self._meta.get(CATALOG_GUARD_KEY)
        except MetaUnavailable as error:
            raise MetaAmbiguous(
                f"a change of the catalog got no answer ({error}): check whether it was made before you retry"
            ) from error
        return there.modified if there is not None and there.value == guard.value else None

    def _create_shared(self, db: sqlite3.Connection, catalog: str) -> None:
        """Put the file's rows into the store as its catalog.

        A crash leaves documents without a guard; the next attempt replaces them.
        """
        changes = [_change(db, kind, number) for kind, number in _numbers(db)]
        keys = {change.key for change in changes}
        left = [Delete(entry.key) for entry in self._meta.list(CATALOG_PREFIX).entries if entry.key not in keys]
        for piece in _pieces([*left, *changes]):
            if self._meta.commit(piece, when=[RevisionEquals(CATALOG_GUARD_KEY, 0)]) is None:
                raise CatalogChanged("another process created the catalog concurrently: retry")
        self._commit(db, [], catalog, 0)
        hit("catalog.shared")

    def _follow(self, db: sqlite3.Connection, catalog: str, revision: int) -> bool:
        """Apply the documents that changed since `revision`; return False if the store cannot tell which.

        So a change by another machine costs what it changed, not what the catalog holds.
        """
        try:
            events = self._meta.changes(CATALOG_PREFIX, after=revision - 1).events
        except (RevisionCompacted, InvalidArgument):
            return False  # too long ago, or another store's revision
        # A store that was put back to an earlier state counts its revisions again. So the copy's own commit must be
        # there, under its revision.
        own = [event.entry for event in events if (event.key, event.revision) == (CATALOG_GUARD_KEY, revision)]
        if [(_guard_fields(entry)["commit"],) for entry in own if entry is not None] != _commit_of(db):
            return False
        newest = {event.key: event.entry for event in events if event.revision > revision}
        guard = newest.pop(CATALOG_GUARD_KEY, None)
        if guard is None or _guard_fields(guard)["catalog"] != catalog:
            return False
        for key, entry in newest.items():
            kind, _, number = key.removeprefix(CATALOG_PREFIX).partition("/")
            for table, (of, place) in _TABLES.items():
                if of == kind:
                    db.execute(f"delete from {table} where {place.format(row=table)} = ?", (int(number),))
            if entry is not None:
                _insert(db, entry)
        _record(db, guard)
        return True

    def _take(self, db: sqlite3.Connection) -> None:
        """Copy the store's catalog into the file."""
        entries = {entry.key: entry for entry in self._meta.list(CATALOG_PREFIX).entries}
        guard = entries.pop(CATALOG_GUARD_KEY)
        for table in _TABLES:
            db.execute(f"delete from {table}")
        for entry in entries.values():
            _insert(db, entry)
        _record(db, guard)


def _insert(db: sqlite3.Connection, entry: Entry) -> None:
    """Insert the rows of a document."""
    for table, rows in json.loads(zlib.decompress(entry.value)).items():
        if rows:
            db.executemany(f"insert into {table} values ({', '.join('?' * len(rows[0]))})", rows)


def _copy(db: sqlite3.Connection) -> Any:
    return db.execute("select catalog, revision from shared").fetchone()


def _commit_of(db: sqlite3.Connection) -> list[Any]:
    """Return the name of the commit that the copy has, as rows."""
    return db.execute("select name from shared_commit").fetchall()


def _record(db: sqlite3.Connection, guard: Entry) -> None:
    """Record that the file is a copy as of a guard."""
    said = _guard_fields(guard)
    db.execute("update shared set catalog = ?, revision = ?", (said["catalog"], guard.modified))
    db.execute("delete from shared_commit")
    db.execute("insert into shared_commit values (?)", (said["commit"],))


def _form(db: sqlite3.Connection) -> int:
    """Return the oldest version of the documents that has all of the file's rows."""
    return DOCUMENT_VERSION if db.execute("select 1 from alias limit 1").fetchone() is not None else 1


def _guard(catalog: str, form: int) -> Put:
    return Put(
        CATALOG_GUARD_KEY, json.dumps({"form": form, "catalog": catalog, "commit": secrets.token_hex(8)}).encode()
    )


def _guard_fields(guard: Entry) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(guard.value)
    if said["form"] > DOCUMENT_VERSION:
        raise UnsupportedVersion(
            f"the catalog in the meta store has version {said['form']}, this build reads {DOCUMENT_VERSION}: use a"
            " newer build"
        )
    return said


def _numbers(db: sqlite3.Connection) -> Iterator[tuple[str, int]]:
    """Yield the documents that the file's rows belong to."""
    for table in ("pchannel", "producer", "collection", "broadcast", "answered", "restored", "alias"):
        kind, number = _TABLES[table]
        yield from db.execute(f"select distinct '{kind}', {number.format(row=table)} from {table}").fetchall()


def _change(db: sqlite3.Connection, kind: str, number: int) -> Mutation:
    """Return the write of one document with the file's current rows, or its removal if there are none."""
    key = f"{CATALOG_PREFIX}{kind}/{number}"
    document = {}
    for table, (of, place) in _TABLES.items():
        if of == kind:
            where = place.format(row=table)
            document[table] = db.execute(
                f"select * from {table} where {where} = ? order by rowid", (number,)
            ).fetchall()
    if not any(document.values()):
        return Delete(key)
    return Put(key, zlib.compress(json.dumps(document).encode()))


def _pieces(changes: Iterable[Mutation]) -> Iterator[list[Mutation]]:
    piece: list[Mutation] = []
    size = 0
    for change in changes:
        more = len(change.value) if isinstance(change, Put) else 0
        if piece and (len(piece) == MAX_CHANGES_PER_COMMIT or size + more > MAX_BYTES_PER_COMMIT):
            yield piece
            piece, size = [], 0
        piece.append(change)
        size += more
    if piece:
        yield piece
