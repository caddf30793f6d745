"""Table access through a remote server (implements Tables of millrace.client.database)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, LogUnavailable, ServerFull
from millrace.catalog.collection import CollectionInfo
from millrace.client.append_client import READ_SECONDS, AppendClient
from millrace.client.consume.scan import WalOpener
from millrace.message.bodies import VChannelImport
from millrace.message.ids import LogId, MessageId, pchannel_of
from millrace.rpc import calls
from millrace.rpc.link import ConnectionLost, Link
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.selection import Selection
from millrace.rpc.tail import from_wire_rows
from millrace.rpc.wire import APPEND_ROLE

if TYPE_CHECKING:
    import pyarrow.compute as pc
    import pyarrow.dataset as ds

    from millrace.client.dataset import CollectionDataset
    from millrace.wal.visible.changes import ChangePosition, ChangeStart

FIRST_PIECE_BYTES: Final = 1 << 20
"""Approximate size of the first piece of the WAL: small, so that a reader starts soon."""
PIECE_BYTES: Final = 16 << 20
PIECE_SECONDS: Final = 60.0
"""Timeout for one piece of the WAL."""
_FULL_PAUSE: Final = 0.1

_log = logging.getLogger(__name__)


class RemoteTables:
    """Reads through the server."""

    def __init__(self, append: AppendClient) -> None:
        self._append = append

    def wal_opener(self, channels: Sequence[str]) -> WalOpener:
        return lambda: RemoteWalView(self._append, channels)

    def uncommitted(self) -> None:
        return None  # only the server can read the log

    def imports(self) -> RemoteImports:
        return RemoteImports(self._append)

    def changes_start(self, pchannel: str, collection_id: int, after: ChangePosition) -> ChangeStart:
        from millrace.wal.visible.catalog import VChannelInfo  # not needed by producers and consumers
        from millrace.wal.visible.changes import ChangeStart

        request = {"pchannel": pchannel, "collection_id": collection_id}
        said = self._append.call(calls.DESCRIBE_CHECKPOINT, request)
        found = {name: VChannelInfo.from_json(info) for name, info in said["vchannels"].items()}
        return ChangeStart.of(after, int(said["time_tick"]), found)

    def read(self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection) -> pa.Table:
        """Read the whole answer into memory here; the server holds one piece at a time."""
        with self._append.read(collection, at=at, seconds=seconds, selection=selection) as rows:
            return rows.read_all()

    def get(
        self,
        collection: CollectionInfo,
        keys: pa.RecordBatch,
        *,
        at: int | None,
        seconds: float,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        with self._append.get(collection, keys, at=at, seconds=seconds, columns=columns) as rows:
            return rows.read_all()

    def history(
        self,
        collection: CollectionInfo,
        keys: pa.RecordBatch,
        *,
        after: int | None,
        until: int | None,
        seconds: float,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        with self._append.history(collection, keys, after=after, until=until, seconds=seconds, columns=columns) as rows:
            return rows.read_all()

    def stream(
        self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection
    ) -> pa.RecordBatchReader:
        return self._append.read(collection, at=at, seconds=seconds, selection=selection)

    def dataset(self, collection: CollectionInfo, *, at: int | None, seconds: float) -> CollectionDataset:
        """Return a dataset: the server selects columns, and filters are applied here."""
        from millrace.client.dataset import (  # imports pyarrow.dataset
            CollectionDataset,
            filter_reader,
            referenced_columns,
        )

        tick = max(self._append.tick(name, persist=False) for name in collection.pchannels) if at is None else at
        with self.stream(collection, at=tick, seconds=seconds, selection=Selection(limit=0)) as nothing:
            fields = nothing.schema

        def scan(columns: Sequence[str], found: pc.Expression | None) -> pa.RecordBatchReader:
            wanted = Selection(columns=tuple(dict.fromkeys([*columns, *referenced_columns(found, fields)])))
            rows = self.stream(collection, at=tick, seconds=seconds, selection=wanted)
            return rows if found is None else filter_reader(rows, columns, found)

        return CollectionDataset(fields, scan)

    def table(self, name: str) -> ds.Dataset:
        """Raise InvalidArgument: the files are on the server."""
        raise InvalidArgument(f"the table {name} is on the server: open it on its host, or read the collection")

    def published_uri(self, collection: CollectionInfo) -> str:
        """Raise InvalidArgument: the files are on the server."""
        raise InvalidArgument(
            f"the published table of {collection.name} is on the server: open it on its host, or read the collection"
        )

    def count(self, collection: CollectionInfo, *, at: int | None, seconds: float, where: str | None) -> int:
        return self._append.count(collection, at=at, seconds=seconds, where=where)


class RemoteWalView:
    """The ``wal`` table as the server describes it (implements WalView), each PChannel as of its first use.

    It is read in pieces, each a call of its own that starts at a message id, so that reading continues after the server
    restarts. Memory: one piece, about PIECE_BYTES or a row group of the table.
    """

    def __init__(self, append: AppendClient, channels: Sequence[str]) -> None:
        """Initialize the view.

        The server may leave out messages of other channels than `channels` (PChannels, VChannels).
        """
        self._append = append
        self._channels = channels
        self._known: dict[str, dict[str, Any]] = {}

    @property
    def version(self) -> int:
        """The newest version that the server has named."""
        return max((int(each["version"]) for each in self._known.values()), default=-1)

    def refreshed(self) -> RemoteWalView:
        found = RemoteWalView(self._append, self._channels)
        for pchannel in self._known:
            found._of(pchannel)
        return found

    def last_tick(self, pchannel: str) -> int:
        return int(self._of(pchannel)["last_tick"])

    def trimmed(self, pchannel: str) -> tuple[int, LogId]:
        tick, earliest = self._of(pchannel)["trimmed"]
        return int(tick), LogId(*earliest)

    def confirmed_at(self, pchannel: str, tick: int) -> MessageId:
        return MessageId(
            *self._append.call(calls.DESCRIBE_WAL, {"pchannel": pchannel, "confirmed_at": tick})["confirmed"]
        )

    def messages(
        self,
        pchannel: str,
        *,
        start: MessageId | None = None,
        after_tick: int = 0,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        own = [name for name in self._channels if pchannel_of(name) == pchannel]
        request: dict[str, Any] = {
            "start": start,
            "after": after_tick,
            "up_to": self.last_tick(pchannel),
            "columns": columns if columns is None else list(columns),
            "principals": columns is None,
            "vchannels": None if not own or pchannel in self._channels else own,
        }
        first = _read_piece(self._append.service, pchannel, request | {"max_bytes": FIRST_PIECE_BYTES})
        return self._pieces(pchannel, request, *first)

    def _pieces(
        self, pchannel: str, request: dict[str, Any], batches: list[pa.RecordBatch], follows: list[int] | None
    ) -> Iterator[pa.Table]:
        while True:
            for batch in batches:
                yield pa.Table.from_batches([from_wire_rows(batch)])
            if follows is None:
                return
            piece = request | {"start": follows, "max_bytes": PIECE_BYTES}
            batches, follows = _read_piece(self._append.service, pchannel, piece)

    def _of(self, pchannel: str) -> dict[str, Any]:
        found = self._known.get(pchannel)
        if found is None:
            found = self._known[pchannel] = self._append.call(calls.DESCRIBE_WAL, {"pchannel": pchannel})
        return found


class RemoteImports:
    """The rows of Imports, which the server reads from its staged files (implements Imports)."""

    def __init__(self, append: AppendClient) -> None:
        self._append = append

    def rows(self, named: VChannelImport) -> Iterator[tuple[int, pa.RecordBatch]]:
        for batch, said in read_import(self._append.service, pchannel_of(named.vchannel), named.tick):
            yield int(said["partition"]), batch.cast(named.schema.arrow())


def _read_piece(
    service: RemoteLogService, pchannel: str, request: Mapping[str, Any]
) -> tuple[list[pa.RecordBatch], list[int] | None]:
    """Read a piece of a PChannel's messages in the ``wal`` table.

    Returns the batches and the message id of the next piece, or None after the last. While the server is full, the call
    is retried until the deadline. See :meth:`millrace.node.append.history_reads.HistoryReads.stream`.
    """
    ticket = {"extension": APPEND_ROLE, calls.READ_WAL.ticket: pchannel, **request}
    until = Deadline.after(service.deadline)

    def piece(link: Link, deadline: Deadline) -> tuple[list[pa.RecordBatch], list[int] | None]:
        batches, said = link.get(ticket, timeout=PIECE_SECONDS)
        if "next" not in said:
            raise ConnectionLost("the answer ended early")
        return [batch for batch in batches if batch.num_rows], said["next"]

    while True:
        try:
            return service.call_with_retry(piece, seconds=service.deadline)
        except ServerFull:
            if not until.pause(jittered(_FULL_PAUSE)):
                raise


def read_import(service: RemoteLogService, pchannel: str, tick: int) -> Iterator[tuple[pa.RecordBatch, dict[str, Any]]]:
    """Stream the rows of the Import at a tick, each batch with the server's metadata.

    A broken stream is resumed after the rows that arrived.

    Raises LogUnavailable, and what reading the files on the server raises.
    """
    came = 0
    until = Deadline.after(service.deadline)
    while True:
        ticket = {"extension": APPEND_ROLE, calls.READ_IMPORT.ticket: pchannel, "at": tick, "skip": came}
        link = service.link(until)
        try:
            link.check()
            _, parts = link.parts(ticket, timeout=READ_SECONDS)
            for batch, said in parts:
                if batch.num_rows:
                    came += batch.num_rows
                    until = Deadline.after(service.deadline)
                    yield batch, said or {}
                elif said is not None and "rows" in said:
                    return
            reason: Exception = ConnectionLost("the answer ended early")
        except ConnectionLost as error:
            service.drop_link(link)
            reason = error
        except ServerFull as error:
            reason = error
        if not until.pause(jittered(_FULL_PAUSE)):
            raise LogUnavailable(f"the rows of an import broke off after {came:,} rows: {reason}") from reason
