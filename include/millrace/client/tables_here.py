"""The tables of a deployment whose data folder is here, as its client reads them.

This module brings the libraries of tables; a client of a server elsewhere does without (millrace.client.client).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from millrace.base.errors import PositionTruncated
from millrace.base.settings import Settings
from millrace.catalog.collection import Collection
from millrace.client.append_client import AppendClient
from millrace.client.consume.consumer import Groups
from millrace.client.consume.positions import FilePositions
from millrace.client.consume.scan import Histories, UntakenLog, table
from millrace.client.dataset import CollectionDataset, looked_at
from millrace.client.produce.resuming import Stood
from millrace.client.tables_served import GroupsServed
from millrace.message.ids import MessageId
from millrace.rpc.outcome import AppendResult
from millrace.rpc.selection import Selection
from millrace.tables.collections.changes import ImportedFiles, start_at
from millrace.tables.read.arrow import Matching, count_rows, stored_table, stream_of
from millrace.tables.read.freshness import Ticking, all_confirmed, plan_fresh, read_fresh
from millrace.tables.read.plan import ReadPlan
from millrace.tables.wal.log_replay import Untaken
from millrace.tables.wal.reader import WalSnapshot
from millrace.wal.visible.changes import Position, Start


class TablesHere:
    """Reads the files of ``settings.data_dir`` (the protocol Tables of millrace.client.client)."""

    def __init__(self, settings: Settings, append: AppendClient) -> None:
        self._settings = settings
        self._append = append

    def histories(self, channels: Sequence[str]) -> Histories:
        return table(self._settings.wal_uri)

    def untaken(self) -> UntakenLog:
        return Untaken(self._settings.wal_uri, self._append.service)

    def imports(self) -> ImportedFiles:
        return ImportedFiles.of(self._settings)

    def start(self, pchannel: str, collection_id: int, after: Position) -> Start:
        return start_at(self._settings, pchannel, collection_id, after)

    def groups(self) -> Groups:
        if self._settings.meta_store:  # which the server knows, and no client
            return GroupsServed(self._append)
        return FilePositions(self._settings.data_dir / "coord")

    def read(self, collection: Collection, *, at: int | None, seconds: float, selection: Selection) -> pa.Table:
        name, channels = collection.name, collection.pchannels
        return read_fresh(
            self._settings, name, collection.id, channels, self._append, at=at, seconds=seconds, selection=selection
        )

    def stream(
        self, collection: Collection, *, at: int | None, seconds: float, selection: Selection
    ) -> pa.RecordBatchReader:
        return stream_of(self._plan(collection, at, seconds), selection=selection)

    def dataset(self, collection: Collection, *, at: int | None, seconds: float) -> CollectionDataset:
        plan = self._plan(collection, at, seconds)
        fields = plan.schema.arrow()

        def scan(columns: Sequence[str], found: pc.Expression | None) -> pa.RecordBatchReader:
            matching = None if found is None else Matching(found, tuple(looked_at(found, fields)))
            return stream_of(plan, selection=Selection(columns=tuple(columns)), matching=matching)

        return CollectionDataset(fields, scan)

    def table(self, name: str) -> ds.Dataset:
        """One of the deployment's own Delta tables, as it is now. Raises TableNotFound."""
        return stored_table(self._settings, name)

    def count(self, collection: Collection, *, at: int | None, seconds: float, where: str | None) -> int:
        return count_rows(self._plan(collection, at, seconds), where=where)

    def _plan(self, collection: Collection, at: int | None, seconds: float) -> ReadPlan:
        channels = collection.pchannels
        return plan_fresh(
            self._settings, collection.name, collection.id, channels, self._append, at=at, seconds=seconds
        )


def stood(settings: Settings, append: Ticking, pchannel: str, producer_id: int, after: int) -> Iterator[Stood]:
    """What a producer has on a PChannel in the ``wal`` table behind the tick `after`, which is waited for up to now. Raises TickNotReached,
    PositionTruncated."""
    words = f"what producer {producer_id} sent before"
    all_confirmed(settings, words, [pchannel], append, None, settings.read_deadline)
    wal = WalSnapshot.open(settings.wal_uri)
    if wal is None:
        return
    trimmed, earliest = wal.trimmed(pchannel)
    if trimmed > after:
        raise PositionTruncated(
            f"the WAL of {pchannel} was trimmed up to tick {trimmed}, and {words} may lie before: read whether its last rows are there,"
            " and load the rest as another load",
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
            yield Stood(row["vchannel"], row["epoch"], row["sequence"], row["payload"], result)
