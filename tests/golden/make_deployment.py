"""Makes the golden deployment and what is known of it: ``python -m tests.golden.make_deployment <empty folder>``.

Not to be run again over an archive that is there: the archive holds what a released build wrote, and later builds must
open it. (Tests make a deployment of their own build by the same hand, to flip its bytes.) Where formats grow (a new
field, a new table), make another one beside it, ``deployment-2``, with the build that wrote them.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import tarfile
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

import millrace
from millrace.base.errors import AppendRejected, ChannelParked, LogUnavailable, MillraceError, TickTooOld
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database
from millrace.client.produce.producer import Producer
from millrace.client.spool.sender import SpoolSender
from millrace.coord.switch_log import LogSwitch
from millrace.log.protocol import LogService
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.keys import vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.wire.encode import encode_entry
from millrace.msgstream.channels import CreateChannelRequest, DestroyChannelRequest, MsgChannels, OwnerDescription
from millrace.msgstream.stream import LogMsgStream
from millrace.msgstream.tick_stream import LogTtMsgStream
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.range_loop.failure import RangeFailure
from millrace.node.range_loop.parking import Parked, park
from millrace.operations.backfill.declaration import LoadParams
from millrace.operations.backfill.load import run as load_files
from millrace.operations.backup.declaration import BackupParams
from millrace.operations.backup.run import backup
from millrace.operations.checkpoint.declaration import CheckpointParams
from millrace.operations.checkpoint.run import checkpoint
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.runtime.progress import Progress
from tests.golden.deployment import (
    ARCHIVE,
    FACTS,
    GROUP,
    STREAMS,
    WRITER,
    Server,
    of_catalog,
    of_log,
    of_positions,
    of_streams,
    of_wal,
    people_rows,
    rows,
    serving,
    settings_of,
    streams,
)
from tests.msgstream.messages import append as append_to_stream
from tests.node.log_samples import poison
from tests.operations.log_maker import Things

PEOPLE = CollectionSchema(
    (
        FieldSpec("id", "int64", False),
        FieldSpec("name", "string", False),
        FieldSpec("city", "string", True),
        FieldSpec("tags", "list<string>", True),
    ),
    "id",
)
EVERY = CollectionSchema(
    (
        FieldSpec("key", "string", False),
        FieldSpec("at", "timestamp", False),
        FieldSpec("day", "date", True),
        FieldSpec("yes", "bool", True),
        FieldSpec("small", "int8", True),
        FieldSpec("real", "float64", True),
        FieldSpec("bytes", "binary", True),
        FieldSpec("numbers", "list<int32>", True),
    ),
    "key",
    event_time="at",
)
NOTES = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("note", "string", True)), "id")
COMPACTION = CompactionParams(min_files=2, fold="always", keep_history_hours=0, vacuum_hours=24)
LEASE_MS = 600_000


class Maker:
    """The deployment that is being made, through a client of it; ticks to read at are noted on the way."""

    def __init__(self, server: Server, facts: dict[str, Any]) -> None:
        self.server = server
        self.client = client = server.client
        self.settings = client.settings
        self.facts = facts

    def up_to_date(self, *, flushed: bool = True) -> None:
        with suppress(ChannelParked):
            ingest_to_end(self.settings, self.client.log)
        if flushed:
            flush_to_end(self.settings)

    def note(self, name: str, collection: str) -> None:
        """Note what a read of a collection finds at a tick of now."""
        found = self.client.definition(collection)
        at = max(self.client.connection.tick(each) for each in {pchannel_of(vchannel) for vchannel in found.vchannels})
        for each in {pchannel_of(vchannel) for vchannel in found.vchannels}:
            self.client.connection.confirm(each, at)
        self.up_to_date(flushed=False)
        self.facts["reads"].append(
            {"what": name, "collection": found.id, "at": at, "rows": rows(self.settings, found.id, at=at)}
        )

    def append(self, pchannel: str, *messages: MutableMessage) -> None:
        """One entry, whatever the chain says of it."""
        with suppress(AppendRejected):
            self.client.connection.append(pchannel, [encode_entry(list(messages))], deadline=20.0).results()

    def switch(self, to: str) -> None:
        client = self.client

        class Host:
            def append_one(self, pchannel: str, entry: bytes) -> int:
                return client.connection.append(pchannel, [entry], deadline=20.0).result().time_tick

            def describe(self, pchannel: str) -> dict[str, Any]:
                return client.connection.describe(pchannel)

        LogSwitch(self.settings.log_path, self.settings.log, client.log, Host(), client.catalog).run(to)


def made(maker: Maker) -> None:
    """Everything that happens to the deployment, but for what needs it to stand still."""
    client, coordinator = maker.client, maker.client.catalog
    coordinator.ensure_pchannels(2)
    people = coordinator.create_collection("people", PEOPLE, vchannels=2, partitions=("eu", "us"))
    gone = coordinator.create_collection("gone", NOTES, vchannels=2)
    writer = client.new_producer(producer_id=WRITER)
    writer.insert(people, people_rows(*range(1, 11)), partition="eu")
    writer.insert(people, people_rows(*range(11, 15), city="Lima"), partition="us")
    writer.insert(gone, pa.table({"id": [1, 2, 3], "note": ["a", None, "c"]}))
    maker.note("first rows", "people")
    maker.note("of a collection that is dropped later", "gone")
    maker.up_to_date()
    writer.delete(people, [2, 3])
    writer.upsert(people, people_rows(4, 5, 20, city="Bergen"), partition="eu")
    with writer.transaction(people) as txn:
        txn.insert(people_rows(*keys_of(people, 0, (21, 40))[:2], city="Rome"), partition="us")
        txn.delete(keys_of(people, 0, (6, 15))[:1])
    with suppress(ZeroDivisionError), writer.transaction(people, vchannel=1) as txn:
        txn.insert(people_rows(*keys_of(people, 1, (40, 60))[:2], city="nowhere"), partition="us")
        raise ZeroDivisionError  # rolled back
    maker.note("deletes, an upsert, transactions", "people")
    refused(maker, people)
    maker.up_to_date()

    coordinator.alter("people", [AddField(FieldSpec("age", "int32", True))])
    people = client.definition("people")
    writer.insert(people, people_rows(61, 62, 63, age=pa.array([30, None, 50], pa.int32())), partition="us")
    coordinator.create_partition("people", "asia")
    people = client.definition("people")
    writer.insert(people, people_rows(64, 65, city="Kobe", age=pa.array([1, 2], pa.int32())), partition="asia")
    maker.note("a field and a partition more", "people")
    coordinator.drop_partition("people", "asia")
    coordinator.drop_collection("gone")
    people = client.definition("people")
    coordinator.flush("people")
    every_type(maker)
    maker.note("a partition less", "people")
    maker.up_to_date()
    compact(maker.settings, COMPACTION, history=people_tick(maker))

    loaded = maker.settings.data_dir.parent / "input.parquet"
    pq.write_table(people_rows(101, 102, 103, 104, city="Pune", age=pa.array([9] * 4, pa.int32())), loaded)
    load_files(
        maker.settings,
        LoadParams(collection="people", files=[str(loaded)], partition="eu", import_id="golden"),
        Progress(),
    )
    loaded.unlink()
    maker.note("an import", "people")

    maker.switch("rocksmq://between")
    writer.insert(people, people_rows(201, 202, 203, city="between", age=pa.nulls(3, pa.int32())), partition="eu")
    writer.delete(people, [201])
    maker.note("the log in its second backend", "people")
    maker.switch("rocksmq")
    for key in range(301, 307):
        writer.insert(people, people_rows(key, city="third", age=pa.nulls(1, pa.int32())), partition="eu")
    writer.delete(people, [301, 101])
    maker.note("the log in its third", "people")
    consumed(client)
    # Open, each on its own VChannel, when the deployment is put away: the log alone has the end of what is to come.
    for vchannel, txn in zip(people.vchannels, (901, 902), strict=True):
        opened(maker, people, vchannel, txn)
    maker.up_to_date()
    report = checkpoint(maker.settings, client.log, CheckpointParams(truncate=False), Progress())
    assert report.ok, report
    params = BackupParams.parse({"to": str(maker.settings.data_dir.parent / "backups")})
    maker.facts["backup"] = {
        "id": backup(maker.settings, client.log, params, Progress()).id,
        "catalog": of_catalog(client),
    }
    coordinator.create_collection("lone", NOTES)
    writer.insert(people, people_rows(401, 402, city="in the WAL", age=pa.nulls(2, pa.int32())), partition="us")
    maker.up_to_date(flushed=False)
    maker.note("in the WAL, not in the tables", "people")
    coordinator.ensure_pchannels(3)
    parked(maker, "dml_2")
    writer.insert(people, people_rows(501, 502, city="in the log", age=pa.nulls(2, pa.int32())), partition="us")


def keys_of(collection: CollectionInfo, number: int, bounds: tuple[int, int]) -> list[int]:
    """Keys within `bounds` whose VChannel is the collection's `number`-th."""
    keys = list(range(*bounds))
    homes = vchannel_index(pa.array(keys, pa.int64()), len(collection.vchannels)).tolist()
    return [key for key, home in zip(keys, homes, strict=True) if home == number]


