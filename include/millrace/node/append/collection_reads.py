"""Serves reads of collections to remote clients, whose hosts have no tables. Each read is planned once and sent in
pieces.

Memory: a read holds the deletes up to its tick and about PIECE_BYTES of rows. At most MAX_CONCURRENT_READS run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from millrace.access.access_log import ReadStream
from millrace.access.grants import Caller, Resource, ResourceKind, Role
from millrace.base.errors import ServerFull
from millrace.base.settings import Settings
from millrace.catalog.calls import ServedCatalog
from millrace.catalog.collection import CollectionInfo
from millrace.log.protocol import LogService
from millrace.node.append.host import AppendHost
from millrace.rpc.selection import Selection, keys_from_text
from millrace.rpc.tail import DecidedMessages
from millrace.rpc.wire import flight_error, request_number, to_json
from millrace.tables.read.arrow import PIECE_BYTES, count_rows, read_pieces
from millrace.tables.read.freshness import plan_fresh
from millrace.tables.read.key_history import read_key_history
from millrace.tables.read.keys import read_keys
from millrace.tables.read.open_tables import OpenTablesPool

MAX_CONCURRENT_READS: Final = 4
"""Limit of concurrent reads. Further ones are refused as ServerFull."""
MAX_WAIT_SECONDS: Final = 60.0
"""Longest wait for the tables to reach the tick of a read."""
_BATCH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class HostTickSource:
    """Reads ticks from this process's host (implements millrace.tables.read.freshness.TickSource)."""

    host: AppendHost
    service: LogService

    def tick(self, pchannel: str, *, persist: bool = True) -> int:
        return self.host.tick(pchannel, persist=persist)

    def decided(
        self, collection_id: int, after: Mapping[str, int], *, at: int | None, max_bytes: int
    ) -> DecidedMessages:
        return self.host.decided(collection_id, after, at=at, max_bytes=max_bytes)


class CollectionReads:
    """Answers DoGet with the ticket `{"read": collection, "at": tick or null, "deadline": seconds}`.

    The ticket may also contain the fields of :class:`millrace.rpc.selection.Selection`, `"count": true`, or `"keys"`
    (:func:`millrace.rpc.selection.keys_to_text`) with `"columns"`. With `"changes": true` and `"after"` (tick or null),
    keys give their changes up to `"at"`.
    """

    def __init__(self, settings: Settings, catalog: ServedCatalog, host: AppendHost, service: LogService) -> None:
        self._settings = settings
        self._catalog = catalog
        self._own = HostTickSource(host, service)
        self._open = OpenTablesPool()
        self._free = threading.BoundedSemaphore(MAX_CONCURRENT_READS)

    def stream(self, request: dict[str, Any], caller: Caller) -> ReadStream:
        """Stream the selected rows, or those of keys. The last batch's metadata is `{"rows": number}`.

        Raises PermissionDenied, CollectionNotFound, TickNotReached, TickTooOld, ServerFull, InvalidArgument.
        """
        name = self._catalog.collection_name(str(request["read"]))  # an alias has no grants of its own
        caller.principal.require_role((Role.READ,), (Resource(ResourceKind.COLLECTION, name),), "a read of its rows")
        found = self._catalog.collection(name)
        at = None if request.get("at") is None else int(request_number(request, "at", 0))
        seconds = min(request_number(request, "deadline", 0.0), MAX_WAIT_SECONDS)
        selection = Selection.from_json(request)
        with self._room():
            if request.get("keys"):
                return self._of_keys(found, request, at, seconds, selection)
            plan = plan_fresh(self._settings, name, found.id, found.pchannels, self._own, at=at, seconds=seconds)
            every = plan.schema.arrow()
            if request.get("count"):
                metadata = to_json({"counted": count_rows(plan, where=selection.where)})
                nothing = pa.schema([])
                return ReadStream(nothing, iter([(pa.RecordBatch.from_pylist([], nothing), metadata)]))
        schema = pa.schema([every.field(each) for each in selection.names(every)])
        selection.expression(every)  # raise for an invalid selection before the first batch

        def batches() -> Iterator[tuple[pa.RecordBatch, bytes]]:
            sent, each = 0, to_json({"selected": True})
            try:
                with self._room():
                    for piece in read_pieces(plan, selection=selection, max_bytes=PIECE_BYTES):
                        rows = max(1, _BATCH_BYTES * piece.num_rows // max(1, piece.nbytes))
                        for batch in piece.to_batches(max_chunksize=rows):
                            sent += batch.num_rows
                            yield batch, each
            except Exception as error:
                raise flight_error(error) from error
            yield pa.RecordBatch.from_pylist([], schema), to_json({"rows": sent, "selected": True})

        return ReadStream(schema, batches())

    def _of_keys(
        self, collection: CollectionInfo, request: dict[str, Any], at: int | None, seconds: float, selection: Selection
    ) -> ReadStream:
        name, number, keys = collection.name, collection.id, keys_from_text(request["keys"])
        after = None if request.get("after") is None else int(request_number(request, "after", 0))
        of_history = bool(request.get("changes"))
        with self._open.taken() as tables:
            plan = plan_fresh(
                self._settings, name, number, collection.pchannels, self._own, at=at, seconds=seconds, tables=tables
            )
            if of_history:
                rows = read_key_history(plan, keys, after=after, columns=selection.columns, tables=tables)
            else:
                rows = read_keys(plan, keys, columns=selection.columns, tables=tables)
        said = to_json({"rows": rows.num_rows, "changes" if of_history else "keyed": True})
        batches = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
        return ReadStream(rows.schema, iter([(each, said) for each in batches]))

    @contextmanager
    def _room(self) -> Iterator[None]:
        if not self._free.acquire(blocking=False):
            raise ServerFull(f"the server is serving {MAX_CONCURRENT_READS} reads, its limit: retry")
        try:
            yield
        finally:
            self._free.release()
