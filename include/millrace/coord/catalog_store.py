"""The catalog as the coordinator keeps it: PChannels with their terms, producers' epochs, collections; broadcasts lie beside it.

Nothing about rows or positions stands here: the truth about those is the WAL.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Self

from millrace.base.closeable import Closeable
from millrace.base.errors import CollectionExists, CollectionNotFound, InvalidArgument, InvalidSettings, ProducerFenced
from millrace.catalog.collection import CollectionInfo, PChannel
from millrace.catalog.sqlite_file import collection_from_row, select_collections
from millrace.coord.broadcast.sqlite_ledger import SqliteLedger
from millrace.coord.coordinator_db import CoordinatorDb, SharedStore

_YEAR_2026: Final = 1_767_225_600
"""Seconds since then are numbers that no deployment reaches by counting, and that fit an epoch (32 bits) until 2094."""
MAX_ANSWERS: Final = 10_000
"""Newest requests for a term or an epoch whose answers are kept for who asks again."""


class CatalogStore(Closeable):
    """The coordinator's file. Thread-safe."""

    def __init__(self, path: Path, *, shared: SharedStore | None = None) -> None:
        """`shared`: what the file is a copy of."""
        self._on(CoordinatorDb(path, shared=shared))

    def _on(self, database: CoordinatorDb) -> None:
        self._db = database
        self.transaction = database.transaction
        self.broadcasts = SqliteLedger(database)

    @classmethod
    def open_read_only(cls, data_dir: Path) -> Self | None:
        """The file of a deployment, of which nothing is changed; None where no coordinator was at work yet."""
        database = CoordinatorDb.open_read_only(data_dir)
        if database is None:
            return None
        store = cls.__new__(cls)
        store._on(database)
        return store

    def close(self) -> None:
        self._db.close()

    def require_not_shared(self) -> None:
        """Raises InvalidSettings where the file is a copy: whoever wrote to it alone would be lost to the others."""
        if self._db.fetch_one("select 1 from shared where revision > 0") is not None:
            raise InvalidSettings(
                "this deployment's catalog lies in a meta store, and coord/coord.db is a copy of it: set MILLRACE_META_STORE as it was"
                " (docs/coordinator.md#the-catalog: how to go on without)"
            )

    def set_id_floor(self, floor: int) -> None:
        """From now on epochs of producers, ids of collections and of partitions are greater than `floor`: a catalog that was restored
        knows nothing of those that were given since, and who was given them may still hold rows that are stamped so (a spool)."""
        with self._db.transaction():
            self._db.execute("insert into restored values (?)", (floor,))

    def raise_id_floor(self) -> None:
        """No id or epoch that was given until now, and that this catalog may have forgotten, is given again."""
        self.set_id_floor(max(0, int(time.time()) - _YEAR_2026))

    def _floor(self) -> int:
        return int(self._db.fetch_one("select coalesce(max(floor), 0) from restored")[0])

    # -- PChannels ----------------------------------------------------------------------------------------------------

    def pchannels(self) -> list[PChannel]:
        """All PChannels, in the order of their names."""
        rows = self._db.execute("select name, term, opened from pchannel order by name")
        return [PChannel(name, term, bool(opened)) for name, term, opened in rows]

    def term(self, name: str) -> int:
        """The newest term of a PChannel. Raises InvalidArgument for one that is not there."""
        row = self._db.fetch_one("select term from pchannel where name = ?", (name,))
        if row is None:
            raise InvalidArgument(f"no PChannel {name!r}")
        return int(row[0])

    def next_term(self, name: str) -> int:
        """Count the term of `name` up (from 0 where it is new) and keep that before anybody uses it."""
        with self._db.transaction():
            self._db.execute(
                "insert into pchannel values (?, 1, 0) on conflict (name) do update set term = term + 1, opened = 0",
                (name,),
            )
            term: int = self._db.fetch_one("select term from pchannel where name = ?", (name,))[0]
        return term

    def record_term(self, name: str, term: int) -> None:
        """Know the PChannel `name`, of which the log has `term`, opened."""
        with self._db.transaction():
            self._db.execute(
                "insert into pchannel values (?, ?, 1) on conflict (name) do update set opened = (term <= excluded.term),"
                " term = max(term, excluded.term)",
                (name, term),
            )

    def mark_term_opened(self, name: str, term: int, *, request: str = "") -> None:
        """The opening of `term` was acknowledged (no effect where a newer term exists); what `request` is answered from now on."""
        with self._db.transaction():
            self._db.execute("update pchannel set opened = 1 where name = ? and term = ?", (name, term))
            self._answer(request, name, term)

    # -- producers ----------------------------------------------------------------------------------------------------

    def next_epoch(self, producer_id: int, *, held: int | None = None, request: str = "") -> int:
        """The next epoch of a producer, from 1: kept before it is used, so that no epoch is ever given twice, but to a `request` that
        is made again.

        With `held`, the newest epoch that the caller was given: raises ProducerFenced where somebody took a newer one since.
        """
        with self._db.transaction():
            if request and (answered := self.find_answer(request, f"{producer_id}")) is not None:
                return answered
            if held is not None:
                newest = self._db.fetch_one("select epoch from producer where id = ?", (producer_id,))
                if newest is not None and newest[0] != held:
                    raise ProducerFenced(
                        f"producer {producer_id} runs epoch {newest[0]} elsewhere, and this one has epoch {held}: close it"
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
        """What the request of that name was answered, a term of the PChannel `of` or an epoch of that producer; None where it is not
        known. Raises InvalidArgument where it was another one's."""
        row = self._db.fetch_one("select of, answer from answered where name = ?", (request,))
        if row is not None and row[0] != of:
            raise InvalidArgument(f"the request {request!r} was another one's, of {row[0]}: give each its own name")
        return None if row is None else int(row[1])

    def _answer(self, request: str, of: str, answer: int) -> None:
        if request:
            self._db.execute(
                "insert into answered (name, of, answer) values (?, ?, ?) on conflict do nothing", (request, of, answer)
            )
            self._db.execute("delete from answered where id <= (select max(id) from answered) - ?", (MAX_ANSWERS,))

    # -- collections --------------------------------------------------------------------------------------------------

    def collections(self, *, dropped: bool = False) -> list[CollectionInfo]:
        """Collections by name; with `dropped` those too that are gone."""
        return self._db.with_connection(partial(select_collections, dropped=dropped))

    def collection(self, name: str) -> CollectionInfo:
        """The collection called `name`. Raises CollectionNotFound."""
        row = self._db.fetch_one("select * from collection where name = ? and state != 'dropped'", (name,))
        if row is None:
            raise CollectionNotFound(f"no collection {name!r}; `millrace collections list` shows those there are")
        return collection_from_row(row)

    def collection_by_id(self, collection_id: int) -> CollectionInfo:
        """A collection by its id, a dropped one too. Raises CollectionNotFound."""
        found = self.find_collection(collection_id)
        if found is None:
            raise CollectionNotFound(f"no collection with the id {collection_id}")
        return found

    def find_collection(self, collection_id: int) -> CollectionInfo | None:
        """A collection by its id, a dropped one too; None where there never was one."""
        row = self._db.fetch_one("select * from collection where id = ?", (collection_id,))
        return None if row is None else collection_from_row(row)

    def next_collection_id(self) -> int:
        """The id that a new collection would have now."""
        (newest,) = self._db.fetch_one("select coalesce(max(id), 0) from collection")
        return max(int(newest), self._floor()) + 1

    def add(self, collection: CollectionInfo) -> bool:
        """Keep a new collection; False, and nothing is kept, where its id was given meanwhile. Raises CollectionExists."""
        with self._db.transaction():
            if self._db.fetch_one("select 1 from collection where name = ? and state != 'dropped'", (collection.name,)):
                raise CollectionExists(f"a collection {collection.name!r} exists already")
            if collection.id != self.next_collection_id():
                return False
            self._db.execute("insert into collection values (?, ?, ?, ?, ?, ?, ?)", _row(collection))
            return True

    def restore_collection(self, collection: CollectionInfo) -> bool:
        """Have a collection again that the catalog lost, or takes for dropped, under its own id; whether it was so. One that is known,
        or has a broadcast under way, is left as it is."""
        with self._db.transaction():
            known = self.find_collection(collection.id)
            if known is not None and (known.state != "dropped" or collection.state == "dropped"):
                return False
            if any(task.collection_id == collection.id for task in self.broadcasts.open_tasks()):
                return False
            self._db.execute("insert or replace into collection values (?, ?, ?, ?, ?, ?, ?)", _row(collection))
            return True

    def update_collection(self, collection: CollectionInfo) -> None:
        """Make the entry of a collection that is there what `collection` says; ids of partitions are never given again."""
        with self._db.transaction():
            self._db.execute(
                "update collection set state = ?, schemas = ?, partitions = ?, next_partition = max(next_partition, ?)"
                " where id = ?",
                (collection.state, *_definition(collection), collection.next_partition, collection.id),
            )

    def is_unchanged(self, seen: CollectionInfo) -> bool:
        """Whether the collection is as it was `seen`; which ids of partitions were given makes no difference."""
        now = self.find_collection(seen.id)
        return now is not None and replace(now, next_partition=seen.next_partition) == seen

    def is_settled(self, seen: CollectionInfo) -> bool:
        """Whether the collection is as it was `seen`, and no broadcast of it is under way."""
        with self._db.transaction():
            under_way = any(task.collection_id == seen.id for task in self.broadcasts.open_tasks())
            return not under_way and self.is_unchanged(seen)

    def update_if_settled(self, seen: CollectionInfo, there: CollectionInfo) -> bool:
        """Make the catalog's entry what the chain has, where it is still as it was `seen`; whether it was."""
        with self._db.transaction():
            if not self.is_settled(seen):
                return False
            self.update_collection(there)
            return True

    def allocate_partition_id(self, collection_id: int) -> int:
        """A partition id that was never given before."""
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
    """The columns of a collection, in the table's order."""
    named = (collection.id, collection.name, collection.state, json.dumps(collection.vchannels))
    return (*named, *_definition(collection), collection.next_partition)
