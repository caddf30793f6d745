"""What the coordinator must not forget: PChannels with their terms, collections, broadcasts. One SQLite file, synced.

SQLite gives what is needed and no more: transactions that survive kill -9 and power loss (`synchronous=FULL`), and several
processes of one machine that write in turn. Nothing about rows or positions stands here: the truth about those is the WAL.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from millrace.errors import CollectionExists, CollectionNotFound, ProducerFenced
from millrace.message.schema import CollectionSchema

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
"""


@dataclass(frozen=True, slots=True)
class PChannel:
    """A PChannel of the deployment; `opened` says whether the opening of its newest term was acknowledged."""

    name: str
    term: int
    opened: bool


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection as the coordinator knows it. `state` is creating, active, dropping or dropped."""

    id: int
    name: str
    state: str
    vchannels: tuple[str, ...]
    schemas: tuple[CollectionSchema, ...]
    """Version v is schemas[v - 1]."""
    partitions: dict[str, int]
    next_partition: int

    @property
    def schema(self) -> CollectionSchema:
        return self.schemas[-1]

    @property
    def schema_version(self) -> int:
        return len(self.schemas)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One DDL message on its way to all VChannels of a collection. `change` is what its end does to the catalog."""

    id: int
    collection_id: int
    kind: str
    change: dict[str, Any]
    waiting: tuple[tuple[str, str], ...]
    """(VChannel, PChannel) of the targets that have not acknowledged."""


def pchannel_of(vchannel: str) -> str:
    """The PChannel in a VChannel's name, ``<pchannel>_<collection id>v<n>``."""
    return vchannel.rpartition("_")[0]


