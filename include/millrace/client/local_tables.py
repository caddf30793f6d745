"""Table access for a client whose data folder is on this machine.

This module imports the table libraries; a client of a remote server does not load them (millrace.client.database).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from millrace.base.errors import PositionTruncated, TableNotFound
from millrace.base.settings import Settings
from millrace.catalog.collection import CollectionInfo
from millrace.client.append_client import AppendClient
from millrace.client.consume.scan import UncommittedReader, WalOpener, wal_opener
from millrace.client.dataset import CollectionDataset, referenced_columns
from millrace.client.produce.producer_recovery import AppliedMessage
from millrace.message.ids import MessageId
from millrace.rpc.outcome import AppendResult
from millrace.rpc.selection import Selection
from millrace.runtime.heartbeat import STREAMING_NODE, query_runs
from millrace.tables.collections.changes import ImportedFiles, change_start_at
from millrace.tables.collections.data_tables import find_published
from millrace.tables.read.arrow import ArrowFilter, count_rows, read_stream, stored_dataset
from millrace.tables.read.freshness import TickSource, plan_fresh, read_fresh, require_confirmed_ticks
from millrace.tables.read.key_history import read_key_history
from millrace.tables.read.keys import read_keys
from millrace.tables.read.open_tables import OpenTablesPool
from millrace.tables.read.plan import ReadPlan
from millrace.tables.wal.log_replay import UncommittedMessages
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.visible.changes import ChangePosition, ChangeStart


class LocalTables:
    """Reads the files of ``settings.data_dir`` (implements Tables of millrace.client.database)."""

    def __init__(self, settings: Settings, append: AppendClient) -> None:
        self._settings = settings
        self._append = append
        self._open = OpenTablesPool()

    def wal_opener(self, channels: Sequence[str]) -> WalOpener:
        return wal_opener(self._settings.wal_uri)

    def uncommitted(self) -> UncommittedReader:
        return UncommittedMessages(self._settings.wal_uri, self._append.service)

    def imports(self) -> ImportedFiles:
        return ImportedFiles.of(self._settings)

    def changes_start(self, pchannel: str, collection_id: int, after: ChangePosition) -> ChangeStart:
        return change_start_at(self._settings, pchannel, collection_id, after)

    def read(self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection) -> pa.Table:
        source = self._source(collection)
        with self._open.taken() as tables:
            return read_fresh(
                *source, at=at, seconds=seconds, selection=selection, from_log=self._no_job(), tables=tables
            )

    def get(
        self,
        collection: CollectionInfo,
        keys: pa.RecordBatch,
        *,
        at: int | None,
        seconds: float,
        columns: Sequence[str] | None,
    ) -> pa.Table:
        with self._open.taken() as tables:
            plan = plan_fresh(*self._source(collection), at=at, seconds=seconds, from_log=self._no_job(), tables=tables)
            return read_keys(plan, keys, columns=columns, tables=tables)

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
        with self._open.taken() as tables:
            plan = plan_fresh(
                *self._source(collection), at=until, seconds=seconds, from_log=self._no_job(), tables=tables
            )
            return read_key_history(plan, keys, after=after, columns=columns, tables=tables)

    def stream(
        self, collection: CollectionInfo, *, at: int | None, seconds: float, selection: Selection
    ) -> pa.RecordBatchReader:
        return read_stream(self._plan(collection, at, seconds), selection=selection)

    def dataset(self, collection: CollectionInfo, *, at: int | None, seconds: float) -> CollectionDataset:
        plan = self._plan(collection, at, seconds)
        fields = plan.schema.arrow()

        def scan(columns: Sequence[str], found: pc.Expression | None) -> pa.RecordBatchReader:
            matching = None if found is None else ArrowFilter(found, tuple(referenced_columns(found, fields)))
            return read_stream(plan, selection=Selection(columns=tuple(columns)), arrow_filter=matching)

        return CollectionDataset(fields, scan)

    def table(self, name: str) -> ds.Dataset:
        """Return one of the deployment's own Delta tables at its current version. Raises TableNotFound."""
        return stored_dataset(self._settings, name)

    def published_uri(self, collection: CollectionInfo) -> str:
        uri = find_published(self._settings, collection.id)
        if uri is None:
            raise TableNotFound(
                f"{collection.name} is not published yet: the flusher publishes it after its first rows, unless the"
                " setting publish is off"
            )
        return uri

    def count(self, collection: CollectionInfo, *, at: int | None, seconds: float, where: str | None) -> int:
        return count_rows(self._plan(collection, at, seconds), where=where)

    def _plan(self, collection: CollectionInfo, at: int | None, seconds: float) -> ReadPlan:
        return plan_fresh(*self._source(collection), at=at, seconds=seconds, from_log=self._no_job())

    def _source(self, collection: CollectionInfo) -> tuple[Settings, str, int, Sequence[str], AppendClient]:
        """Return what a read needs to know of its collection: the first arguments of `plan_fresh` and `read_fresh`."""
        return self._settings, collection.name, collection.id, collection.pchannels, self._append

    def _no_job(self) -> bool:
        """Return whether no streaming node of this host will bring the tables up to date."""
        return not query_runs(self._settings, STREAMING_NODE)


def applied_messages(
    settings: Settings, append: TickSource, pchannel: str, producer_id: int, after: int
) -> Iterator[AppliedMessage]:
    """Yield a producer's messages on a PChannel in the ``wal`` table after the tick `after`.

    Waits until the table holds everything up to now. Raises TickNotReached, PositionTruncated.
    """
    words = f"what producer {producer_id} sent before"
    require_confirmed_ticks(settings, words, [pchannel], append, None, settings.read_deadline)
    wal = WalSnapshot.open(settings.wal_uri)
    if wal is None:
        return
    trimmed, earliest = wal.trimmed(pchannel)
    if trimmed > after:
        raise PositionTruncated(
            f"the WAL of {pchannel} was trimmed up to tick {trimmed}, and {words} may lie before: read whether its"
            " last rows are there,"
            " and load the rest as a new load",
            earliest=earliest,
        )
    columns = [
        "vchannel",
        "producer_id",
        "epoch",
        "sequence",
        "time_tick",
        "ledger",
        "entry",
        "index",
        "ordinal",
        "payload",
    ]
    for rows in wal.messages(pchannel, after_tick=after, columns=columns):
        for row in rows.filter(pc.equal(rows["producer_id"], producer_id)).to_pylist():
            place = MessageId(row["ledger"], row["entry"], row["index"], row["ordinal"])
            result = AppendResult(place, None, row["time_tick"], duplicate=True)
            yield AppliedMessage(row["vchannel"], row["epoch"], row["sequence"], row["payload"], result)
