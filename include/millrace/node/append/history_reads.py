"""Serves the ``wal`` table, and the rows of imports, to remote clients, whose hosts have no tables.

A client reads a PChannel's messages in pieces. Each call plans on one version of the table, sends about as much as
requested, and names the message at which the next piece begins. The server keeps nothing between two calls, and a
client that continues with another server gets the same rows: a message id has the same rows in every version. Memory:
one row group and its wire copy for each of at most MAX_CONCURRENT_READS calls, and the table's snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millrace.access.access_log import ReadStream
from millrace.access.grants import Caller, Resource, ResourceKind, Role
from millrace.base.deadline import Deadline
from millrace.base.errors import CollectionNotFound, InvalidArgument, LogUnavailable, ServerFull, TableDamaged
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.message.bodies import VChannelImport, parse_body
from millrace.message.ids import MessageId
from millrace.message.model import ImmutableMessage
from millrace.message.types import MessageType
from millrace.node.append.authorizer import readable_rows, vchannel_resources
from millrace.node.append.host import AppendHost
from millrace.rpc.tail import Evicted, to_wire_rows, wire_schema
from millrace.rpc.wire import flight_error, request_number, to_json
from millrace.tables.collections.changes import ImportedFiles, checkpointed_vchannels
from millrace.tables.wal.reader import FIRST_ID, MAX_TICK, WalRange, WalSnapshot, read_range
from millrace.wal.scanner import message_from_row
from millrace.wal.schema import ROW_SCHEMA

MAX_CONCURRENT_READS: Final = 8
"""Limit of concurrent reads of pieces and imports. Further ones are refused as ServerFull."""
PIECE_BYTES: Final = 16 << 20
"""Approximate maximum size of a piece. Row groups of the table are never split."""
READ_BYTES: Final = 128 << 20
"""Bytes read after which a piece ends, however little of it this client may see."""
MESSAGE_WAIT: Final = 5.0
"""Seconds in which an Import that a client has seen must appear in the table or the tail."""
_BATCH_BYTES: Final = 4 << 20
_POLL: Final = 0.05
_JUDGED: Final = ("vchannel", "type")
_IDS: Final = ("ledger", "entry", "index", "ordinal")


class CollectionCatalog(Protocol):
    """The part of the coordinator's catalog that reads need."""

    def collection_of(self, vchannel: str) -> str | None: ...

    def collections_by_id(self, ids: Iterable[int]) -> Mapping[int, CollectionInfo]: ...


