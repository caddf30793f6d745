"""A small real deployment with one of everything that the read model shows: rows, deletes, transactions, rejections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message import builders
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.node.flush import definition as flusher_run
from millrace.node.ingest.definition import ingest_to_end

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'
SCHEMA = CollectionSchema(
    (FieldSpec("id", "int64", False), FieldSpec("name", "string", True), FieldSpec("at", "timestamp", True)),
    primary_key="id",
    event_time="at",
)


@dataclass
class World:
    """The deployment, its client, and what was written."""

    settings: Settings
    client: Database
    users: CollectionInfo

    def rows(self, start: int, stop: int, *, name: str = "n") -> Any:
        """Rows of ``users``."""
        ids = list(range(start, stop))
        return pa.table({"id": ids, "name": [f"{name}{number}" for number in ids], "at": [None] * len(ids)})

    def reject(self, count: int, *, pchannel: str = "dml_0") -> None:
        """Messages on a VChannel that is not there, each in an entry of its own, and one entry of junk."""
        message = builders.create_partition(
            HOSTILE, vchannel=f"{pchannel}_99v0", collection_id=99, partition_id=7, term=self.term
        )
        for _ in range(count):
            self.client.connection.append(pchannel, [encode_entry([message])])

    @property
    def term(self) -> int:
        return self.client.catalog.term("dml_0")

    def settle(self, *, flush: bool = True) -> None:
        """What the streaming node, and with `flush` the flusher, would do until nothing is left."""
        ingest_to_end(self.settings, self.client.log)
        if flush:
            flusher_run.flush_to_end(self.settings)


def make_world(settings: Settings) -> World:
    """Users with two VChannels: 200 rows, 20 of them deleted; three transactions; rejections with hostile text."""
    client = connect(settings=settings)
    client.catalog.ensure_pchannels(2)
    client.catalog.create_collection("users", SCHEMA, vchannels=2, partitions=["_default"])
    world = World(settings, client, client.definition("users"))
    producer = client.new_producer()
    producer.insert(world.users, world.rows(0, 100))
    producer.insert(world.users, pa.table({"id": [500], "name": [HOSTILE], "at": [None]}))
    world.settle()
    client.catalog.flush("users")
    producer.insert(world.users, world.rows(100, 200))
    producer.delete(world.users, list(range(20)))
    with producer.transaction(world.users) as txn:
        txn.insert(home_rows(world, 1000, 3))
    try:
        with producer.transaction(world.users) as txn:
            txn.insert(home_rows(world, 2000, 3))
            raise InterruptedError
    except InterruptedError:
        pass
    name = world.users.vchannels[0]
    producer.send([builders.begin_txn(77, vchannel=name, collection_id=world.users.id, term=0, keepalive_ms=600_000)])
    world.reject(5)
    tick = encode_entry([builders.time_tick(term=1)])
    client.connection.append("dml_1", [tick[:-1] + b"?"])  # framed as an entry, with another checksum
    for pchannel in ("dml_0", "dml_1"):
        client.connection.tick(pchannel)  # so that reads reach past the transaction on both
    world.settle()
    return world


def home_rows(world: World, start: int, count: int) -> Any:
    """Rows whose keys are at home on the collection's first VChannel."""
    from millrace.message.keys import vchannel_index

    ids = pa.array(range(start, start + 200), pa.int64())
    mine = ids.filter(pa.array(vchannel_index(ids, len(world.users.vchannels)) == 0)).slice(0, count)
    return pa.table({"id": mine, "name": [HOSTILE] * count, "at": pa.nulls(count, pa.timestamp("us", tz="UTC"))})


def close_world(world: World) -> None:
    """Stop the log's server and let go of the client."""
    world.client.connection.service.shutdown()
    world.client.close()
