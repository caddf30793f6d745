"""Where this server's work queues read their tasks: the rows that were inserted into a VChannel, in order.

A task is a row of an insert, an upsert or an import, whatever becomes of the row later; deletes and DDL are no tasks.
Rows of consecutive small messages are read as one batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import CollectionNotFound, Malformed
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.consume.batch_decoder import MAX_BATCHED_PAYLOAD_BYTES, BatchDecoder
from millrace.client.consume.delivery import DefinitionLookup, Delivery
from millrace.client.consume.scan import Scan, scan, wal_opener
from millrace.client.consume.shared_tail import SharedTail, SharedUnits, VisibleRows
from millrace.log.protocol import LogService
from millrace.message.bodies import ImportSource
from millrace.message.ids import collection_id_of, split_channel
from millrace.message.model import ImmutableMessage
from millrace.message.payload.rows import decode_many, decode_rows
from millrace.message.types import MessageType
from millrace.node.append.history_reads import CollectionCatalog
from millrace.node.append.queue_lanes import TaskReader, TaskRows
from millrace.rpc.tail import TailSource
from millrace.tables.collections.changes import ImportedFiles
from millrace.tables.wal.log_replay import UncommittedMessages
from millrace.wal.scanner import ImmutableTxn, StartAfterTick

_INSERTS: Final = pa.array([MessageType.INSERT.name, MessageType.UPSERT.name])
_WITH_FILES: Final = pa.array([MessageType.IMPORT.name])
_LOOK_SECONDS: Final = 5.0
"""How long the catalog's answer counts."""
_PIECE_BYTES: Final = 512 << 10
"""Approximate bytes of rows that are read as one batch."""


class HostTaskSource:
    """Reads from the ``wal`` table, and from this process's append host (implements TaskSource)."""

    def __init__(self, settings: Settings, catalog: CollectionCatalog, host: TailSource, service: LogService) -> None:
        self._settings = settings
        self._catalog = catalog
        self._tail = SharedTail(host)
        self._host = host
        self._service = service
        self._guard = threading.Lock()
        self._known: dict[int, CollectionInfo] = {}
        self._dropped: dict[int, tuple[float, str]] = {}
        """By collection when the catalog was asked, and the name if it was dropped."""

    def open(self, lane: str, after_tick: int) -> TaskReader:
        """Read a VChannel after a tick. Raises what a scan raises, PositionTruncated among them."""
        uri = self._settings.wal_uri
        found = scan(
            lane,
            StartAfterTick(after_tick),
            wal=uri,
            tail=self._tail,
            log=UncommittedMessages(uri, self._service),
            stall_timeout=self._settings.read_deadline,
        )
        return ScannedTasks(found, lane, self._definition, ImportedFiles.of(self._settings))

    def start_tick(self, lane: str, start: str | int) -> int:
        """Return the tick after which a queue begins that has no position yet."""
        pchannel = split_channel(lane)[0]
        if start == "latest":
            return self._host.time_tick(pchannel, persist=False).time_tick
        if isinstance(start, int):
            return start
        wal = wal_opener(self._settings.wal_uri)()
        return 0 if wal is None else wal.trimmed(pchannel)[0]

    def require(self, lane: str) -> None:
        """Raise CollectionNotFound if the collection of a VChannel was dropped; a moment later at most."""
        number = collection_id_of(lane)
        if number is None:
            return
        now = time.monotonic()
        with self._guard:
            looked, name = self._dropped.get(number, (-_LOOK_SECONDS, ""))
        if now - looked >= _LOOK_SECONDS:
            found = self._catalog.collections_by_id([number]).get(number)
            name = found.name if found is not None and found.state == "dropped" else ""
            with self._guard:
                self._dropped[number] = now, name
        if name:
            raise CollectionNotFound(
                f"collection {name!r} was dropped, and this queue has no task of it left: close its consumers, and"
                " forget the group with `millrace groups drop`"
            )

    def _definition(self, collection_id: int, version: int) -> CollectionInfo:
        with self._guard:
            found = self._known.get(collection_id)
        if found is None or found.schema_version < version:
            found = self._catalog.collections_by_id([collection_id]).get(collection_id)
            if found is None or found.schema_version < version:
                raise CollectionNotFound(f"the catalog has no schema version {version} of collection {collection_id}")
            with self._guard:
                self._known[collection_id] = found
        return found