class Store:
    """The coordinator's file. Thread-safe: one connection, one caller at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=full")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, durable at its end; writers of other processes wait."""
        with self._lock:
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")

    def _rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    def _row(self, statement: str, values: tuple[Any, ...] = ()) -> Any:
        """The first row, or None."""
        return next(iter(self._rows(statement, values)), None)

    # -- PChannels ----------------------------------------------------------------------------------------------------

    def pchannels(self) -> list[PChannel]:
        """All PChannels, in the order of their names."""
        rows = self._rows("select name, term, opened from pchannel order by name")
        return [PChannel(name, term, bool(opened)) for name, term, opened in rows]

    def next_term(self, name: str) -> int:
        """Count the term of `name` up (from 0 where it is new) and keep that before anybody uses it."""
        with self.transaction():
            self._db.execute(
                "insert into pchannel values (?, 1, 0) on conflict (name) do update set term = term + 1, opened = 0",
                (name,),
            )
            term: int = self._row("select term from pchannel where name = ?", (name,))[0]
        return term

    def term_opened(self, name: str, term: int) -> None:
        """The opening of `term` was acknowledged (no effect where a newer term exists)."""
        self._rows("update pchannel set opened = 1 where name = ? and term = ?", (name, term))

    # -- producers ----------------------------------------------------------------------------------------------------

    def next_epoch(self, producer_id: int, *, held: int | None = None) -> int:
        """The next epoch of a producer, from 1: kept before it is used, so that no epoch is ever given twice.

        With `held`, the newest epoch that the caller was given: raises ProducerFenced where somebody took a newer one since.
        """
        with self.transaction():
            if held is not None:
                newest = self._row("select epoch from producer where id = ?", (producer_id,))
                if newest is not None and newest[0] != held:
                    raise ProducerFenced(
                        f"producer {producer_id} runs epoch {newest[0]} elsewhere, and this one has epoch {held}: close it"
                    )
            self._db.execute(
                "insert into producer values (?, 1) on conflict (id) do update set epoch = epoch + 1", (producer_id,)
            )
            epoch: int = self._row("select epoch from producer where id = ?", (producer_id,))[0]
        return epoch

    # -- collections --------------------------------------------------------------------------------------------------

    def collections(self, *, dropped: bool = False) -> list[Collection]:
        """Collections by name; with `dropped` those too that are gone."""
        where = "" if dropped else "where state != 'dropped'"
        return [_collection(row) for row in self._rows(f"select * from collection {where} order by name, id")]

    def collection(self, name: str) -> Collection:
        """The collection called `name`. Raises CollectionNotFound."""
        row = self._row("select * from collection where name = ? and state != 'dropped'", (name,))
        if row is None:
            raise CollectionNotFound(f"no collection {name!r}; `millrace collections list` shows those there are")
        return _collection(row)

    def collection_by_id(self, collection_id: int) -> Collection:
        """A collection by its id, a dropped one too. Raises CollectionNotFound."""
        row = self._row("select * from collection where id = ?", (collection_id,))
        if row is None:
            raise CollectionNotFound(f"no collection with the id {collection_id}")
        return _collection(row)

    def add_collection(
        self, name: str, schema: CollectionSchema, *, vchannels: int, partitions: list[str], pchannels: list[str]
    ) -> Broadcast:
        """Keep a new collection (state creating) and the broadcast that creates it. Raises CollectionExists."""
        with self.transaction():
            taken = self._row("select 1 from collection where name = ? and state != 'dropped'", (name,))
            if taken:
                raise CollectionExists(f"a collection {name!r} exists already")
            (newest,) = self._db.execute("select coalesce(max(id), 0) from collection").fetchone()
            names = [f"{pchannels[k % len(pchannels)]}_{newest + 1}v{k}" for k in range(vchannels)]
            ids = {partition: number for number, partition in enumerate(partitions, start=1)}
            self._db.execute(
                "insert into collection values (?, ?, 'creating', ?, ?, ?, ?)",
                (newest + 1, name, json.dumps(names), json.dumps([schema.to_json()]), json.dumps(ids), len(ids) + 1),
            )
            return self._insert_broadcast(self.collection(name), "create_collection", {})

    def take_partition_id(self, collection_id: int) -> int:
        """A partition id that was never given before."""
        with self.transaction():
            self._db.execute("update collection set next_partition = next_partition + 1 where id = ?", (collection_id,))
            row = self._row("select next_partition - 1 from collection where id = ?", (collection_id,))
            taken: int = row[0]
        return taken

    # -- broadcasts ---------------------------------------------------------------------------------------------------

    def add_broadcast(self, collection: Collection, kind: str, change: dict[str, Any]) -> Broadcast:
        """Keep a broadcast to all VChannels of `collection` before its first message is appended."""
        with self.transaction():
            return self._insert_broadcast(collection, kind, change)

    def _insert_broadcast(self, collection: Collection, kind: str, change: dict[str, Any]) -> Broadcast:
        number = self._db.execute(
            "insert into broadcast (collection_id, kind, change) values (?, ?, ?)",
            (collection.id, kind, json.dumps(change)),
        ).lastrowid
        targets = [(number, vchannel, pchannel_of(vchannel)) for vchannel in collection.vchannels]
        self._db.executemany("insert into target (broadcast_id, vchannel, pchannel) values (?, ?, ?)", targets)
        assert number is not None
        self._db.execute("delete from begun where broadcast_id in (select id from broadcast where done)")
        self._db.execute("insert into begun values (?, ?)", (number, time.time()))
        return Broadcast(number, collection.id, kind, change, tuple(target[1:] for target in targets))

    def abandon(self, broadcast: Broadcast) -> Broadcast | None:
        """A target refused for good: close the broadcast without its change.

        A collection that cannot be created is dropped where it was: the broadcast that does so.
        """
        with self.transaction():
            self._db.execute("update broadcast set done = 1 where id = ?", (broadcast.id,))
            if broadcast.kind != "create_collection":
                return None
            self._db.execute("update collection set state = 'dropping' where id = ?", (broadcast.collection_id,))
            collection = self.collection_by_id(broadcast.collection_id)
            return self._insert_broadcast(collection, "drop_collection", {})

    def broadcasts(self) -> list[Broadcast]:
        """Broadcasts that are not done, the oldest first."""
        rows = self._rows("select id, collection_id, kind, change from broadcast where not done order by id")
        return [
            Broadcast(number, collection_id, kind, json.loads(change), tuple(self._waiting(number)))
            for number, collection_id, kind, change in rows
        ]

    def under_way(self) -> list[tuple[str, str, float]]:
        """Collection, kind and begin (Unix seconds; 0.0: an earlier version began it) of each broadcast that is not done."""
        rows = self._rows(
            "select name, kind, coalesce(at, 0.0) from broadcast join collection on collection.id = collection_id"
            " left join begun on broadcast_id = broadcast.id where not done order by broadcast.id"
        )
        return [(name, kind, at) for name, kind, at in rows]

    def _waiting(self, number: int) -> list[tuple[str, str]]:
        return self._rows(
            "select vchannel, pchannel from target where broadcast_id = ? and not acked order by vchannel", (number,)
        )

    def acked(self, broadcast_id: int, vchannel: str, time_tick: int) -> None:
        """The message took effect on `vchannel` at `time_tick`."""
        self._rows(
            "update target set acked = 1, time_tick = ? where broadcast_id = ? and vchannel = ?",
            (time_tick, broadcast_id, vchannel),
        )

    def finish(self, broadcast: Broadcast) -> dict[str, int]:
        """All targets have it: change the catalog and close the broadcast, in one transaction; its tick by VChannel."""
        with self.transaction():
            (done,) = self._row("select done from broadcast where id = ?", (broadcast.id,))
            if not done:
                self._apply(broadcast)
                self._db.execute("update broadcast set done = 1 where id = ?", (broadcast.id,))
            rows = self._rows("select vchannel, time_tick from target where broadcast_id = ?", (broadcast.id,))
        return dict(rows)

    def _apply(self, broadcast: Broadcast) -> None:
        collection, change = self.collection_by_id(broadcast.collection_id), broadcast.change
        values: dict[str, Any] = {}
        match broadcast.kind:
            case "create_collection":
                values["state"] = "active"
            case "drop_collection":
                values["state"] = "dropped"
            case "create_partition":
                values["partitions"] = json.dumps({**collection.partitions, change["name"]: change["id"]})
            case "drop_partition":
                left = {name: number for name, number in collection.partitions.items() if number != change["id"]}
                values["partitions"] = json.dumps(left)
            case "schema_change":
                schemas = [schema.to_json() for schema in collection.schemas]
                values["schemas"] = json.dumps([*schemas, change["schema"]])
            case _:
                return
        for column, value in values.items():
            self._db.execute(f"update collection set {column} = ? where id = ?", (value, collection.id))


def _collection(row: tuple[Any, ...]) -> Collection:
    number, name, state, vchannels, schemas, partitions, next_partition = row
    return Collection(
        id=number,
        name=name,
        state=state,
        vchannels=tuple(json.loads(vchannels)),
        schemas=tuple(CollectionSchema.from_json(schema) for schema in json.loads(schemas)),
        partitions=json.loads(partitions),
        next_partition=next_partition,
    )
