"""Producers whose sequences are kept outside of the system, and what the WAL must hold of them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from millrace.base.errors import AppendRejected, MillraceError
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.database import Database, connect
from millrace.message import builders
from millrace.message.ids import pchannel_of
from millrace.message.keys import vchannel_index
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_entry
from millrace.operations.verification import verify_channel
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("sequence", "int64", False)), "id")
PATIENCE = 60.0
DEADLINE = 20.0
"""Seconds of one append: enough for a server to come up again on a busy machine."""
PACE = 0.005
"""Seconds between two writes of a key: steady load that leaves the machine to the processes that are killed."""


def key_of(vchannel: str, names: tuple[str, ...], nth: int) -> int:
    """The n-th key whose home is `vchannel`."""
    found = (key for key in range(10_000) if names[vchannel_index(pa.array([key]), len(names))[0]] == vchannel)
    for _ in range(nth):
        next(found)
    return next(found)


@dataclass
class KeyWriter:
    """Writes one key over and over, in sequence, each until it is answered; `acknowledged` is the oracle."""

    settings: Settings
    collection: CollectionInfo
    vchannel: str
    number: int
    acknowledged: int = 0
    """Sequences 0 .. acknowledged - 1 were answered as accepted (or as a duplicate of one that was)."""
    repeats: int = 0
    error: BaseException | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.key = key_of(self.vchannel, self.collection.vchannels, self.number)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"writer-{self.number}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopping.set()
        assert self.thread is not None
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            with connect(settings=self.settings) as client:
                while not self.stopping.is_set():
                    self._write(client, self.acknowledged)
                    self.acknowledged += 1
                    self.stopping.wait(PACE)
        except BaseException as error:
            self.error = error

    def _write(self, client: Database, sequence: int) -> None:
        pchannel, until = pchannel_of(self.vchannel), time.monotonic() + PATIENCE
        batch = pa.record_batch([pa.array([self.key]), pa.array([sequence])], schema=SCHEMA.arrow())
        message = builders.insert(
            batch,
            vchannel=self.vchannel,
            collection_id=self.collection.id,
            partition_id=self.collection.partitions["_default"],
            term=client.catalog.term(pchannel),
            producer_id=self.number + 1,
            epoch=1,
            sequence=sequence,
        )
        while True:
            try:
                client.connection.append(pchannel, [encode_entry([message])], deadline=DEADLINE).result()
                return
            except AppendRejected as rejection:
                if rejection.reason == "DUPLICATE":
                    return
                if rejection.reason != "TERM_FENCED":
                    raise
                message = replace(message, term=client.catalog.term(pchannel))
            except MillraceError as error:
                if not error.retriable or time.monotonic() > until:
                    raise
                self.repeats += 1
                threading.Event().wait(0.02)


def stored_sequences(settings: Settings, pchannel: str, collection: CollectionInfo) -> dict[int, list[int]]:
    """By key, the sequences of the collection's accepted inserts in the WAL, in the order of their ticks."""
    snapshot = WalSnapshot.open(Path(settings.wal_uri))
    assert snapshot is not None
    found: dict[int, list[int]] = {}
    for messages in snapshot.messages(pchannel):
        for row in messages.select(["type", "collection_id", "payload"]).to_pylist():
            if row["type"] == MessageType.INSERT.name and row["collection_id"] == collection.id:
                rows = decode_rows(row["payload"], SCHEMA.arrow()).to_pydict()
                for key, sequence in zip(rows["id"], rows["sequence"], strict=True):
                    found.setdefault(key, []).append(sequence)
    return found


def check(settings: Settings, client: Database, writers: list[KeyWriter]) -> None:
    """No loss, no double, order kept; and the log over all its generations gives what the WAL holds."""
    stored: dict[int, list[int]] = {}
    for pchannel in sorted({pchannel_of(writer.vchannel) for writer in writers}):
        stored |= stored_sequences(settings, pchannel, writers[0].collection)
    for writer in writers:
        sequences = stored[writer.key]
        assert sequences == list(range(len(sequences))), f"key {writer.key}: lost, doubled or out of order"
        assert len(sequences) - writer.acknowledged in (0, 1), f"key {writer.key}: {len(sequences)} for {writer}"
    snapshot, wal = WalSnapshot.open(Path(settings.wal_uri)), WalTable.open(Path(settings.wal_uri))
    assert snapshot is not None
    for pchannel in snapshot.pchannels():
        report = verify_channel(snapshot, wal, client.log, pchannel)
        assert report.ok, report
        assert report.replayed is not None
