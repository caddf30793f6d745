"""Fills a small disk through the append host, to the last byte and beyond, makes room
again, and says what it saw as JSON.

    python fill_disk.py DIR        DIR is a tmpfs of some 200 MiB of its own, which this may remount with another size

Log, streaming node and flusher run here, with real tables. What was acknowledged is kept
outside of the disk, in memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from millrace.access.grants import LOCAL_ADMIN
from millrace.base.errors import LogUnavailable, MillraceError, RateLimited, TableUnavailable
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import connect
from millrace.log.rocksmq.service import RocksMQ
from millrace.log.rocksmq.settings import RocksMQSettings
from millrace.message import builders
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.node.append.authorizer import AppendAuthorizer
from millrace.node.append.flow_monitor import FlowMonitor
from millrace.node.append.host import AppendHost
from millrace.node.append.server import AppendExtension, committed_state_loader
from millrace.node.flush.definition import flush_to_end
from millrace.node.ingest.definition import ingest_to_end
from millrace.tables.read.arrow import read_arrow

MIB = 1 << 20
SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "binary", True)), "id")
P = "dml_0"
DOOR = AppendAuthorizer(LOCAL_ADMIN, lambda vchannel: None)
DEADLINE = 120.0


class Writer:
    """A producer: one row an append, with the key as its sequence. `acknowledged` is what the log promised to keep."""

    def __init__(self, collection: CollectionInfo, term: int) -> None:
        self._collection = collection
        self._term = term
        self.acknowledged: list[int] = []

    def append(self, extension: AppendExtension) -> None:
        key = len(self.acknowledged)
        message = builders.insert(
            pa.record_batch([pa.array([key]), pa.array([os.urandom(64 << 10)])], schema=SCHEMA.arrow()),
            vchannel=self._collection.vchannels[0],
            collection_id=self._collection.id,
            partition_id=next(iter(self._collection.partitions.values())),
            term=self._term,
            producer_id=7,
            epoch=1,
            sequence=key,
        )
        values = pa.array([encode_entry([message])], pa.large_binary())
        extension.submit_one(P, values, DOOR).outcome(timeout=DEADLINE).result()
        self.acknowledged.append(key)


def until_refused(settings: Settings, engine: RocksMQ, host: AppendHost, writer: Writer) -> dict[str, Any]:
    """Append until flow control refuses it, with the jobs at work.

    On the way the disk is relieved, and appends slowed.
    """
    monitor = FlowMonitor(settings, host, engine, pause=0.05, relief_pause=1.0)
    extension = AppendExtension(host, flow=monitor)
    stop, begin = threading.Event(), engine.open(P).describe().begin
    seen: dict[str, Any] = {"refused": "", "truncated": False}

    def repeat(work: Callable[[], object]) -> None:
        while not stop.wait(0.05):
            try:
                work()
            except TableUnavailable as error:
                seen["tables"] = str(error)

    jobs = [lambda: ingest_to_end(settings, engine), lambda: flush_to_end(settings)]
    working = [threading.Thread(target=repeat, args=(job,)) for job in jobs]
    for thread in working:
        thread.start()
    monitor.start()
    until = time.monotonic() + DEADLINE
    while not seen["refused"] and time.monotonic() < until:
        try:
            writer.append(extension)
        except RateLimited as error:
            if monitor.control.describe()["mode"] == "reject":
                seen["refused"] = str(error)
            stop.wait(0.05)
        seen["truncated"] |= engine.open(P).describe().begin > begin
    seen["delayed"] = monitor.control.describe()["delayed"]
    stop.set()
    for thread in working:
        thread.join(DEADLINE)
    monitor.close()
    return seen


def without_room(settings: Settings, engine: RocksMQ, host: AppendHost, writer: Writer) -> dict[str, Any]:
    """Take the last byte of the disk, and append without flow control: what finds no room is a typed error."""
    seen: dict[str, Any] = {"without room": [], "node without room": "nothing was left to do"}
    ballast = settings.data_dir.parent / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError as error:
            seen["errno"] = error.errno
    try:
        for _ in range(40):  # the log's file was allocated before: it has some room yet
            writer.append(AppendExtension(host))
    except LogUnavailable as error:
        seen["without room"].append(str(error))
    try:
        ingest_to_end(settings, engine)
    except MillraceError as error:
        seen["node without room"] = error.code
    ballast.unlink()
    return seen


def with_room_again(settings: Settings, engine: RocksMQ, host: AppendHost, writer: Writer) -> None:
    """Go on with the same sequences."""
    subprocess.run(["mount", "-o", "remount,size=512m", str(settings.data_dir.parent)], check=True)
    wanted, until = len(writer.acknowledged) + 5, time.monotonic() + DEADLINE
    while len(writer.acknowledged) < wanted and time.monotonic() < until:
        try:
            writer.append(AppendExtension(host))
        except LogUnavailable:
            threading.Event().wait(0.05)
    ingest_to_end(settings, engine)
    flush_to_end(settings)


def main(folder: Path) -> None:
    settings = Settings(
        data_dir=folder / "data",
        cache_dir=folder / "cache",
        log_file_bytes=1 * MIB,
        flow_disk_slow=88 * MIB,
        flow_disk_reject=24 * MIB,
        flow_start_rate=8 * MIB,
        flow_memory_slow=0,
        flow_memory_reject=0,
    )
    with connect(settings=settings) as client:
        client.catalog.ensure_pchannels(1)
        writer = Writer(client.catalog.create_collection("c", SCHEMA), client.catalog.term(P))
        client.connection.service.shutdown()
    log_settings = RocksMQSettings(segment_bytes=1 * MIB, spare_files=0)
    with (
        RocksMQ(settings.log_path, settings=log_settings) as engine,
        AppendHost(engine, committed_state_loader(Path(settings.wal_uri), engine)) as host,
    ):
        host.tick(P)
        seen = until_refused(settings, engine, host, writer)
        seen |= without_room(settings, engine, host, writer)
        with_room_again(settings, engine, host, writer)
    found = sorted(read_arrow(settings, 1)["id"].to_pylist())
    print(json.dumps(seen | {"acknowledged": len(writer.acknowledged), "each once": found == writer.acknowledged}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
