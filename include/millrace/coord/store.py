"""What the coordinator must not forget: PChannels with their terms, collections, broadcasts. One SQLite file, synced.

SQLite gives what is needed and no more: transactions that survive kill -9 and power loss (`synchronous=FULL`), and several
processes of one machine that write in turn. Nothing about rows or positions stands here: the truth about those is the WAL.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

from millrace.base.closing import Closing
from millrace.base.errors import CollectionExists, CollectionNotFound, ProducerFenced
from millrace.catalog.collection import Collection, CollectionState, PChannel, pchannel_of
from millrace.catalog.records import collection_of, collections_in, look
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
create table if not exists trouble (
    broadcast_id integer primary key references broadcast, at_ms integer not null, words text not null);
"""

_TABLE: Final = re.compile(r"create table if not exists (\w+) ([^;]+);")

_ID_EPOCH: Final = 1_577_836_800
"""2020, in Unix seconds: ids of broadcasts go up with the clock from there on, and fit into 31 bits until 2088."""
MAX_ABANDONED: Final = 100
"""Abandoned broadcasts whose reason is kept."""
MAX_WORDS: Final = 1_000


DdlKind: TypeAlias = Literal[
    "create_collection", "drop_collection", "create_partition", "drop_partition", "schema_change", "manual_flush"
]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One DDL message on its way to all VChannels of a collection. `change` is what its end does to the catalog."""

    id: int
    collection_id: int
    kind: DdlKind
    change: dict[str, Any]
    waiting: tuple[tuple[str, str], ...]
    """(VChannel, PChannel) of the targets that have not acknowledged."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A broadcast that waits, or was given up: `words` say why ("" where it is only under way)."""

    collection: str
    kind: DdlKind
    at_ms: int
    """When `words` were written; 0 where there are none."""
    words: str
    abandoned: bool


Check: TypeAlias = Callable[[Broadcast, Collection], None]
"""Raises where a broadcast's messages cannot be made: then nothing of it is kept."""