def people_tick(maker: Maker) -> int:
    """A tick in the middle: deletes up to there are folded in."""
    return int(maker.facts["reads"][2]["at"])


def every_type(maker: Maker) -> None:
    every = maker.client.catalog.create_collection("every", EVERY, vchannels=1)
    values = {
        "key": ["a", "b", "\U0001f30a"],
        "at": pa.array([0, 1_700_000_000_000_000, 1_750_000_000_000_000], pa.timestamp("us", tz="UTC")),
        "day": pa.array([0, None, 20_000], pa.date32()),
        "yes": [True, False, None],
        "small": pa.array([-128, 127, None], pa.int8()),
        "real": [0.1, None, -1e300],
        "bytes": pa.array([b"", b"\x00\xff", None], pa.binary()),
        "numbers": pa.array([[1, None], [], None], pa.list_(pa.int32())),
    }
    maker.client.new_producer().insert(every, pa.table(values))
    maker.note("a value of each type", "every")


def stamps(client: Database, collection: CollectionInfo, vchannel: str) -> dict[str, Any]:
    return {
        "vchannel": vchannel,
        "collection_id": collection.id,
        "term": client.catalog.term(pchannel_of(vchannel)),
    }


def one_row(collection: CollectionInfo, key: int) -> pa.RecordBatch:
    table = people_rows(key)
    columns = [table[name].combine_chunks() for name in table.column_names]
    columns += [pa.nulls(1, field.type) for field in list(collection.schema.arrow())[len(columns) :]]
    return pa.record_batch(columns, schema=collection.schema.arrow())


