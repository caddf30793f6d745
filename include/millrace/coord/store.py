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

from millrace.base.closing import Closing
from millrace.base.errors import CollectionExists, CollectionNotFound, InvalidArgument, InvalidSettings, ProducerFenced
from millrace.catalog.collection import Collection, PChannel
from millrace.catalog.records import collection_of, collections_in
from millrace.coord.broadcast.kept import Kept
from millrace.coord.database import Database, Shared

_YEAR_2026: Final = 1_767_225_600
"""Seconds since then are numbers that no deployment reaches by counting, and that fit an epoch (32 bits) until 2094."""
KEPT_ANSWERS: Final = 10_000
"""Newest requests for a term or an epoch whose answers are kept for who asks again."""


class Store(Closing):
    """The coordinator's file. Thread-safe."""

    def __init__(self, path: Path, *, shared: Shared | None = None) -> None:
        """`shared`: what the file is a copy of."""
        self._on(Database(path, shared=shared))

    def _on(self, database: Database) -> None:
        self._db = database
        self.transaction = database.transaction
        self.broadcasts = Kept(database)

    @classmethod
    def to_look(cls, data_dir: Path) -> Self | None:
        """The file of a deployment, of which nothing is changed; None where no coordinator was at work yet."""
        database = Database.to_look(data_dir)
        if database is None:
            return None
        store = cls.__new__(cls)
        store._on(database)
        return store

    def close(self) -> None:
        self._db.close()

    def require_own(self) -> None:
        """Raises InvalidSettings where the file is a copy: whoever wrote to it alone would be lost to the others."""
        if self._db.row("select 1 from shared where revision > 0") is not None:
            raise InvalidSettings(
                "this deployment's catalog lies in a meta store, and coord/coord.db is a copy of it: set MILLRACE_META_STORE as it was"
                " (docs/coordinator.md#the-catalog: how to go on without)"
            )

    def give_above(self, floor: int) -> None:
        """From now on epochs of producers, ids of collections and of partitions are greater than `floor`: a catalog that was restored
        knows nothing of those that were given since, and who was given them may still hold rows that are stamped so (a spool)."""
        with self._db.transaction():
            self._db.rows("insert into restored values (?)", (floor,))

    def give_no_more(self) -> None:
        """No id or epoch that was given until now, and that this catalog may have forgotten, is given again."""
        self.give_above(max(0, int(time.time()) - _YEAR_2026))

    def _floor(self) -> int:
        return int(self._db.row("select coalesce(max(floor), 0) from restored")[0])

    # -- PChannels ----------------------------------------------------------------------------------------------------

    def pchannels(self) -> list[PChannel]:
        """All PChannels, in the order of their names."""
        rows = self._db.rows("select name, term, opened from pchannel order by name")
        return [PChannel(name, term, bool(opened)) for name, term, opened in rows]

    def term(self, name: str) -> int:
        """The newest term of a PChannel. Raises InvalidArgument for one that is not there."""
        row = self._db.row("select term from pchannel where name = ?", (name,))
        if row is None:
            raise InvalidArgument(f"no PChannel {name!r}")
        return int(row[0])

    def next_term(self, name: str) -> int:
        """Count the term of `name` up (from 0 where it is new) and keep that before anybody uses it."""
        with self._db.transaction():
            self._db.rows(
                "insert into pchannel values (?, 1, 0) on conflict (name) do update set term = term + 1, opened = 0",
                (name,),
            )
            term: int = self._db.row("select term from pchannel where name = ?", (name,))[0]
        return term

    def keep_term(self, name: str, term: int) -> None:
        """Know the PChannel `name`, of which the log has `term`, opened."""
        with self._db.transaction():
            self._db.rows(
                "insert into pchannel values (?, ?, 1) on conflict (name) do update set opened = (term <= excluded.term),"
                " term = max(term, excluded.term)",
                (name, term),
            )

    def term_opened(self, name: str, term: int, *, request: str = "") -> None:
        """The opening of `term` was acknowledged (no effect where a newer term exists); what `request` is answered from now on."""
        with self._db.transaction():
            self._db.rows("update pchannel set opened = 1 where name = ? and term = ?", (name, term))
            self._answer(request, name, term)

    # -- producers ----------------------------------------------------------------------------------------------------

    def next_epoch(self, producer_id: int, *, held: int | None = None, request: str = "") -> int:
        """The next epoch of a producer, from 1: kept before it is used, so that no epoch is ever given twice, but to a `request` that
        is made again.

        With `held`, the newest epoch that the caller was given: raises ProducerFenced where somebody took a newer one since.
        """
        with self._db.transaction():
            if request and (answered := self.answered(request, f"{producer_id}")) is not None:
                return answered
            if held is not None:
                newest = self._db.row("select epoch from producer where id = ?", (producer_id,))
                if newest is not None and newest[0] != held:
                    raise ProducerFenced(
                        f"producer {producer_id} runs epoch {newest[0]} elsewhere, and this one has epoch {held}: close it"
                    )
            floor = self._floor()
            self._db.rows(
                "insert into producer values (?, ? + 1) on conflict (id) do update set epoch = max(epoch, ?) + 1",
                (producer_id, floor, floor),
            )
            epoch: int = self._db.row("select epoch from producer where id = ?", (producer_id,))[0]
            self._answer(request, f"{producer_id}", epoch)
        return epoch

    # -- requests -----------------------------------------------------------------------------------------------------

    def answered(self, request: str, of: str) -> int | None:
        """What the request of that name was answered, a term of the PChannel `of` or an epoch of that producer; None where it is not
        known. Raises InvalidArgument where it was another one's."""
        row = self._db.row("select of, answer from answered where name = ?", (request,))
        if row is not None and row[0] != of:
            raise InvalidArgument(f"the request {request!r} was another one's, of {row[0]}: give each its own name")
        return None if row is None else int(row[1])

    def _answer(self, request: str, of: str, answer: int) -> None:
        if request:
            self._db.rows(
                "insert into answered (name, of, answer) values (?, ?, ?) on conflict do nothing", (request, of, answer)
            )
            self._db.rows("delete from answered where id <= (select max(id) from answered) - ?", (KEPT_ANSWERS,))

    # -- collections --------------------------------------------------------------------------------------------------

    def collections(self, *, dropped: bool = False) -> list[Collection]:
        """Collections by name; with `dropped` those too that are gone."""
        return self._db.whole(partial(collections_in, dropped=dropped))

    def collection(self, name: str) -> Collection:
        """The collection called `name`. Raises CollectionNotFound."""
        row = self._db.row("select * from collection where name = ? and state != 'dropped'", (name,))
        if row is None:
            raise CollectionNotFound(f"no collection {name!r}; `millrace collections list` shows those there are")
        return collection_of(row)

    def collection_by_id(self, collection_id: int) -> Collection:
        """A collection by its id, a dropped one too. Raises CollectionNotFound."""
        found = self.known(collection_id)
        if found is None:
            raise CollectionNotFound(f"no collection with the id {collection_id}")
        return found

    def known(self, collection_id: int) -> Collection | None:
        """A collection by its id, a dropped one too; None where there never was one."""
        row = self._db.row("select * from collection where id = ?", (collection_id,))
        return None if row is None else collection_of(row)

    def next_collection(self) -> int:
        """The id that a new collection would have now."""
        (newest,) = self._db.row("select coalesce(max(id), 0) from collection")
        return max(int(newest), self._floor()) + 1

    def add(self, collection: Collection) -> bool:
        """Keep a new collection; False, and nothing is kept, where its id was given meanwhile. Raises CollectionExists."""
        with self._db.transaction():
            if self._db.row("select 1 from collection where name = ? and state != 'dropped'", (collection.name,)):
                raise CollectionExists(f"a collection {collection.name!r} exists already")
            if collection.id != self.next_collection():
                return False
            self._db.rows("insert into collection values (?, ?, ?, ?, ?, ?, ?)", _row(collection))
            return True

    def put_back(self, collection: Collection) -> bool:
        """Have a collection again that the catalog lost, or takes for dropped, under its own id; whether it was so. One that is known,
        or has a broadcast under way, is left as it is."""
        with self._db.transaction():
            known = self.known(collection.id)
            if known is not None and (known.state != "dropped" or collection.state == "dropped"):
                return False
            if any(task.collection_id == collection.id for task in self.broadcasts.open()):
                return False
            self._db.rows("insert or replace into collection values (?, ?, ?, ?, ?, ?, ?)", _row(collection))
            return True

    def change(self, collection: Collection) -> None:
        """Make the entry of a collection that is there what `collection` says; ids of partitions are never given again."""
        with self._db.transaction():
            self._db.rows(
                "update collection set state = ?, schemas = ?, partitions = ?, next_partition = max(next_partition, ?)"
                " where id = ?",
                (collection.state, *_definition(collection), collection.next_partition, collection.id),
            )

    def unchanged(self, seen: Collection) -> bool:
        """Whether the collection is as it was `seen`; which ids of partitions were given makes no difference."""
        now = self.known(seen.id)
        return now is not None and replace(now, next_partition=seen.next_partition) == seen

    def settled(self, seen: Collection) -> bool:
        """Whether the collection is as it was `seen`, and no broadcast of it is under way."""
        with self._db.transaction():
            under_way = any(task.collection_id == seen.id for task in self.broadcasts.open())
            return not under_way and self.unchanged(seen)

    def follow(self, seen: Collection, there: Collection) -> bool:
        """Make the catalog's entry what the chain has, where it is still as it was `seen`; whether it was."""
        with self._db.transaction():
            if not self.settled(seen):
                return False
            self.change(there)
            return True

    def take_partition_id(self, collection_id: int) -> int:
        """A partition id that was never given before."""
        with self._db.transaction():
            self._db.rows(
                "update collection set next_partition = max(next_partition, ? + 1) + 1 where id = ?",
                (self._floor(), collection_id),
            )
            row = self._db.row("select next_partition - 1 from collection where id = ?", (collection_id,))
            taken: int = row[0]
        return taken


def _definition(collection: Collection) -> tuple[str, str]:
    return json.dumps([schema.to_json() for schema in collection.schemas]), json.dumps(collection.partitions)


def _row(collection: Collection) -> tuple[object, ...]:
    """The columns of a collection, in the table's order."""
    named = (collection.id, collection.name, collection.state, json.dumps(collection.vchannels))
    return (*named, *_definition(collection), collection.next_partition)