class Store(Closing):
    """The coordinator's file. Thread-safe: one connection, one caller at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=full")
        self._db.executescript(_SCHEMA)

    @classmethod
    def to_look(cls, data_dir: Path) -> Self | None:
        """The file of a deployment, of which nothing is changed; None where no coordinator was at work yet."""
        db = look(data_dir)
        if db is None:
            return None
        store = cls.__new__(cls)
        store._lock, store._db = threading.RLock(), db
        there = {name for (name,) in db.execute("select name from sqlite_master")}
        for name, columns in _TABLE.findall(_SCHEMA):
            if name not in there:  # a file of an earlier build: the table is empty, in this connection alone
                db.execute(f"create temp table {name} {columns}")
        return store

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
        with self._lock:
            return collections_in(self._db, dropped=dropped)

    def collection(self, name: str) -> Collection:
        """The collection called `name`. Raises CollectionNotFound."""
        row = self._row("select * from collection where name = ? and state != 'dropped'", (name,))
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
        row = self._row("select * from collection where id = ?", (collection_id,))
        return None if row is None else collection_of(row)

    def settled(self, seen: Collection) -> bool:
        """Whether the collection is as it was `seen`, and no broadcast of it is under way."""
        pending = self._row("select 1 from broadcast where collection_id = ? and not done", (seen.id,))
        now = self.known(seen.id)
        return pending is None and now is not None and replace(now, next_partition=seen.next_partition) == seen

    def follow(self, seen: Collection, there: Collection) -> bool:
        """Make the catalog's entry what the chain has, where it is still as it was `seen`; whether it was."""
        with self.transaction():
            if not self.settled(seen):
                return False
            self._db.execute(
                "update collection set state = ?, schemas = ?, partitions = ?, next_partition = max(next_partition, ?)"
                " where id = ?",
                (
                    there.state,
                    json.dumps([schema.to_json() for schema in there.schemas]),
                    json.dumps(there.partitions),
                    there.next_partition,
                    there.id,
                ),
            )
            return True

    def add_collection(
        self,
        name: str,
        schema: CollectionSchema,
        *,
        vchannels: int,
        partitions: list[str],
        pchannels: list[str],
        check: Check | None = None,
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
            return self._insert_broadcast(self.collection(name), "create_collection", {}, check)

    def take_partition_id(self, collection_id: int) -> int:
        """A partition id that was never given before."""
        with self.transaction():
            self._db.execute("update collection set next_partition = next_partition + 1 where id = ?", (collection_id,))
            row = self._row("select next_partition - 1 from collection where id = ?", (collection_id,))
            taken: int = row[0]
        return taken

    # -- broadcasts ---------------------------------------------------------------------------------------------------

    def add_broadcast(self, seen: Collection, kind: DdlKind, change: dict[str, Any], check: Check) -> Broadcast | None:
        """Keep a broadcast to all VChannels of a collection before its first message is appended.

        None, and nothing is kept, where the collection is not as it was `seen` any more or another broadcast of it is
        under way: a collection's broadcasts come one after the other, whoever makes them.
        """
        with self.transaction():
            if not self.settled(seen):
                return None
            if kind == "drop_collection":
                self._set_state(seen.id, "dropping")
            return self._insert_broadcast(seen, kind, change, check)

    def _insert_broadcast(
        self, collection: Collection, kind: DdlKind, change: dict[str, Any], check: Check | None
    ) -> Broadcast:
        # Also above what a copy of this file that is newer than it can have given: the log has seen those.
        (newest,) = self._row("select coalesce(max(id), 0) from broadcast")
        number = max(newest + 1, int(time.time()) - _ID_EPOCH)
        targets = tuple((vchannel, pchannel_of(vchannel)) for vchannel in collection.vchannels)
        broadcast = Broadcast(number, collection.id, kind, change, targets)
        if check is not None:
            check(broadcast, collection)
        self._db.execute(
            "insert into broadcast (id, collection_id, kind, change) values (?, ?, ?, ?)",
            (number, collection.id, kind, json.dumps(change)),
        )
        self._db.executemany(
            "insert into target (broadcast_id, vchannel, pchannel) values (?, ?, ?)",
            [(number, *target) for target in targets],
        )
        self._db.execute("delete from begun where broadcast_id in (select id from broadcast where done)")
        self._db.execute("insert into begun values (?, ?)", (number, time.time()))
        return broadcast

    def _set_state(self, collection_id: int, state: CollectionState) -> None:
        self._db.execute("update collection set state = ? where id = ?", (state, collection_id))

    def abandon(self, broadcast: Broadcast, words: str) -> Broadcast | None:
        """It cannot be completed: close the broadcast without its change, and keep why.

        A collection that cannot be created is dropped where it was made: the broadcast that does so.
        """
        with self.transaction():
            (done,) = self._row("select done from broadcast where id = ?", (broadcast.id,))
            if done:
                return None
            self._db.execute("update broadcast set done = 1 where id = ?", (broadcast.id,))
            self._note(broadcast, words)
            self._db.execute(
                "delete from trouble where broadcast_id not in (select id from broadcast where not done)"
                " and broadcast_id not in (select broadcast_id from trouble order by broadcast_id desc limit ?)",
                (MAX_ABANDONED,),
            )
            if broadcast.kind == "drop_collection":
                self._set_state(broadcast.collection_id, "active")
            if broadcast.kind != "create_collection":
                return None
            self._set_state(broadcast.collection_id, "dropping")
            collection = self.collection_by_id(broadcast.collection_id)
            return self._insert_broadcast(collection, "drop_collection", {}, None)

    def note(self, broadcast: Broadcast, words: str) -> None:
        """Keep why a broadcast waits, for people to see."""
        with self.transaction():
            self._note(broadcast, words)

    def _note(self, broadcast: Broadcast, words: str) -> None:
        self._db.execute(
            "insert or replace into trouble values (?, ?, ?)",
            (broadcast.id, time.time_ns() // 1_000_000, words[:MAX_WORDS].encode("utf-8", "replace").decode()),
        )

    def troubles(self) -> list[Trouble]:
        """Broadcasts that are not done, and those that were given up, the oldest first."""
        rows = self._rows(
            "select c.name, b.kind, coalesce(t.at_ms, 0), coalesce(t.words, ''), b.done from broadcast b"
            " join collection c on c.id = b.collection_id left join trouble t on t.broadcast_id = b.id"
            " where not b.done or t.words is not null order by b.id"
        )
        return [Trouble(name, kind, at_ms, words, bool(done)) for name, kind, at_ms, words, done in rows]

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
            "update target set acked = 1, time_tick = max(time_tick, ?) where broadcast_id = ? and vchannel = ?",
            (time_tick, broadcast_id, vchannel),
        )

    def finish(self, broadcast: Broadcast) -> dict[str, int]:
        """All targets have it: change the catalog and close the broadcast, in one transaction; its tick by VChannel."""
        with self.transaction():
            (done,) = self._row("select done from broadcast where id = ?", (broadcast.id,))
            if not done:
                self._apply(broadcast)
                self._db.execute("update broadcast set done = 1 where id = ?", (broadcast.id,))
                self._db.execute("delete from trouble where broadcast_id = ?", (broadcast.id,))
            rows = self._rows("select vchannel, time_tick from target where broadcast_id = ?", (broadcast.id,))
        return dict(rows)

    def outcome(self, broadcast: Broadcast) -> tuple[bool, str]:
        """Whether a broadcast is closed, and why it was given up ("" where it was not)."""
        (done,) = self._row("select done from broadcast where id = ?", (broadcast.id,))
        trouble = self._row("select words from trouble where broadcast_id = ?", (broadcast.id,))
        return bool(done), trouble[0] if done and trouble else ""

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