def refused(maker: Maker, people: CollectionInfo) -> None:
    """What the chain rejects, and what it takes for a repeat."""
    number = 0
    vchannel = people.vchannels[number]
    pchannel = pchannel_of(vchannel)
    key, other = keys_of(people, 0, (700, 800))[0], keys_of(people, 1, (700, 800))[0]
    known = stamps(maker.client, people, vchannel)
    sent = {**known, "partition_id": people.partitions["eu"], "schema_version": people.schema_version}
    identity = {"producer_id": 99, "epoch": 1}
    first = builders.insert(one_row(people, key), **sent, **identity, sequence=0)
    maker.append(pchannel, first)
    maker.append(pchannel, first)  # a duplicate
    maker.append(pchannel, builders.insert(one_row(people, key), **sent, **identity, sequence=5))  # a gap
    maker.append(pchannel, builders.insert(one_row(people, key), **sent, producer_id=98, epoch=1, sequence=3))
    maker.append(pchannel, builders.insert(one_row(people, other), **sent))  # the other VChannel's key
    maker.append(pchannel, builders.insert(one_row(people, key), **{**sent, "term": 0}))
    maker.append(pchannel, builders.insert(one_row(people, key), **{**sent, "term": 77}))
    maker.append(pchannel, builders.insert(one_row(people, key), **{**sent, "partition_id": 4711}))
    maker.append(pchannel, builders.insert(one_row(people, key), **{**sent, "schema_version": 9}))
    maker.append(pchannel, builders.commit_txn(4711, **known))
    maker.append(pchannel, builders.drop_partition(partition_id=4711, **known))
    maker.server.put_below(pchannel, [b"no entry at all", encode_entry([first])[:-1]])
    maker.client.connection.tick(pchannel)


def opened(maker: Maker, people: CollectionInfo, vchannel: str, txn: int) -> None:
    """A transaction that is open, with a row in it."""
    known = stamps(maker.client, people, vchannel)
    key = keys_of(people, people.vchannels.index(vchannel), (800, 900))[0]
    maker.append(pchannel_of(vchannel), builders.begin_txn(txn, keepalive_ms=LEASE_MS, **known))
    body = builders.insert(
        one_row(people, key),
        **known,
        partition_id=people.partitions["eu"],
        schema_version=people.schema_version,
        txn_id=txn,
    )
    maker.append(pchannel_of(vchannel), body)


def consumed(client: Database) -> None:
    """A consumer group that is done with part of a collection, and one of the log's own."""
    with client.consumer("people", group=GROUP) as consumer:
        for _ in range(6):
            found = consumer.poll(timeout=20.0)
            assert found is not None
            consumer.acknowledge(found)
        consumer.commit()
    log = client.log.open("dml_0")
    begin = log.read(log.describe().begin, max_bytes=1).next
    log.close()
    client.log.move_group("plain", "dml_0", begin)


def parked(maker: Maker, pchannel: str) -> None:
    """An entry of a later version of the wire form parks a PChannel."""
    (position,) = maker.server.put_below(pchannel, [poison()])
    try:
        ingest_to_end(maker.settings, maker.client.log)
    except ChannelParked:
        failure = RangeFailure("UNSUPPORTED_VERSION", "an entry of a later version", False, position)
        park(maker.settings.parked_path, Parked.of(pchannel, failure))