class HistoryReads:
    """Answers the action ``append/history``, and DoGet with the tickets `{"history": ...}` and `{"imported": ...}`."""

    def __init__(self, settings: Settings, catalog: CollectionCatalog, host: AppendHost) -> None:
        self._settings = settings
        self._catalog = catalog
        self._host = host
        self._free = threading.BoundedSemaphore(MAX_CONCURRENT_READS)
        self._looking = threading.Lock()
        self._snapshot: WalSnapshot | None = None

    def describe(self, pchannel: str, request: dict[str, Any]) -> dict[str, Any]:
        """Return `{"version", "last_tick", "trimmed": [tick, [ledger, entry]], "confirmed"}` of the newest version.

        `confirmed` is the message id for the request's tick `confirmed_at`, if it has one.
        """
        with self._looking:
            found = self._newest()
            if found is None:
                answer: dict[str, Any] = {"version": -1, "last_tick": 0, "trimmed": [0, [0, 0]]}
                confirmed = FIRST_ID
            else:
                trimmed, earliest = found.trimmed(pchannel)
                answer = {"version": found.version, "last_tick": found.last_tick(pchannel)}
                answer["trimmed"] = [trimmed, list(earliest)]
                tick = int(request_number(request, "confirmed_at", 0))
                confirmed = found.confirmed_at(pchannel, tick) if "confirmed_at" in request else FIRST_ID
        return answer | {"confirmed": list(confirmed)}

    def stream(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        """Serve the ticket `{"history": pchannel, "start", "after", "up_to", "max_bytes", "columns", "vchannels"}`.

        Streams one piece of the PChannel's messages that the caller may read. The last batch's metadata is `{"next":
        id}`, the start of the next piece, or `{"next": null}` if everything up to `up_to` was sent. Raises
        PositionTruncated, ServerFull, WalGap.
        """
        pchannel = str(request["history"])
        start, after = _message_id(request.get("start")), int(request_number(request, "after", 0))
        up_to = int(request_number(request, "up_to", MAX_TICK))
        most = min(PIECE_BYTES, int(request_number(request, "max_bytes", PIECE_BYTES)))
        names, wanted = _names(request, "columns"), _names(request, "vchannels")
        unknown = set(names or ()) - set(ROW_SCHEMA.names)
        if unknown:
            raise InvalidArgument(f"messages have no column {sorted(unknown)[0]!r}")
        schema = wire_schema(names or ROW_SCHEMA.names)
        columns = None if names is None else list(dict.fromkeys([*names, *_JUDGED, *_IDS]))
        with self._room(), self._looking:
            snapshot = self._version_at(pchannel, up_to)
            if snapshot is not None and start is None and snapshot.trimmed(pchannel)[0] > after:
                # Retention passed the client's position: raise what a reader that starts here would get.
                snapshot.plan(pchannel, start=snapshot.confirmed_at(pchannel, after))
            plan = (
                None if snapshot is None else snapshot.plan(pchannel, start=start, after_tick=after, up_to_tick=up_to)
            )
        whole = caller.principal.has_role((Role.READ,), (Resource(ResourceKind.PCHANNEL, pchannel),))

        def shown(batch: pa.RecordBatch) -> pa.RecordBatch:
            if wanted is not None:
                own = pc.is_in(
                    batch.column("vchannel").cast(pa.string()), value_set=pa.array(["", *wanted], pa.string())
                )
                batch = batch.filter(own)
            batch = batch if whole else readable_rows(batch, caller, self._catalog.collection_of)
            return to_wire_rows(batch if names is None else batch.select(names))

        def pieces() -> Iterator[tuple[pa.RecordBatch, bytes]]:
            sent = read = 0
            follows: MessageId | None = start
            try:
                # The read is closed before its room is released: left open, it would exceed MAX_CONCURRENT_READS.
                with self._room(), closing(_planned(snapshot, plan, columns)) as tables:
                    for table in tables:
                        for batch in table.to_batches(
                            max_chunksize=max(1, _BATCH_BYTES * table.num_rows // table.nbytes)
                        ):
                            part = shown(batch)
                            sent += part.nbytes
                            if part.num_rows:
                                yield part, b"{}"
                        read += table.nbytes
                        ledger, entry, index, ordinal = (table[name][-1].as_py() for name in _IDS)
                        follows = MessageId(ledger, entry, index, ordinal + 1)
                        if sent >= most or read >= READ_BYTES:
                            break
                    else:
                        follows = None
            except TableDamaged as error:
                # Compaction and VACUUM may have removed a file of this version. The newer version has the same rows
                # in other files.
                if not (error.missing and follows is not None and self._moved(snapshot)):
                    raise flight_error(error) from error
            except Exception as error:
                raise flight_error(error) from error
            yield pa.RecordBatch.from_pylist([], schema), to_json({"next": None if follows is None else list(follows)})

        return ReadStream(schema, pieces())

    def imported(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        """Serve the ticket `{"imported": pchannel, "at": tick, "skip": rows}`: the rows of the Import at that tick.

        A batch's metadata is `{"partition": id}`, that of the last `{"rows": number sent}`.
        Raises PermissionDenied, StagedFileDamaged, PositionTruncated, ServerFull, CollectionNotFound.
        """
        pchannel = str(request["imported"])
        at, skip = int(request_number(request, "at", 0)), int(request_number(request, "skip", 0))
        message = self._import_at(pchannel, at)
        resources = vchannel_resources(message.vchannel, self._catalog.collection_of)
        caller.principal.require_role((Role.READ,), resources, "a read of an import's rows")
        collection = self._collection(message.collection_id)
        version = max(1, message.schema_version)
        if collection.schema_version < version:
            raise CollectionNotFound(
                f"the catalog has no schema version {version} of collection {message.collection_id}"
            )
        schema = collection.schemas[version - 1]
        files = parse_body(MessageType.IMPORT, message.payload)["files"]
        named = VChannelImport(message.vchannel, message.time_tick, files, schema, collection.vchannels)

        def pieces() -> Iterator[tuple[pa.RecordBatch, bytes]]:
            left, sent = skip, 0
            try:
                with self._room(), closing(ImportedFiles.of(self._settings).rows(named)) as parts:
                    for partition, rows in parts:
                        step = max(1, _BATCH_BYTES * rows.num_rows // max(1, rows.nbytes))
                        passed, left = min(left, rows.num_rows), max(0, left - rows.num_rows)
                        for first in range(passed, rows.num_rows, step):
                            part = rows.slice(first, step)
                            sent += part.num_rows
                            yield part, to_json({"partition": partition})
            except Exception as error:
                raise flight_error(error) from error
            yield pa.RecordBatch.from_pylist([], schema.arrow()), to_json({"rows": sent})

        return ReadStream(schema.arrow(), pieces())

    def checkpointed(self, pchannel: str, request: dict[str, Any], caller: Caller) -> dict[str, Any]:
        """Answer `{"collection_id"}` with `{"time_tick", "vchannels": {name: info}}`.

        They are the tick of the PChannel's newest checkpoint (0 without one) and its catalog's VChannels of the
        collection.
        Raises PermissionDenied, CollectionNotFound.
        """
        collection_id = int(request_number(request, "collection_id", 0))
        collection = self._collection(collection_id)
        resources = Resource(ResourceKind.PCHANNEL, pchannel), Resource(ResourceKind.COLLECTION, collection.name)
        caller.principal.require_role((Role.READ,), resources, "a read of a collection's changes")
        tick, found = checkpointed_vchannels(self._settings, pchannel, collection_id)
        return {"time_tick": tick, "vchannels": {name: info.to_json() for name, info in found.items()}}

    def _collection(self, collection_id: int) -> CollectionInfo:
        known = self._catalog.collections_by_id([collection_id])
        if collection_id not in known:
            raise CollectionNotFound(f"the catalog has no collection {collection_id}")
        return known[collection_id]

    def _import_at(self, pchannel: str, tick: int) -> ImmutableMessage:
        """Return the Import of that tick from the table, or from the tail if the table is not there yet."""
        deadline = Deadline.after(MESSAGE_WAIT)
        while True:
            with self._looking:
                snapshot = self._version_at(pchannel, tick)
                there = snapshot is not None and snapshot.last_tick(pchannel) >= tick
                found = (
                    list(snapshot.messages(pchannel, after_tick=tick - 1, up_to_tick=tick))
                    if there and snapshot
                    else []
                )
            if not there:
                tail = self._host.tail(pchannel, tick - 1, timeout=0.0)
                if not isinstance(tail, Evicted):
                    found = [pa.Table.from_batches(tail.batches)] if tail.batches else []
                    there = tail.confirmed_tick >= tick
            for rows in found:
                for row in rows.filter(pc.equal(rows["time_tick"], tick)).to_pylist():
                    if row["type"] == MessageType.IMPORT.name:
                        return message_from_row(row)
            if there:
                raise InvalidArgument(f"no Import of {pchannel} has the tick {tick}")
            if not deadline.pause(_POLL):
                raise LogUnavailable(f"the tables of {pchannel} lag behind tick {tick}: retry later")

    def _newest(self) -> WalSnapshot | None:
        found = self._snapshot
        self._snapshot = WalSnapshot.open(self._settings.wal_uri) if found is None else found.refreshed()
        return self._snapshot

    def _version_at(self, pchannel: str, tick: int) -> WalSnapshot | None:
        """Return a version that has everything up to `tick`, or the newest."""
        found = self._snapshot
        return found if found is not None and found.last_tick(pchannel) >= tick else self._newest()

    def _moved(self, seen: WalSnapshot | None) -> bool:
        with self._looking:
            return seen is not None and (self._snapshot is not seen or self._newest() is not seen)

    @contextmanager
    def _room(self) -> Iterator[None]:
        if not self._free.acquire(blocking=False):
            raise ServerFull(f"the server reads for {MAX_CONCURRENT_READS} clients at once, its limit: retry")
        try:
            yield
        finally:
            self._free.release()


def _planned(
    snapshot: WalSnapshot | None, plan: WalRange | None, columns: Sequence[str] | None
) -> Generator[pa.Table, None, None]:
    """Yield the messages of a planned range; nothing without a plan."""
    if snapshot is not None and plan is not None:
        yield from read_range(snapshot.store, plan, columns=columns)


def _message_id(value: object) -> MessageId | None:
    match value:
        case None:
            return None
        case [int(), int(), int(), int()]:
            return MessageId(*value)
        case _:
            raise InvalidArgument(f"{value!r} is not a message id: use [ledger, entry, index, ordinal]")


def _names(request: dict[str, Any], key: str) -> list[str] | None:
    value = request.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise InvalidArgument(f"{key!r} of the request must be a list of names")
    return value
