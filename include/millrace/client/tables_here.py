"""The tables of a deployment whose data folder is here, as its client reads them.

This module brings the libraries of tables; a client of a server elsewhere does without (millrace.client.client).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.settings import Settings
from millrace.catalog.collection import Collection
from millrace.client.consume.positions import Positions
from millrace.client.consume.scan import Histories, table
from millrace.client.dataset import CollectionDataset, looked_at
from millrace.rpc.selection import Selection
from millrace.tables.collections.changes import ImportedFiles, start_at
from millrace.tables.read.arrow import Matching, count_rows, stream_of
from millrace.tables.read.freshness import Ticking, plan_fresh, read_fresh
from millrace.tables.read.plan import ReadPlan
from millrace.wal.visible.changes import Position, Start


class TablesHere:
    """Reads the files of ``settings.data_dir`` (the protocol Tables of millrace.client.client)."""

    def __init__(self, settings: Settings, append: Ticking) -> None:
        self._settings = settings
        self._append = append

    def histories(self, channels: Sequence[str]) -> Histories:
        return table(self._settings.wal_uri)

    def imports(self) -> ImportedFiles:
        return ImportedFiles.of(self._settings)

    def start(self, pchannel: str, collection_id: int, after: Position) -> Start:
        return start_at(self._settings, pchannel, collection_id, after)

    def groups(self) -> Positions:
        return Positions(self._settings.data_dir / "coord")

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

    def count(self, collection: Collection, *, at: int | None, seconds: float, where: str | None) -> int:
        return count_rows(self._plan(collection, at, seconds), where=where)

    def _plan(self, collection: Collection, at: int | None, seconds: float) -> ReadPlan:
        channels = collection.pchannels
        return plan_fresh(
            self._settings, collection.name, collection.id, channels, self._append, at=at, seconds=seconds
        )