class Unreachable:
    """The way to a log that is not there."""

    def append(self, *_: Any, **__: Any) -> Any:
        raise LogUnavailable("cut")

    def append_stream(self, *_: Any, **__: Any) -> Any:
        raise LogUnavailable("cut")


def spooled(client: Database, folder: Path) -> None:
    """Rows that a producer keeps, of which nothing reached the log."""
    people = client.definition("people")
    sender = SpoolSender(folder, retry_delay=60.0)
    way: Any = Unreachable()
    with Producer(way, client.catalog, client.settings, producer_id=WRITER + 1, spool=sender) as producer:
        for key in (601, 602, 603, 604):
            written = producer.insert(
                people, people_rows(key, city="spooled", age=pa.nulls(1, pa.int32())), partition="us"
            )
            assert written.spooled_rows == 1


def streamed(service: LogService) -> None:
    """Channels with owners, of which one is destroyed; a plain group and a tick group that are done with a part."""
    channels = MsgChannels(service)
    names = channels.create_channels(
        CreateChannelRequest(OwnerDescription("golden", "host:1", "a stream"), 3, {"kind": "test"})
    ).channel_names
    channels.destroy_channels(DestroyChannelRequest(names[2:]))
    append_to_stream(service, names[0], ["15#1", "5#2", "t10", "25#3", "12#4", "8#5", "t20", "t30", "t40"])
    append_to_stream(service, names[1], ["35#6", "9#7", "?", "t20", "22#8", "t30", "21#9", "t40"])
    for group, kind in (("plain", LogMsgStream), ("ticking", LogTtMsgStream)):
        with kind(service, settings=STREAMS.with_({"auto_ack": False})) as stream:
            stream.as_consumer(names[:2], group)
            stream.start()
            stream.ack(stream.consume())
    append_to_stream(service, names[0], ["45#10", "t50"])
    append_to_stream(service, names[1], ["46#11", "t50"])


def trimmed(root: Path) -> dict[str, Any]:
    """A deployment whose WAL gave up what its retention allows, behind a base."""
    things = Things(root / "trimmed")
    try:
        things.fill(4, size=50)
        short = replace(things.settings, wal_retention=0.001)
        report = checkpoint(short, things.log, CheckpointParams(), Progress())
        assert report.ok, report
        assert sum(each.rows for each in report.trimmed), report
        things.fill(1, size=50)
        return {"wal": of_wal(things.settings), "rows": rows(things.settings, 1), "next": things.next}
    finally:
        things.close()


def make(root: Path) -> dict[str, Any]:
    """Make the deployment in `root`, which must be the current folder; what is known of it."""
    facts: dict[str, Any] = {"millrace": millrace.__version__, "reads": []}
    with serving(root) as server:
        maker, client = Maker(server, facts), server.client
        made(maker)
        spooled(client, root / "spool")
        facts["catalog"] = of_catalog(client)
        facts["log"] = of_log(client.log)
    settings = settings_of(root)
    for read in facts["reads"]:
        try:
            assert rows(settings, read["collection"], at=read["at"]) == read["rows"]
        except TickTooOld:  # compaction has folded in what was deleted behind it
            read["rows"] = None
    facts["wal"] = of_wal(settings)
    facts["positions"] = of_positions(settings)
    with streams(root) as service:
        streamed(service)
    with streams(root) as service:
        facts["streams"] = of_streams(service)
    facts["trimmed"] = trimmed(root)
    return facts


def main() -> None:
    root = Path(sys.argv[1]).absolute()
    root.mkdir(parents=True)
    os.chdir(root)  # the log's second generation has a relative URL
    facts = make(root)
    put_away(root)
    FACTS.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def put_away(root: Path, into: Path = ARCHIVE) -> None:
    """The archive, without what belongs to a run: addresses, locks, output."""
    for pattern in ("**/*.lock", "**/server.*", "**/run", "cache", "**/lock", "**/index/LOG*"):
        for path in sorted(root.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in root.rglob("*.db"):
        with closing(sqlite3.connect(path)) as database:
            database.execute("pragma wal_checkpoint(truncate)")
    for path in sorted(each for each in root.rglob("*") if each.is_file()):
        # Delta's commitInfo says where a table was made, a load where its input was: nobody goes by either.
        if path.parent.name != "_delta_log" and path.name != "manifest.json":
            assert str(root).encode() not in path.read_bytes(), f"{path} holds a path of this machine"
    with tarfile.open(into, "w:xz", preset=9) as archive:
        for name in sorted(each.name for each in root.iterdir()):
            archive.add(root / name, name, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    try:
        main()
    except MillraceError as error:
        raise SystemExit(f"{error.code}: {error}") from error
