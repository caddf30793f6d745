"""The catalog in the coordinator's file: PChannels with their terms, producers' epochs, collections. Broadcasts lie
beside it.

It holds no rows and no positions: the WAL is the truth about those.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Self

from millrace.base.closeable import Closeable
from millrace.base.errors import (
    AliasExists,
    AliasNotFound,
    CollectionExists,
    CollectionHasAliases,
    CollectionNotFound,
    InvalidArgument,
    InvalidSettings,
    MetaUnavailable,
    ProducerFenced,
)
from millrace.catalog.collection import CollectionInfo, CollectionPage, CollectionQuery, PChannel
from millrace.catalog.sqlite_file import (
    collection_from_row,
    select_aliases,
    select_by_id,
    select_collections,
    select_page,
    select_row,
)
from millrace.coord.broadcast.sqlite_ledger import SqliteLedger
from millrace.coord.catalog.database import CoordinatorDb, SharedStore, repeated
from millrace.wal.definitions import VChannelOutline

_YEAR_2026: Final = 1_767_225_600
"""Seconds since then make ids that no deployment reaches by counting. They fit an epoch (32 bits) until 2094."""
MAX_ANSWERS: Final = 10_000
"""Number of newest requests for a term, an epoch or an alias whose answers are stored for retries."""
MAX_ALIASES: Final = 10_000
"""Number of aliases of a deployment."""
_MAX_NAMED: Final = 10


class CatalogStore(Closeable):
    """The coordinator's file. Thread-safe."""

    def __init__(self, path: Path, *, shared: SharedStore | None = None) -> None:
        """`shared`: the shared catalog that the file copies."""
        self._on(CoordinatorDb(path, shared=shared))

    def _on(self, database: CoordinatorDb) -> None:
        self._db = database
        self.transaction = database.transaction
        self.broadcasts = SqliteLedger(database)

    @classmethod
    def open_read_only(cls, data_dir: Path) -> Self | None:
        """Open a deployment's file without changing it; None if no coordinator has run yet."""
        database = CoordinatorDb.open_read_only(data_dir)
        if database is None:
            return None
        store = cls.__new__(cls)
        store._on(database)
        return store

    def close(self) -> None:
        self._db.close()

    def refresh(self) -> None:
        """Take over what other machines changed in the shared catalog, if the file is a copy of one.

        Raises MetaUnavailable.
        """
        if self._db.is_copy:
            with self._db.transaction():
                pass

    def require_not_shared(self) -> None:
        """Raise InvalidSettings if the file is a copy of a shared catalog: a local write would be lost."""
        if self._db.fetch_one("select 1 from shared where revision > 0") is not None:
            raise InvalidSettings(
                "this deployment's catalog is in a meta store, and coord/coord.db is a copy of it: set"
                " MILLRACE_META_STORE as before"
                " (docs/coordinator.md#the-catalog says how to continue without)"
            )

    @repeated
    def set_id_floor(self, floor: int) -> None:
        """Allocate only producer epochs and ids of collections and partitions above `floor` from now on.

        A restored catalog does not know the ids allocated since its backup; rows with those ids may still exist (in a
        spool).
        """
        with self._db.transaction():
            self._db.execute("insert into restored values (?)", (floor,))

    def raise_id_floor(self) -> None:
        """Ensure that no id or epoch allocated before now, known to this catalog or not, is allocated again."""
        self.set_id_floor(max(0, int(time.time()) - _YEAR_2026))

    def _floor(self) -> int:
        return int(self._db.fetch_one("select coalesce(max(floor), 0) from restored")[0])

    # -- PChannels ----------------------------------------------------------------------------------------------------

    def pchannels(self) -> list[PChannel]:
        """Return all PChannels, sorted by name."""
        rows = self._db.execute("select name, term, opened from pchannel order by name")
        return [PChannel(name, term, bool(opened)) for name, term, opened in rows]

    def pchannel(self, name: str) -> PChannel | None:
        """Return a PChannel; None if it does not exist."""
        row = self._db.fetch_one("select term, opened from pchannel where name = ?", (name,))
        return None if row is None else PChannel(name, row[0], bool(row[1]))

    def vchannel_counts(self) -> dict[str, int]:
        """Return the number of VChannels on each PChannel."""
        return dict(
            self._db.execute(
                "select name, coalesce(vchannels, 0) from pchannel left join vchannel_count on pchannel = name"
            )
        )

    def term(self, name: str) -> int:
        """Return the newest term of a PChannel, as all machines know it unless the meta store is down.

        Raises InvalidArgument if it does not exist.
        """
        with suppress(MetaUnavailable):
            self.refresh()
        row = self._db.fetch_one("select term from pchannel where name = ?", (name,))
        if row is None:
            raise InvalidArgument(f"no PChannel {name!r}")
        return int(row[0])

    @repeated
    def next_term(self, name: str) -> int:
        """Allocate the next term of `name` (1 for a new PChannel), durably before anyone uses it."""
        with self._db.transaction():
            self._db.execute(
                "insert into pchannel values (?, 1, 0) on conflict (name) do update set term = term + 1, opened = 0",
                (name,),
            )
            term: int = self._db.fetch_one("select term from pchannel where name = ?", (name,))[0]
        return term

    @repeated
    def record_term(self, name: str, term: int) -> None:
        """Record the PChannel `name` with `term` open, as the log has it."""
        with self._db.transaction():
            self._db.execute(
                "insert into pchannel values (?, ?, 1) on conflict (name) do update set opened = (term <="
                " excluded.term),"
                " term = max(term, excluded.term)",
                (name, term),
            )

    @repeated
    def mark_term_opened(self, name: str, term: int, *, request: str = "") -> None:
        """Record that the opening of `term` was acknowledged, and the answer of `request`. No effect if a newer term
        exists.
        """
        with self._db.transaction():
            self._db.execute("update pchannel set opened = 1 where name = ? and term = ?", (name, term))
            self._answer(request, name, term)

    # -- producers ----------------------------------------------------------------------------------------------------

    @repeated
    def next_epoch(self, producer_id: int, *, held: int | None = None, request: str = "") -> int:
        """Allocate the next epoch of a producer, from 1. Only a repeated `request` returns the same epoch again.

        `held`: the newest epoch of the caller. Raises ProducerFenced if a newer one was allocated since.
        """
        with self._db.transaction():
            if request and (answered := self.find_answer(request, f"{producer_id}")) is not None:
                return answered
            if held is not None:
                newest = self._db.fetch_one("select epoch from producer where id = ?", (producer_id,))
                if newest is not None and newest[0] != held:
                    raise ProducerFenced(
                        f"producer {producer_id} runs with epoch {newest[0]} in another process, and this one has epoch"
                        f" {held}: close it"
                    )
            floor = self._floor()
            self._db.execute(
                "insert into producer values (?, ? + 1) on conflict (id) do update set epoch = max(epoch, ?) + 1",
                (producer_id, floor, floor),
            )
            epoch: int = self._db.fetch_one("select epoch from producer where id = ?", (producer_id,))[0]
            self._answer(request, f"{producer_id}", epoch)
        return epoch

    # -- requests -----------------------------------------------------------------------------------------------------

    def find_answer(self, request: str, of: str) -> int | None:
        """Return the answer that a request got: a term of the PChannel `of`, or an epoch of that producer. None if
        unknown.

        Raises InvalidArgument if the request was for something else.
        """
        row = self._db.fetch_one("select of, answer from answered where name = ?", (request,))
        if row is not None and row[0] != of:
            raise InvalidArgument(f"request {request!r} was used for {row[0]}: name each request uniquely")
        return None if row is None else int(row[1])

    def _answer(self, request: str, of: str, answer: int) -> None:
        if request:
            self._db.execute(
                "insert into answered (name, of, answer) values (?, ?, ?) on conflict do nothing", (request, of, answer)
            )
            self._db.execute("delete from answered where id <= (select max(id) from answered) - ?", (MAX_ANSWERS,))

    # -- collections --------------------------------------------------------------------------------------------------

    def collections(self, *, dropped: bool = False) -> list[CollectionInfo]:
        """Return the collections by name; with `dropped`, dropped ones too."""
        return self._db.with_connection(partial(select_collections, dropped=dropped))

    def page(self, query: CollectionQuery) -> CollectionPage:
        """Return one page of the collections."""
        return self._db.with_connection(partial(select_page, query=query))

    def collections_by_id(self, ids: Iterable[int]) -> dict[int, CollectionInfo]:
        """Return those collections that exist, also dropped ones, by id."""
        return self._db.with_connection(partial(select_by_id, ids=ids))

    def outlines(self) -> Iterator[tuple[int, str, VChannelOutline]]:
        """Yield the id, each VChannel and its outline of the collections that are not dropped."""
        rows = self._db.execute(
            "select id, vchannels, json_array_length(schemas), partitions from collection where state != 'dropped'"
        )
        for number, vchannels, version, partitions in rows:
            by_id = {place: name for name, place in json.loads(partitions).items()}
            for vchannel in json.loads(vchannels):
                yield number, vchannel, VChannelOutline(number, version, by_id)

    def collection(self, name: str) -> CollectionInfo:
        """Return the collection with the name or alias `name`.

        Raises CollectionNotFound.
        """
        row = self._db.with_connection(partial(select_row, name=name))
        if row is None and self._db.is_copy:  # another machine may have created it just now
            with suppress(MetaUnavailable):
                self.refresh()
            row = self._db.with_connection(partial(select_row, name=name))
        if row is None:
            if (number := self.find_alias(name)) is not None:
                raise CollectionNotFound(
                    f"{name!r} is an alias of collection {number}, which was dropped: point it to another collection"
                )
            raise CollectionNotFound(f"no collection {name!r}; `millrace collections list` shows those there are")
        return collection_from_row(row)

    def has_collection(self, name: str) -> bool:
        """Return whether a collection called `name` exists and is not dropped."""
        row = self._db.fetch_one("select 1 from collection where name = ? and state != 'dropped'", (name,))
        return row is not None

    def collection_by_id(self, collection_id: int) -> CollectionInfo:
        """Return a collection by id, even a dropped one.

        Raises CollectionNotFound.
        """
        found = self.find_collection(collection_id)
        if found is None:
            raise CollectionNotFound(f"no collection with the id {collection_id}")
        return found

    def find_collection(self, collection_id: int) -> CollectionInfo | None:
        """Return a collection by id, even a dropped one; None if the id is unknown."""
        row = self._db.fetch_one("select * from collection where id = ?", (collection_id,))
        return None if row is None else collection_from_row(row)

    def next_collection_id(self) -> int:
        """Return the id that a new collection would get now."""
        (newest,) = self._db.fetch_one("select coalesce(max(id), 0) from collection")
        return max(int(newest), self._floor()) + 1

    @repeated
    def add(self, collection: CollectionInfo) -> bool:
        """Store a new collection. Returns False, and stores nothing, if its id was allocated meanwhile.

        Raises CollectionExists.
        """
        with self._db.transaction():
            if self.has_collection(collection.name):
                raise CollectionExists(f"a collection {collection.name!r} exists already")
            if self.find_alias(collection.name) is not None:
                raise CollectionExists(f"{collection.name!r} is the alias of a collection: choose another name")
            if collection.id != self.next_collection_id():
                return False
            self._db.execute("insert into collection values (?, ?, ?, ?, ?, ?, ?)", _row(collection))
            return True

    # -- aliases ------------------------------------------------------------------------------------------------------

    def aliases(self, collection_id: int | None = None) -> dict[str, int]:
        """Return the ids of collections by alias, or the aliases of one collection."""
        return self._db.with_connection(partial(select_aliases, collection_id=collection_id))

    def find_alias(self, alias: str) -> int | None:
        """Return the id of the collection that an alias points to, dropped or not; None if there is no such alias."""
        row = self._db.fetch_one("select collection_id from alias where name = ?", (alias,))
        return None if row is None else int(row[0])

    @repeated
    def set_alias(self, alias: str, collection_id: int, *, new: bool, request: str = "") -> None:
        """Point an alias to an active collection: a `new` one, or one that exists. A repeated request has no effect.

        A new alias may exist if it points to this collection.
        Raises AliasExists, AliasNotFound, CollectionNotFound, InvalidArgument.
        """
        with self._db.transaction():
            if request and self.find_answer(request, f"alias {alias}") is not None:
                return
            if self.collection_by_id(collection_id).state != "active":
                raise CollectionNotFound(f"collection {collection_id} was dropped before it got the alias {alias!r}")
            there = self.find_alias(alias)
            if new and self.has_collection(alias):
                raise AliasExists(f"{alias!r} is the name of a collection: choose another name for the alias")
            if new and there not in (None, collection_id):
                raise AliasExists(
                    f"{alias!r} is the alias of collection {there}: use alter_alias to change its collection"
                )
            if not new and there is None:
                raise AliasNotFound(f"there is no alias {alias!r}: create it")
            if there is None and self._db.fetch_one("select count(*) from alias")[0] >= MAX_ALIASES:
                raise InvalidArgument(f"a deployment has at most {MAX_ALIASES:,} aliases: drop some")
            self._db.execute(
                "insert into alias values (?, ?) on conflict (name) do update set collection_id ="
                " excluded.collection_id",
                (alias, collection_id),
            )
            self._answer(request, f"alias {alias}", collection_id)

    @repeated
    def drop_alias(self, alias: str, *, request: str = "") -> None:
        """Delete an alias. A repeated request has no effect.

        Raises AliasNotFound.
        """
        with self._db.transaction():
            if request and self.find_answer(request, f"no alias {alias}") is not None:
                return
            if (there := self.find_alias(alias)) is None:
                raise AliasNotFound(f"there is no alias {alias!r}")
            self._db.execute("delete from alias where name = ?", (alias,))
            self._answer(request, f"no alias {alias}", there)

    def require_no_alias(self, collection: CollectionInfo) -> None:
        """Raise CollectionHasAliases if an alias points to the collection."""
        if names := [*self.aliases(collection.id)]:
            more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
            raise CollectionHasAliases(
                f"{collection.name!r} has the aliases {', '.join(names[:_MAX_NAMED])}{more}: drop them, or point them"
                " to another collection, and drop the collection then"
            )

    @repeated
    def restore_collection(self, collection: CollectionInfo) -> bool:
        """Store a collection that the catalog lost or marks as dropped, under its old id; return whether it did.

        A collection that is known, or has a broadcast in progress, is left unchanged.
        """
        with self._db.transaction():
            known = self.find_collection(collection.id)
            if known is not None and (known.state != "dropped" or collection.state == "dropped"):
                return False
            if any(task.collection_id == collection.id for task in self.broadcasts.open_tasks()):
                return False
            self._db.execute("insert or replace into collection values (?, ?, ?, ?, ?, ?, ?)", _row(collection))
            return True

    @repeated
    def update_collection(self, collection: CollectionInfo) -> None:
        """Overwrite a collection's entry. Allocated partition ids stay allocated."""
        with self._db.transaction():
            self._db.execute(
                "update collection set state = ?, schemas = ?, partitions = ?, next_partition = max(next_partition, ?)"
                " where id = ?",
                (collection.state, *_definition(collection), collection.next_partition, collection.id),
            )

    def is_unchanged(self, seen: CollectionInfo) -> bool:
        """Return whether the collection equals the snapshot `seen`, ignoring allocated partition ids."""
        now = self.find_collection(seen.id)
        return now is not None and replace(now, next_partition=seen.next_partition) == seen

    @repeated
    def is_settled(self, seen: CollectionInfo) -> bool:
        """Return whether the collection equals the snapshot `seen` and has no broadcast in progress."""
        with self._db.transaction():
            under_way = any(task.collection_id == seen.id for task in self.broadcasts.open_tasks())
            return not under_way and self.is_unchanged(seen)

    @repeated
    def update_if_settled(self, seen: CollectionInfo, there: CollectionInfo) -> bool:
        """Overwrite the entry with the chain's state if the collection is still as `seen`; return whether it was."""
        with self._db.transaction():
            if not self.is_settled(seen):
                return False
            self.update_collection(there)
            return True

    @repeated
    def allocate_partition_id(self, collection_id: int) -> int:
        """Allocate a partition id."""
        with self._db.transaction():
            self._db.execute(
                "update collection set next_partition = max(next_partition, ? + 1) + 1 where id = ?",
                (self._floor(), collection_id),
            )
            row = self._db.fetch_one("select next_partition - 1 from collection where id = ?", (collection_id,))
            taken: int = row[0]
        return taken


def _definition(collection: CollectionInfo) -> tuple[str, str]:
    return json.dumps([schema.to_json() for schema in collection.schemas]), json.dumps(collection.partitions)


def _row(collection: CollectionInfo) -> tuple[object, ...]:
    """Return the columns of a collection, in the table's order."""
    named = (collection.id, collection.name, collection.state, json.dumps(collection.vchannels))
    return (*named, *_definition(collection), collection.next_partition)