class ScannedTasks:
    """The tasks of one VChannel's scan, which it closes (implements TaskReader)."""

    def __init__(self, found: Scan, lane: str, definition: DefinitionLookup, files: ImportSource) -> None:
        self._scan = found
        self._pchannel = split_channel(lane)[0]
        self._definition = definition
        self._files = files

    @property
    def confirmed_tick(self) -> int:
        return self._scan.confirmed_tick

    def poll(self) -> Iterator[TaskRows] | None:
        """Return the next rows as they are decoded; None if there are none now.

        Raises what the scan raises; the iterator, what decoding raises.
        """
        parts = self._scan.poll_once()
        return None if parts is None else self._decoded(parts)

    def on_news(self, call: Callable[[], None]) -> float | None:
        return self._scan.on_news(call)

    def _decoded(self, parts: Sequence[VisibleRows]) -> Iterator[TaskRows]:
        for part in parts:
            if _only_messages(part.rows):
                yield from self._columns(part.rows)
                continue
            if isinstance(part, SharedUnits):
                yield from self._tasks(part.units(), part.decoder)
                continue
            units, decoder = list(part.units()), BatchDecoder()
            for unit in units:
                for message in unit.bodies if isinstance(unit, ImmutableTxn) else (unit,):
                    decoder.add(message)
            yield from self._tasks(units, decoder)

    def _columns(self, rows: pa.Table) -> Iterator[TaskRows]:
        """Yield the tasks of messages without making an object of each."""
        rows = rows.filter(pc.is_in(rows.column("type").cast(pa.utf8()), _INSERTS))
        if not rows.num_rows:
            return
        numbers = [rows.column(name).to_numpy() for name in ("collection_id", "schema_version")]
        payloads = rows.column("payload").combine_chunks().cast(pa.large_binary())
        ticks = rows.column("time_tick").to_numpy()
        sizes = pc.binary_length(payloads).to_numpy()
        piece = np.cumsum(sizes) // _PIECE_BYTES
        alone = sizes > MAX_BATCHED_PAYLOAD_BYTES
        changes = (
            (np.diff(numbers[0]) != 0) | (np.diff(numbers[1]) != 0) | (np.diff(piece) != 0) | alone[1:] | alone[:-1]
        )
        starts = [0, *(np.flatnonzero(changes) + 1).tolist(), rows.num_rows]
        for start, stop in pairwise(starts):
            version = max(1, int(numbers[1][start]))
            written = self._definition(int(numbers[0][start]), version).schemas[version - 1]
            if alone[start]:
                found = decode_rows(payloads[start].as_buffer(), written.arrow())
                counts = np.array([found.num_rows])
            else:
                decoded = decode_many(payloads.slice(start, stop - start), written.arrow())
                for error in decoded.errors.values():
                    raise Malformed(error)
                found, counts = decoded.rows, np.asarray(decoded.counts)
            if found.num_rows:
                yield TaskRows(np.repeat(ticks[start:stop], counts), found, written.primary_key, True)

    def _tasks(self, units: Iterable[ImmutableMessage | ImmutableTxn], decoder: BatchDecoder) -> Iterator[TaskRows]:
        batch = _Batch()
        for unit in units:
            delivery = Delivery(
                self._pchannel, unit, _definitions=self._definition, _files=self._files, _decoder=decoder
            )
            open_unit = False
            for change in delivery.changes():
                if change.kind != "insert" or not change.rows.num_rows:
                    continue
                if open_unit:  # only now is it known that the unit goes on
                    yield from batch.flush(last=False)
                elif batch.bytes > _PIECE_BYTES or batch.differs(change.rows):
                    yield from batch.flush(last=True)
                batch.add(unit.time_tick, change.rows, change.key)
                open_unit = True
        yield from batch.flush(last=True)

    def close(self) -> None:
        self._scan.close()


def _only_messages(rows: pa.Table) -> bool:
    """Return whether all rows are messages outside transactions, none of them with files."""
    kinds = rows.column("type").cast(pa.utf8())
    return bool(pc.all(pc.equal(rows.column("txn_id"), 0)).as_py() and not pc.any(pc.is_in(kinds, _WITH_FILES)).as_py())


class _Batch:
    """Rows of one schema that wait to be passed on together."""

    def __init__(self) -> None:
        self.bytes = 0
        self._rows: list[pa.RecordBatch] = []
        self._ticks: list[int] = []
        self._key: str | tuple[str, ...] = ""

    def differs(self, rows: pa.RecordBatch) -> bool:
        return bool(self._rows) and not self._rows[0].schema.equals(rows.schema)

    def add(self, tick: int, rows: pa.RecordBatch, key: str | tuple[str, ...]) -> None:
        self._rows.append(rows)
        self._ticks.append(tick)
        self._key = key
        self.bytes += rows.nbytes

    def flush(self, *, last: bool) -> Iterator[TaskRows]:
        if not self._rows:
            return
        rows = self._rows[0] if len(self._rows) == 1 else pa.concat_batches(self._rows)
        ticks = np.repeat(np.array(self._ticks, np.int64), [each.num_rows for each in self._rows])
        found = TaskRows(ticks, rows, self._key, last)
        self.bytes, self._rows, self._ticks = 0, [], []
        yield found
